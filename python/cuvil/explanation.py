"""What :func:`cuvil.explain` returns: the native record as data (``to_dict``) and as text (``str``)."""

from __future__ import annotations

import copy
import os
import sysconfig
from collections.abc import Iterable, Mapping
from typing import Any

_MAX_LINES = 12  # Source lines and refusals shown in text; to_dict() has all that are kept.
_MAX_BRANCHES = 5
_PACKAGES = ("site-packages", "dist-packages")
# What a branch asks, said of the times when the answer was yes.
_OUTCOMES = {"truth": "true", "none": "None", "loop": "went on"}
_STDLIB = sysconfig.get_paths()["stdlib"] + os.sep

_STATES = {
    "planned": "planned",
    "preparing": "a plan is being prepared; eager answers meanwhile",
    "comparing": "a plan is ready and will be compared with eager at the next call",
    "measuring": "a plan is right and being timed against eager",
    "refused": "runs as CPython would",
    "retired": "a plan was slower than eager and is out of use",
    "opted_out": "opted out",
    "waiting": "waits for a second call with the same kind of input",
    "eager": "runs as CPython would",
}


def count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def duration(nanoseconds: float) -> str:
    """Three significant digits in the unit that fits."""
    for limit, divisor, unit in ((1e3, 1, "ns"), (1e6, 1e3, "µs"), (1e9, 1e6, "ms")):
        if nanoseconds < limit:
            return f"{nanoseconds / divisor:.3g} {unit}"
    return f"{nanoseconds / 1e9:.3g} s"


