"""Profiles: which module, line and operator time goes to, a GPU's too (``cuvil.profile``)."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any, NamedTuple

from cuvil.profile_device import (
    TORCH_IS_PROFILING,
    Activity,
    Counter,
    Stream,
    read,
    read_counters,
    torch_is_profiling,
    total_ns,
)

BY = ("line", "module", "operator", "kernel")
_OUTSIDE = "(outside of module calls)"

# What the own time of a call is, beside the steps and calls inside of it.
_OWN_TIME = {
    "call": "(eager: Python and operators)",
    "plan": "(plan: guards, arguments, result)",
    "preparation": "(trace, or comparison of plan and eager)",
}


@dataclass(frozen=True, slots=True)
class Site:
    """What an interval was: a step of a plan, or a call of a module, and the user's line that it stands for."""

    kind: str  # "step", "call", "plan", "preparation"
    module: str
    type: str
    file: str
    line: int
    function: str
    operator: str

    @property
    def place(self) -> str:
        return f"{self.file}:{self.line}" if self.file else "(unknown line)"

    def key(self, by: str) -> str:
        if by == "line":
            return self.place
        if by == "module":
            return self.module
        return self.operator or _OWN_TIME[self.kind]


class Interval(NamedTuple):
    """One timed step or call."""

    start_ns: int
    end_ns: int
    site: Site
    depth: int  # intervals of its thread that it is inside of
    own_ns: int  # without the intervals inside of it


@dataclass(frozen=True, slots=True)
class Thread:
    """The intervals of one thread, each behind the one that it is inside of."""

    name: str
    id: int
    intervals: list[Interval]


@dataclass(slots=True)
class Row:
    """One line of a table; times are own times, so that the rows' shares add up to one."""

    key: str
    calls: int = 0  # by="kernel": launches
    total_ns: int = 0  # on the host
    inclusive_ns: int = 0  # by="module": with everything below it
    kernels: int = 0  # kernels, copies and fills of a GPU
    gpu_ns: int = 0
    gpu_inclusive_ns: int = 0
    bytes: int = 0  # by="kernel": of copies and fills
    line: str = ""  # by="kernel": where most of its time comes from

    def to_dict(self, by: str, profile: Profile) -> dict[str, Any]:
        gpu_share = self.gpu_ns / profile.device_ns if profile.device_ns else 0.0
        if by == "kernel":
            mean = self.gpu_ns / self.calls
            result = {by: self.key, "calls": self.calls, "gpu_ns": self.gpu_ns, "mean_ns": mean, "share": gpu_share}
            return result | {"bytes": self.bytes, "line": self.line}
        result = {
            by: self.key,
            "calls": self.calls,
            "total_ns": self.total_ns,
            "mean_ns": self.total_ns / self.calls if self.calls else 0.0,
            "share": self.total_ns / profile.recorded_ns if profile.recorded_ns else 0.0,
            "kernels": self.kernels,
            "gpu_ns": self.gpu_ns,
            "gpu_share": gpu_share,
        }
        inclusive = {"inclusive_ns": self.inclusive_ns, "gpu_inclusive_ns": self.gpu_inclusive_ns}
        return result | inclusive if by == "module" else result


def _nested(records: Iterable[tuple[int, int, int]], sites: list[Site]) -> list[Interval]:
    ordered = sorted(records, key=lambda record: (record[0], -record[1]))
    own = [end - start for start, end, _ in ordered]
    depths = []
    stack: list[int] = []
    for i, (start, end, _) in enumerate(ordered):
        while stack and ordered[stack[-1]][1] <= start:
            stack.pop()
        if stack:
            own[stack[-1]] -= end - start
        depths.append(len(stack))
        stack.append(i)
    return [
        Interval(start, end, sites[site], depth, own_ns)
        for (start, end, site), depth, own_ns in zip(ordered, depths, own, strict=True)
    ]


