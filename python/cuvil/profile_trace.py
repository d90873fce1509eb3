"""A profile in the Trace Event Format of Chrome and Perfetto, times in microseconds: three tracks for each thread, one for
each CUDA stream, and counters."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from typing import Any

from cuvil.profile_device import Activity, Counter, Stream
from cuvil.profiling import Interval, Profile, Thread

_TRACKS = ("modules", "lines", "plan steps")

Event = dict[str, Any]


class _Slices:
    """Makes the slices of one track; times count from the profile's start."""

    def __init__(self, pid: int, tid: int, zero_ns: int) -> None:
        self.pid, self.tid, self.zero_ns = pid, tid, zero_ns

    def make(self, name: str, category: str, start_ns: int, end_ns: int, arguments: dict[str, object]) -> Event:
        return {
            "ph": "X",
            "name": name,
            "cat": category,
            "pid": self.pid,
            "tid": self.tid,
            "ts": (start_ns - self.zero_ns) / 1000,
            "dur": (end_ns - start_ns) / 1000,
            "args": arguments,
        }


def _arguments(interval: Interval) -> dict[str, object]:
    site = interval.site
    arguments: dict[str, object] = {"module": site.module, "line": site.place, "function": site.function}
    if site.kind == "step":
        return arguments | {"operator": site.operator}
    return arguments | {"type": site.type, "answered_by": "eager" if site.kind == "call" else site.kind}


def _runs_of_steps(intervals: Iterable[Interval]) -> Iterator[tuple[Interval | None, list[Interval]]]:
    """Each call by itself with no steps, and each unbroken run of steps with the call that they are inside of."""
    stack: list[Interval] = []
    run: list[Interval] = []
    parent: Interval | None = None
    for interval in intervals:
        del stack[interval.depth :]
        inside = stack[-1] if stack else None
        stack.append(interval)
        if run and (interval.site.kind != "step" or interval.depth != run[-1].depth or inside is not parent):
            yield parent, run
            run = []
        if interval.site.kind == "step":
            parent = inside
            run.append(interval)
        else:
            yield interval, []
    if run:
        yield parent, run


def _module_slices(parent: Interval | None, run: list[Interval], slices: _Slices) -> Iterator[Event]:
    """The modules that a plan's steps come from, nested as their calls were when the plan was traced."""
    base = parent.site.module + "." if parent is not None else ""
    open_modules: list[tuple[str, int]] = []  # path, start
    last_ns = 0

    def close(down_to: int) -> Iterator[Event]:
        while len(open_modules) > down_to:
            path, start_ns = open_modules.pop()
            yield slices.make(path, "planned module", start_ns, last_ns, {"module": path})

    for step in run:
        module = step.site.module
        names = module[len(base) :].split(".") if module.startswith(base) and len(module) > len(base) else []
        paths = [base + ".".join(names[: i + 1]) for i in range(len(names))]
        shared = 0
        while shared < min(len(paths), len(open_modules)) and paths[shared] == open_modules[shared][0]:
            shared += 1
        yield from close(shared)
        open_modules += [(path, step.start_ns) for path in paths[shared:]]
        last_ns = step.end_ns
    yield from close(0)


def _line_slices(run: list[Interval], slices: _Slices) -> Iterator[Event]:
    first = 0
    for i in range(1, len(run) + 1):
        if i == len(run) or run[i].site.place != run[first].site.place:
            site = run[first].site
            yield slices.make(site.place, "line", run[first].start_ns, run[i - 1].end_ns, {"function": site.function})
            first = i


def _about(name: str, slices: _Slices) -> Iterator[Event]:
    about = {"ph": "M", "pid": slices.pid, "tid": slices.tid}
    yield {**about, "name": "thread_name", "args": {"name": name}}
    yield {**about, "name": "thread_sort_index", "args": {"sort_index": slices.tid}}