def byte_size(size_bytes: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if size_bytes < 1024:
            return f"{size_bytes:.3g} {unit}"
        size_bytes /= 1024
    return f"{size_bytes:.3g} GiB"


def _place(file: object, line: object) -> str:
    """``file:line`` with the path cut to the part that tells something."""
    name = str(file)
    for prefix in (*(folder + os.sep for folder in _PACKAGES), _STDLIB):
        _, found, tail = name.rpartition(prefix)
        if found:
            name = tail
            break
    else:
        relative = os.path.relpath(name) if os.path.isabs(name) else name
        name = relative if not relative.startswith("..") else name
    return f"{name}:{line}" if line else name


def _shown(items: list[Any], noun: str) -> tuple[list[Any], list[str]]:
    rest = len(items) - _MAX_LINES
    return items[:_MAX_LINES], [f"    … {count(rest, noun)} more in to_dict()"] if rest > 0 else []


def _joined(counts: Mapping[str, int], zero: Iterable[str] = ()) -> str:
    keep = set(zero)
    parts = sorted(((n, k) for k, n in counts.items() if n or k in keep), reverse=True)
    return ", ".join(f"{k} {n:,}" for n, k in parts)


class Explanation:
    """One model's record at one moment; immutable."""

    def __init__(self, record: Mapping[str, Any]) -> None:
        self._record = dict(record)

    def to_dict(self) -> dict[str, Any]:
        """Everything, as dicts, lists, strings and numbers (times in ns, sizes in bytes); safe to change."""
        return copy.deepcopy(self._record)

    def __repr__(self) -> str:
        return f"<cuvil.Explanation of {self._record.get('type', 'a module')}: {self.summary()}>"

    def __str__(self) -> str:
        lines = [f"{self._record.get('type', 'module')}: {self.summary()}"]
        groups = self._groups()
        if not groups:
            lines.append("  No call of it has been seen while Cuvil was on. Call it, or pass arguments to explain().")
        for module, others in groups:
            lines += ["", _module_line(module), *_alike_lines(others)]
            plans: list[Mapping[str, Any]] = list(module.get("plans", []))
            lines += [_plan_line(number, plan) for number, plan in enumerate(plans, 1)]
            if plans:
                busiest = max(plans, key=lambda plan: int(plan.get("planned_calls", 0)))
                if len(plans) > 1:
                    lines.append(f"  plan {plans.index(busiest) + 1}, the busiest:")
                lines += _plan_details(busiest)
            lines += _branch_lines(module)
            lines += _refusal_lines(module)
        return "\n".join(lines)

    def brief(self) -> str:
        """The summary, a line for each module that Cuvil looked at, and the refusals."""
        lines = [f"{self._record.get('type', 'module')}: {self.summary()}"]
        for module, others in self._groups():
            lines += [f"  {_module_line(module)}", *(f"  {line}" for line in _alike_lines(others))]
            plans: list[Mapping[str, Any]] = list(module.get("plans", []))
            if plans:
                busiest = max(plans, key=lambda plan: int(plan.get("planned_calls", 0)))
                lines.append(
                    f"    {count(len(plans), 'plan')}, one for each kind of input; the busiest: "
                    f"{count(int(busiest.get('operators', 0)), 'operator')} in place of "
                    f"{count(int(busiest.get('python_frames', 0)), 'Python frame')}{_gain(busiest, ', ')}"
                )
            lines += [f"  {line}" for line in _refusal_lines(module)]
        return "\n".join(lines)

    def _groups(self) -> list[tuple[Mapping[str, Any], list[Mapping[str, Any]]]]:
        """Modules in order; those that fared exactly like the one before them (layers of a stack) go with it."""
        groups: list[tuple[Mapping[str, Any], list[Mapping[str, Any]]]] = []
        last: object = None
        for module in self._record.get("modules", []):
            refusals = [(r.get("code"), r.get("file"), r.get("line")) for r in module.get("refusals", [])]
            fate = (module.get("type"), module.get("state"), len(module.get("plans", [])), refusals)
            if groups and fate == last:
                groups[-1][1].append(module)
            else:
                groups.append((module, []))
            last = fate
        return groups

    def summary(self) -> str:
        """One line: how much of the model is planned, and who answered the calls."""
        modules: list[Mapping[str, Any]] = list(self._record.get("modules", []))
        if not modules:
            return "not seen yet"
        planned = [m for m in modules if m.get("state") == "planned"]
        whole = any(not m.get("path") for m in planned)
        if whole:
            how = "planned whole"
        elif planned:
            how = f"{count(len(planned), 'module')} planned, {count(len(modules) - len(planned), 'module')} not"
        else:
            root = next((m for m in modules if not m.get("path")), modules[0])
            how = _STATES.get(str(root.get("state")), str(root.get("state")))
        root_calls = sum(int(m.get("calls", 0)) for m in modules if not m.get("path"))
        by_plan = sum(int(m.get("planned_calls", 0)) for m in modules)
        if whole or not planned:
            return f"{how}; {count(root_calls, 'call')}, {by_plan:,} by plan"
        return f"{how}; {count(root_calls, 'call')}, {by_plan:,} module calls by plan"


def _module_line(module: Mapping[str, Any]) -> str:
    path = module.get("path") or "(the model)"
    state = str(module.get("state", "eager"))
    served = f"{int(module.get('planned_calls', 0)):,} by plan, {int(module.get('eager_calls', 0)):,} by eager"
    calls = count(int(module.get("calls", 0)), "call")
    return f"{path}  {module.get('type', '')}: {_STATES.get(state, state)} · {calls}: {served}"


def _alike_lines(modules: list[Mapping[str, Any]]) -> list[str]:
    if not modules:
        return []
    paths = [str(module.get("path")) for module in modules]
    shown = ", ".join(paths) if len(paths) <= 3 else f"{paths[0]}, {paths[1]} … {paths[-1]}"
    return [f"  and so {count(len(paths), 'module')} more: {shown}"]


def _is_library(file: object) -> bool:
    name = str(file)
    return name.startswith(_STDLIB) or any(f"{os.sep}{folder}{os.sep}" in name for folder in _PACKAGES)


def _branch_lines(module: Mapping[str, Any]) -> list[str]:
    """How often branches went which way over all traces; the program's own before those of libraries, loops last."""
    branches: list[Mapping[str, Any]] = list(module.get("branches", []))
    if not branches:
        return []
    both = [b for b in branches if b["taken"] and b["not_taken"]]
    both.sort(key=lambda b: (_is_library(b["file"]), b["kind"] == "loop", -(int(b["taken"]) + int(b["not_taken"]))))
    lines = [f"  branches  {count(len(branches), 'place')}, {len(both):,} of them went both ways"]
    for branch in both[:_MAX_BRANCHES]:
        place = _place(branch["file"], branch["line"]) + (f":{branch['column']}" if branch.get("column") else "")
        taken, number = int(branch["taken"]), int(branch["taken"]) + int(branch["not_taken"])
        lines.append(
            f"    {place} {_OUTCOMES[branch['kind']]} {taken:,} of {count(number, 'time')} ({branch['probability']:.0%})"
        )
    if len(both) > _MAX_BRANCHES:
        lines.append(f"    … {count(len(both) - _MAX_BRANCHES, 'place')} more in to_dict()")
    dropped = int(module.get("branches_dropped", 0))
    if dropped:
        lines.append(f"    … and {count(dropped, 'outcome')} at further places, which are not kept")
    return lines


def _refusal_lines(module: Mapping[str, Any]) -> list[str]:
    lines = []
    refusals, more = _shown(list(module.get("refusals", [])), "refusal")
    for refusal in refusals:
        times = int(refusal.get("count", 1))
        again = f" ({times}×)" if times > 1 else ""
        place = f"{_place(refusal['file'], refusal.get('line'))}: " if refusal.get("file") else ""
        lines.append(f"  not planned [{refusal.get('code', '?')}]{again}: {place}{refusal.get('message', '')}")
        if refusal.get("advice"):
            lines.append(f"    advice: {refusal['advice']}")
    dropped = int(module.get("refusals_dropped", 0))
    if dropped:
        more.append(f"    … and {count(dropped, 'refusal')} more, at places or for reasons that are not kept")
    return lines + more


def _gain(plan: Mapping[str, Any], before: str) -> str:
    """`before` and the two times, or nothing if the plan has not been timed against eager."""
    planned_ns, eager_ns = float(plan.get("planned_ns") or 0), float(plan.get("eager_ns") or 0)
    if not planned_ns or not eager_ns:
        return ""
    ratio = f"{eager_ns / planned_ns:.2f}×"
    return f"{before}{duration(planned_ns)} by plan, {duration(eager_ns)} by eager ({ratio})"


def _plan_line(number: int, plan: Mapping[str, Any]) -> str:
    state = str(plan.get("state", "planned"))
    text = f"  plan {number}  {plan.get('signature') or 'no tensor inputs'}{_gain(plan, '  ')}"
    if state != "planned":
        return f"{text}  ({_STATES.get(state, state)})"
    return f"{text}  {count(int(plan.get('planned_calls', 0)), 'call')} served"


def _stream_lines(streams: Mapping[str, Any]) -> list[str]:
    """Which schedule the graph has, what was measured to choose it, and who is busy when."""
    candidates: list[Mapping[str, Any]] = list(streams.get("candidates", []))
    if not candidates:
        return []
    number = int(streams.get("count", 1))
    launch = float(streams.get("launch_ns") or 0)
    host = f"; a launch takes {duration(launch)} of host time" if launch else ""
    if streams.get("skipped"):
        serial_ns = float(candidates[0].get("replay_ns") or 0)
        took = f"; {duration(serial_ns)} on the device" if serial_ns else ""
        return [f"    streams   {number}: {streams['skipped']}{took}{host}"]
    parts = []
    for candidate in candidates:
        used = " (used)" if candidate.get("chosen") else ""
        measured = float(candidate.get("replay_ns") or 0)
        if measured:
            text = f"{duration(measured)}, {byte_size(float(candidate.get('pool_bytes', 0)))}{used}"
            text += f" ({candidate['rejected']})" if candidate.get("rejected") else ""
        else:
            text = str(candidate.get("rejected") or "not measured")
        parts.append(f"{candidate.get('name')} {text}")
    lines = [
        f"    streams   {number}, by {int(streams.get('launches', 0))} launches in "
        f"{duration(float(streams.get('trial_ns', 0)))}: {'; '.join(parts)}{host}"
    ]
    if number > 1:
        lines += [f"      {line}" for line in str(streams.get("timeline", "")).splitlines()]
    return lines


def _graph_lines(graph: Mapping[str, Any], what: str = "") -> list[str]:
    """A CUDA graph, or why there is none; `what` of the plan it is."""
    if graph.get("captured"):
        others = {k: int(graph.get(k, 0)) for k in ("copies", "memsets", "other_nodes")}
        beside = _joined({k.replace("_", " "): n for k, n in others.items()})
        return [
            f"    CUDA graph {what}{count(int(graph['kernels']), 'kernel')}{', ' + beside if beside else ''}; captured in "
            f"{duration(float(graph['capture_ns']))}, inputs copied: {byte_size(float(graph['input_copy_bytes']))}",
            f"      memory  {byte_size(float(graph['own_bytes']))} of its own, "
            f"{byte_size(float(graph['pool_bytes']))} of the model's graphs; all graphs of the GPU hold "
            f"{byte_size(float(graph['budget_used_bytes']))} of {byte_size(float(graph['budget_bytes']))}"
            + (f"; given up {count(int(graph['given_up']), 'time')}" if graph.get("given_up") else ""),
            *_stream_lines(graph.get("streams", {})),
        ]
    if graph.get("waits_for_memory"):
        return [
            f"    {what}no CUDA graph at the moment, its operators run one by one until a capture is worth it: "
            f"{graph['reason']}"
        ]
    if graph.get("reason"):
        return [f"    {what}no CUDA graph, its operators run one by one: {graph['reason']}"]
    return [f"    {what}CUDA graph that has not been captured yet"] if what else []


def _part_lines(parts: list[Mapping[str, Any]]) -> list[str]:
    """The CUDA graphs of a plan that cannot be one, and what runs between them."""
    lines = [
        f"    in parts  {count(len(parts), 'part')}, {count(sum('cuda_graph' in p for p in parts), 'graph')} of them"
    ]
    for number, part in enumerate(parts):
        operators = count(int(part["operators"]), "operator")
        if "cuda_graph" in part:
            lines += _graph_lines(part["cuda_graph"], f"part {number}, {operators}: ")
        else:
            lines.append(f"    part {number}, {operators} one by one: {part['reason'] or 'too few for a graph'}")
    return lines


def _plan_details(plan: Mapping[str, Any]) -> list[str]:
    lines = []
    mechanisms: Mapping[str, int] = plan.get("mechanisms", {})
    if "operators" in plan:
        frames = int(plan.get("python_frames", 0))
        lines.append(
            f"    operators {int(plan['operators']):,}: {_joined(mechanisms, zero=('python',))}"
            + (f"; in place of {count(frames, 'Python frame')}" if frames else "")
        )
    lines += _part_lines(plan["parts"]) if plan.get("parts") else _graph_lines(plan.get("cuda_graph", {}))
    guards: Mapping[str, int] = plan.get("guards", {})
    if guards:
        lines.append(f"    guards    {sum(guards.values()):,}: {_joined(guards)}")
    subgraphs: list[Mapping[str, Any]] = list(plan.get("subgraphs", []))
    width = int(plan.get("max_width", 0))
    if subgraphs:
        independent = f", up to {width} independent at a time" if width > 1 else ""
        lines.append(f"    parallel  {count(len(subgraphs), 'chain')} of operators{independent}")
    memory: Mapping[str, Any] = plan.get("memory", {})
    if memory.get("bytes_sum"):
        lines.append(
            f"    memory    {byte_size(memory['bytes_peak'])} at the peak, {byte_size(memory['bytes_sum'])} made in all"
        )
    stages: Mapping[str, int] = plan.get("stages_ns", {})
    if stages:
        lines.append("    prepared  " + ", ".join(f"{name} {duration(ns)}" for name, ns in stages.items()))
    by_line = sorted(plan.get("lines", []), key=lambda entry: -int(entry.get("operators", 0)))
    shown, more = _shown(by_line, "line")
    if shown:
        lines.append("    by line of Python")
    for entry in shown:
        python_steps = int(entry.get("python_steps", 0))
        lines.append(
            f"      {_place(entry['file'], entry['line'])}  {count(int(entry.get('operators', 0)), 'operator')}"
            + (f", {count(python_steps, 'Python step')}" if python_steps else "")
        )
    return lines + more