class Profile:
    """What ``with cuvil.profile(path) as p:`` gives: records while the block lasts, and answers afterwards.

    Every step of a plan is an interval, and every intercepted module call, at any depth. Inside a plan no module is
    called; there the steps name the modules they come from. On a GPU, every kernel and copy is attributed to the step or
    the module call that asked for it, inside of CUDA graphs too.
    """

    def __init__(self, path: str | os.PathLike[str] | None = None) -> None:
        self._path = None if path is None else os.fspath(path)
        self._number: int | None = None
        self._pid = os.getpid()
        self._ended = False
        self.threads: list[Thread] = []
        self.streams: list[Stream] = []  # of GPUs
        self.counters: list[Counter] = []  # of GPUs, sampled
        self.start_ns = self.end_ns = 0
        self.dropped = 0  # intervals for which there was no room
        self.dropped_kernels = 0
        self.recorded_ns = 0  # the time of all outermost calls, over all threads
        self.device_ns = 0  # the durations of all kernels, copies and fills
        self.raw_kernel_ns = 0  # of all kernels, as CUPTI recorded them
        self.notes: list[str] = []  # sentences on what is missing

    def __enter__(self) -> Profile:
        if self._number is not None:
            raise RuntimeError("a Profile is taken once: call cuvil.profile() for another one")
        folder = os.path.dirname(os.path.abspath(self._path)) if self._path is not None else None
        if folder is not None and not os.path.isdir(folder):
            raise FileNotFoundError(f"there is no folder {folder!r} to write the profile to")
        from cuvil import _native

        self._number = _native.profile_start(TORCH_IS_PROFILING if torch_is_profiling() else "")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        from cuvil import _native

        assert self._number is not None
        self._take(_native.profile_stop(self._number, torch_is_profiling()))
        if self._path is None or os.getpid() != self._pid:
            return
        try:
            self.save_trace(self._path)
        except OSError as failure:
            if error is None:
                raise
            # The block's own exception is the one to raise.
            error.add_note(f"cuvil: the profile could not be written either: {failure}")

    def _take(self, record: dict[str, Any] | None) -> None:
        self._ended = True
        if record is None or os.getpid() != self._pid:
            self.notes.append("This process was forked inside of the profile, which stays with its parent.")
            return
        sites = [Site(**site) for site in record["sites"]]
        self.start_ns, self.end_ns, self.dropped = record["start_ns"], record["end_ns"], record["dropped"]
        for thread in record["threads"]:
            intervals = _nested(struct.iter_unpack("=QQQ", thread["records"]), sites)
            self.threads.append(Thread(thread["name"] or f"thread {thread['id']}", thread["id"], intervals))
        self.recorded_ns = sum(interval.own_ns for interval in self.intervals())
        self.notes += record["notes"]
        self.counters = read_counters(record["counters"])
        if record["device"] is not None:
            self.streams = read(record["device"], sites)
            self.dropped_kernels = record["device"]["dropped"]
            self.raw_kernel_ns = record["device"]["recorded_ns"]
            self.device_ns = total_ns(self.activities())
        if self.dropped:
            self.notes.append(f"{self.dropped:,} intervals found no room and are missing.")
        if self.dropped_kernels:
            self.notes.append(f"{self.dropped_kernels:,} kernels or copies found no room and are missing.")
        if not record["enabled"]:
            self.notes.append("Cuvil was off: only calls that it intercepts are recorded (cuvil.enable()).")
        elif not any(thread.intervals for thread in self.threads):
            self.notes.append("No torch.nn.Module was called.")

    def _need_end(self) -> None:
        if not self._ended:
            raise RuntimeError("the profile has not ended: look at it after the with block")

    def intervals(self) -> Iterator[Interval]:
        """All intervals, thread by thread."""
        self._need_end()
        for thread in self.threads:
            yield from thread.intervals

    def activities(self) -> Iterator[Activity]:
        """All kernels, copies and fills, stream by stream."""
        self._need_end()
        for stream in self.streams:
            yield from stream.activities

    @property
    def attributed_share(self) -> float:
        """The part of all kernels' time whose line is known; 1 if there is none."""
        kernels = [activity for activity in self.activities() if activity.kind == "kernel"]
        known = [kernel for kernel in kernels if kernel.site is not None and kernel.site.file]
        return total_ns(known) / total_ns(kernels) if kernels else 1.0

    def rows(self, by: str = "line") -> list[Row]:
        """The table's rows, the dearest first; by the GPU's time if there is any."""
        if by not in BY:
            raise ValueError(f"by={by!r}: choose one of {', '.join(map(repr, BY))}")
        rows = self._kernel_rows() if by == "kernel" else self._site_rows(by)
        return sorted(rows.values(), key=lambda row: (-row.gpu_ns, -row.total_ns, row.key))

    def _site_rows(self, by: str) -> dict[str, Row]:
        rows: dict[str, Row] = {}
        for interval in self.intervals():
            key = interval.site.key(by)
            row = rows.setdefault(key, Row(key))
            row.calls += 1
            row.total_ns += interval.own_ns
        for activity in self.activities():
            key = _OUTSIDE if activity.site is None else activity.site.key(by)
            row = rows.setdefault(key, Row(key))
            row.kernels += 1
            row.gpu_ns += activity.duration_ns
        if by == "module":
            for row in list(rows.values()):
                path = row.key
                while path:
                    outer = rows.setdefault(path, Row(path))
                    outer.inclusive_ns += row.total_ns
                    outer.gpu_inclusive_ns += row.gpu_ns
                    path = path.rpartition(".")[0]
        return rows

    def _kernel_rows(self) -> dict[str, Row]:
        rows: dict[str, Row] = {}
        lines: dict[str, dict[str, int]] = {}
        for activity in self.activities():
            row = rows.setdefault(activity.name, Row(activity.name))
            row.calls += 1
            row.gpu_ns += activity.duration_ns
            row.bytes += activity.bytes
            line = _OUTSIDE if activity.site is None else activity.site.place
            times = lines.setdefault(activity.name, {})
            times[line] = times.get(line, 0) + activity.duration_ns
        for name, row in rows.items():
            row.line = max(lines[name], key=lines[name].__getitem__)
        return rows

    def table(self, by: str = "line", limit: int | None = 40) -> str:
        """The time by "line", "module", "operator" or "kernel" as text: how often, own time in total and on average, its
        share; and the same of a GPU, if one was used."""
        from cuvil import profile_report

        return profile_report.table(self, by, limit)

    def to_dict(self) -> dict[str, Any]:
        """Everything that the tables show, for programs; times in nanoseconds, shares of ``recorded_ns`` or,
        for a GPU, of ``device_ns``."""
        return {
            "duration_ns": self.end_ns - self.start_ns,
            "recorded_ns": self.recorded_ns,
            "device_ns": self.device_ns,
            "attributed_share": self.attributed_share,
            "dropped": self.dropped,
            "dropped_kernels": self.dropped_kernels,
            "notes": list(self.notes),
            "threads": [{"name": t.name, "id": t.id, "intervals": len(t.intervals)} for t in self.threads],
            "streams": [{"name": s.name, "activities": len(s.activities)} for s in self.streams],
            "counters": [counter.to_dict() for counter in self.counters],
            **{f"{by}s": [row.to_dict(by, self) for row in self.rows(by)] for by in BY},
        }

    def save_trace(self, path: str | os.PathLike[str]) -> None:
        """Write a trace that https://ui.perfetto.dev and chrome://tracing open; the file appears whole or not at all."""
        from cuvil import profile_trace

        self._need_end()
        profile_trace.save(self, os.fspath(path))

    def save_html(self, path: str | os.PathLike[str]) -> None:
        """Write one page with the tables and a timeline; it loads nothing from anywhere."""
        from cuvil import profile_report

        self._need_end()
        profile_report.save_page(self, os.fspath(path))