def _thread_events(thread: Thread, index: int, pid: int, zero_ns: int) -> Iterator[Event]:
    modules, lines, steps = (_Slices(pid, len(_TRACKS) * index + track + 1, zero_ns) for track in range(len(_TRACKS)))
    for track, slices in zip(_TRACKS, (modules, lines, steps), strict=True):
        yield from _about(f"{thread.name}: {track}", slices)
    for call, run in _runs_of_steps(thread.intervals):
        if not run:
            assert call is not None
            span = (call.start_ns, call.end_ns)
            yield modules.make(f"{call.site.module} ({call.site.type})", call.site.kind, *span, _arguments(call))
            yield lines.make(call.site.place, "line", *span, {"function": call.site.function})
            if call.site.kind == "plan":
                yield steps.make(f"plan of {call.site.module}", "plan", *span, _arguments(call))
            continue
        yield from _module_slices(call, run, modules)
        yield from _line_slices(run, lines)
        for step in run:
            yield steps.make(step.site.operator, "step", step.start_ns, step.end_ns, _arguments(step))


def _activity_arguments(activity: Activity) -> dict[str, object]:
    site = activity.site
    arguments: dict[str, object] = {"name": activity.name}
    if site is not None:
        operator = site.key("operator")
        arguments |= {"module": site.module, "line": site.place, "function": site.function, "operator": operator}
    if activity.kind == "kernel":
        arguments |= {"grid": list(activity.grid), "block": list(activity.block)}
    else:
        arguments["bytes"] = activity.bytes
        if activity.duration_ns:
            arguments["GB/s"] = round(activity.bytes / activity.duration_ns, 3)
    return arguments | {"in_cuda_graph": activity.in_graph}


def _stream_events(stream: Stream, first_tid: int, pid: int, zero_ns: int) -> Iterator[Event]:
    for index, lane in enumerate(stream.lanes()):
        slices = _Slices(pid, first_tid + index, zero_ns)
        name = stream.name if index == 0 else f"{stream.name}, branch {index + 1}"
        yield from _about(name, slices)
        for activity in lane:
            span = (activity.start_ns, activity.end_ns)
            yield slices.make(activity.name, activity.kind, *span, _activity_arguments(activity))


def _counter_events(counter: Counter, pid: int, zero_ns: int) -> Iterator[Event]:
    for time_ns, value in counter.samples:
        about: Event = {"ph": "C", "pid": pid, "tid": 0, "name": counter.name}
        yield {**about, "ts": (time_ns - zero_ns) / 1000, "args": {counter.unit: value}}


def events(profile: Profile, pid: int) -> Iterator[Event]:
    yield {"ph": "M", "pid": pid, "name": "process_name", "args": {"name": f"Python {pid}"}}
    for index, thread in enumerate(profile.threads):
        yield from _thread_events(thread, index, pid, profile.start_ns)
    tid = len(_TRACKS) * len(profile.threads) + 1
    for stream in profile.streams:
        yield from _stream_events(stream, tid, pid, profile.start_ns)
        tid += len(stream.lanes())
    for counter in profile.counters:
        yield from _counter_events(counter, pid, profile.start_ns)


def save_whole(path: str, parts: Iterable[str]) -> None:
    """Write a text file that appears under its name only when it is complete."""
    temporary = os.path.join(os.path.dirname(os.path.abspath(path)), f".{os.path.basename(path)}.{os.getpid()}.part")
    try:
        with open(temporary, "w", encoding="utf-8") as file:
            file.writelines(parts)
        os.replace(temporary, path)
    except BaseException:
        if os.path.exists(temporary):
            os.unlink(temporary)
        raise


def _parts(profile: Profile) -> Iterator[str]:
    from cuvil import __version__

    about = {"cuvil": __version__, "dropped": profile.dropped, "notes": profile.notes}
    yield '{"displayTimeUnit": "ns", "otherData": ' + json.dumps(about) + ', "traceEvents": [\n'
    separator = ""
    for event in events(profile, os.getpid()):
        yield separator + json.dumps(event)
        separator = ",\n"
    yield "\n]}\n"


def save(profile: Profile, path: str) -> None:
    save_whole(path, _parts(profile))
