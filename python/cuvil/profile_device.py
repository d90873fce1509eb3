"""A GPU's part of a profile: its kernels, copies and fills, and counters that were sampled meanwhile."""

from __future__ import annotations

import gc
import struct
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

SiteT = TypeVar("SiteT")

# As scheduler/device_activity.h has it.
_ACTIVITY = struct.Struct("=QQQQII3I3IIBBH")
_KINDS = ("kernel", "copy", "fill")

TORCH_IS_PROFILING = "Kernels are not recorded: torch.profiler is at work, and only one of the two can be."


class Activity(NamedTuple):
    """One kernel, copy or fill that a GPU ran; `site` is who asked for it, None if no recorded call did."""

    start_ns: int
    end_ns: int
    site: Any  # profiling.Site or None
    name: str
    kind: str  # "kernel", "copy", "fill"
    device: int
    stream: int
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    bytes: int
    in_graph: bool  # by the launch of a CUDA graph

    @property
    def duration_ns(self) -> int:
        return self.end_ns - self.start_ns


@dataclass(frozen=True, slots=True)
class Stream:
    """What ran on one CUDA stream, by start; `number` is CUPTI's."""

    device: int
    number: int
    activities: list[Activity]

    @property
    def name(self) -> str:
        return f"GPU {self.device}: stream {self.number}"

    def lanes(self) -> list[list[Activity]]:
        """The activities, divided so that nothing in one lane overlaps: branches of a graph run at the same time."""
        lanes: list[list[Activity]] = []
        for activity in self.activities:
            free = (lane for lane in lanes if lane[-1].end_ns <= activity.start_ns)
            lane = next(free, None)
            if lane is None:
                lanes.append([activity])
            else:
                lane.append(activity)
        return lanes


@dataclass(frozen=True, slots=True)
class Counter:
    """A quantity that was sampled while the profile was taken."""

    name: str  # "GPU 0: memory used"
    unit: str
    samples: list[tuple[int, float]] = field(default_factory=list)  # time as of intervals, value

    def to_dict(self) -> dict[str, Any]:
        values = [value for _, value in self.samples]
        mean = sum(values) / len(values) if values else 0.0
        bounds = {"min": min(values, default=0.0), "mean": mean, "max": max(values, default=0.0)}
        return {"name": self.name, "unit": self.unit, "samples": len(values), **bounds}


# What people read, of what the engine counts in.
_UNITS = {"B": ("MiB", 2.0**-20), "B/s": ("MB/s", 1e-6), "Hz": ("MHz", 1e-6)}


def read_counters(records: list[dict[str, Any]]) -> list[Counter]:
    counters = []
    for record in records:
        unit, scale = _UNITS.get(record["unit"], (record["unit"], 1.0))
        samples = [(time, value * scale) for time, value in struct.iter_unpack("=Qd", record["samples"])]
        counters.append(Counter(f"GPU {record['device']}: {record['name']}", unit, samples))
    return counters


def readable(name: str) -> str:
    """A kernel's demangled name without its result and its parameters."""
    depth = 0
    for i, letter in enumerate(name):
        if letter == "<":
            depth += 1
        elif letter == ">":
            depth -= 1
        elif letter == "(" and i and depth == 0 and not name.startswith("(anonymous namespace)", i):
            name = name[:i]
            break
    return name.removeprefix("void ")


def read(record: dict[str, Any], sites: Sequence[SiteT]) -> list[Stream]:
    """The streams of what ``_native.profile_stop`` says of devices."""
    names = [readable(name) for name in record["names"]]
    streams: dict[tuple[int, int], Stream] = {}
    for start, end, site, size, name, stream, *shape, device, kind, in_graph, _ in _ACTIVITY.iter_unpack(
        record["activities"]
    ):
        key = (device, stream)
        activity = Activity(
            start,
            end,
            sites[site] if site < len(sites) else None,
            names[name],
            _KINDS[kind],
            device,
            stream,
            tuple(shape[:3]),
            tuple(shape[3:]),
            size,
            bool(in_graph),
        )
        streams.setdefault(key, Stream(device, stream, [])).activities.append(activity)
    return [streams[key] for key in sorted(streams)]


def torch_is_profiling() -> bool:
    """Whether torch.profiler records, or is about to: both use CUPTI, which serves one at a time.

    Looks only at what has been imported, and runs nothing of the program's.
    """
    autograd = sys.modules.get("torch.autograd.profiler")
    if getattr(autograd, "_is_profiler_enabled", False):
        return True
    profiler = sys.modules.get("torch.profiler.profiler")
    kind = getattr(profiler, "profile", None)
    warmup = getattr(getattr(profiler, "ProfilerAction", None), "WARMUP", None)
    # In the warm-up of its schedule torch.profiler has CUPTI on and says so nowhere but in the object itself. Objects
    # that have not come to their end are counted here, so that mostly there is none to look for. One that ended in its
    # warm-up says the same until it is collected, and is taken for one that goes on.
    steps = getattr(getattr(autograd, "KinetoStepTracker", None), "_step_dict", {})
    if "ProfilerStep" not in steps or kind is None or warmup is None:
        return False
    return any(issubclass(type(o), kind) and vars(o).get("current_action") is warmup for o in gc.get_objects())


def total_ns(activities: Iterable[Activity]) -> int:
    return sum(activity.duration_ns for activity in activities)
