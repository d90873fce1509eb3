"""A GPU's part of a profile: tables, trace and page, from records as the engine gives them; no GPU is needed."""

from __future__ import annotations

import gc
import json
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cuvil
import pytest
import torch
from cuvil import _native, profile_device
from cuvil.profiling import Profile

SITES = [
    ("plan", "Net", "Net", "/app/run.py", 9, "main", ""),
    ("step", "Net.first", "", "/app/net.py", 20, "forward", "aten::linear"),
    ("step", "Net.first.act", "", "/app/net.py", 30, "forward", "aten::relu"),
    ("call", "Other", "Other", "/app/run.py", 12, "main", ""),
]
NAMES = ["void gemm<float, (int)4>(float*, int)", "relu(float*)", "copy host to device"]
NO_SITE = 2**64 - 1


def activity(
    start: int,
    end: int,
    site: int,
    name: int,
    kind: int = 0,
    stream: int = 7,
    size: int = 0,
    device: int = 0,
    graph: int = 1,
) -> bytes:
    shape = (4, 5, 6, 32, 2, 1) if kind == 0 else (0,) * 6
    return struct.pack("=QQQQII6IIBBH", start, end, site, size, name, stream, *shape, device, kind, graph, 0)


ACTIVITIES = [
    activity(1_100, 1_200, 3, 2, kind=1, size=4_000_000, graph=0),
    activity(2_000, 5_000, 1, 0),
    activity(4_000, 5_500, 2, 1),  # a branch of the graph, beside the first
    activity(6_000, 7_000, 2, 1, stream=8),
    activity(7_000, 7_500, NO_SITE, 0, stream=8, graph=0),
]


@pytest.fixture
def profile(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Profile]:
    """Takes a profile of nothing, and has the engine tell of a GPU."""
    original = _native.profile_stop

    def take(
        path: Path | None = None,
        activities: list[bytes] = ACTIVITIES,
        counters: list[dict[str, Any]] | None = None,
        **device: Any,
    ) -> Profile:
        def stop(number: int, shared: bool = False) -> dict[str, Any]:
            record = original(number, shared)
            assert record is not None
            fields = ("kind", "module", "type", "file", "line", "function", "operator")
            intervals = [struct.pack("=QQQ", 1_500, 1_900, 1), struct.pack("=QQQ", 1_000, 2_500, 0)]
            thread = {"name": "MainThread", "id": 1, "records": b"".join(intervals)}
            gpu = {"names": NAMES, "recorded_ns": 6_000, "dropped": 0, "activities": b"".join(activities)}
            return record | {
                "start_ns": 1_000,
                "end_ns": 6_500,
                "enabled": True,
                "sites": [dict(zip(fields, site, strict=True)) for site in SITES],
                "threads": [thread],
                "device": gpu | device,
                "counters": counters or [],
                "notes": [],
            }

        monkeypatch.setattr(_native, "profile_stop", stop)
        with cuvil.profile(path) as p:
            pass
        return p

    return take


def test_rows_by_kernel_tell_launches_time_bytes_and_the_line(profile: Callable[..., Profile]) -> None:
    p = profile()
    rows = {row.key: row for row in p.rows("kernel")}
    assert list(rows) == ["gemm<float, (int)4>", "relu", "copy host to device"]  # the dearest first
    gemm, relu, copy = rows.values()
    assert (gemm.calls, gemm.gpu_ns, gemm.line) == (2, 3_500, "/app/net.py:20")
    assert (relu.calls, relu.gpu_ns, relu.line) == (2, 2_500, "/app/net.py:30")
    assert (copy.calls, copy.gpu_ns, copy.bytes) == (1, 100, 4_000_000)
    assert copy.line == "/app/run.py:12"
    text = p.table(by="kernel")
    assert text.splitlines()[3].split() == ["kernel", "calls", "total", "mean", "share", "bytes", "mostly", "from"]
    assert "4 MB" in text


@pytest.mark.parametrize(
    ("by", "expected"),
    [
        ("line", {"/app/net.py:20": 3_000, "/app/net.py:30": 2_500, "/app/run.py:12": 100, "/app/run.py:9": 0}),
        ("module", {"Net.first": 3_000, "Net.first.act": 2_500, "Other": 100, "Net": 0}),
        ("operator", {"aten::linear": 3_000, "aten::relu": 2_500, "(eager: Python and operators)": 100}),
    ],
)
def test_gpu_time_stands_beside_the_hosts(profile: Callable[..., Profile], by: str, expected: dict[str, int]) -> None:
    p = profile()
    rows = {row.key: row.gpu_ns for row in p.rows(by)}
    assert rows.pop("(outside of module calls)") == 500
    rows.pop("(plan: guards, arguments, result)", None)
    assert rows == expected
    assert sum(row.gpu_ns for row in p.rows(by)) == p.device_ns == 6_100
    assert sum(row.kernels for row in p.rows(by)) == 5
    assert "GPU share" in p.table(by=by)


def test_modules_have_the_gpu_time_of_what_is_inside_of_them(profile: Callable[..., Profile]) -> None:
    modules = {row["module"]: row for row in profile().to_dict()["modules"]}
    assert modules["Net"]["gpu_inclusive_ns"] == modules["Net.first"]["gpu_inclusive_ns"] == 5_500
    assert modules["Net"]["inclusive_ns"] == 1_500
    assert modules["Net.first"]["total_ns"] == 400
    assert modules["Net.first"]["gpu_ns"] == 3_000


def test_the_attributed_share_is_of_kernels_whose_line_is_known(profile: Callable[..., Profile]) -> None:
    p = profile()
    assert p.attributed_share == pytest.approx(5_500 / 6_000)
    assert p.raw_kernel_ns == 6_000
    assert "91.7 % of kernel time with its line" in p.table()
    assert "with CUPTI attached" in p.table()
    assert p.to_dict()["attributed_share"] == p.attributed_share


def test_dropped_kernels_are_told(profile: Callable[..., Profile]) -> None:
    assert "1,234 kernels or copies found no room and are missing." in profile(dropped=1234).table()


def slices(path: Path) -> list[dict[str, Any]]:
    return [event for event in json.loads(path.read_text())["traceEvents"] if event["ph"] == "X"]


def test_the_trace_has_a_track_for_each_stream_and_one_for_what_overlaps(
    profile: Callable[..., Profile], tmp_path: Path
) -> None:
    path = tmp_path / "trace.json"
    profile(path)
    trace = json.loads(path.read_text())["traceEvents"]
    names = {e["tid"]: e["args"]["name"] for e in trace if e["name"] == "thread_name"}
    assert list(names.values())[3:] == ["GPU 0: stream 7", "GPU 0: stream 7, branch 2", "GPU 0: stream 8"]
    on_gpu = [event for event in slices(path) if names[event["tid"]].startswith("GPU")]
    assert sorted((event["ts"], event["name"]) for event in on_gpu) == [
        (0.1, "copy host to device"),
        (1.0, "gemm<float, (int)4>"),
        (3.0, "relu"),
        (5.0, "relu"),
        (6.0, "gemm<float, (int)4>"),
    ]
    gemm = next(event for event in on_gpu if event["ts"] == 1.0)
    assert gemm["args"] == {
        "name": "gemm<float, (int)4>",
        "module": "Net.first",
        "line": "/app/net.py:20",
        "function": "forward",
        "operator": "aten::linear",
        "grid": [4, 5, 6],
        "block": [32, 2, 1],
        "in_cuda_graph": True,
    }
    copy = next(event for event in on_gpu if event["cat"] == "copy")
    assert copy["args"]["bytes"] == 4_000_000
    assert copy["args"]["GB/s"] == 40_000
    assert copy["args"]["operator"] == "(eager: Python and operators)"
    assert "grid" not in copy["args"]
    assert not copy["args"]["in_cuda_graph"]
    by_track: dict[int, list[tuple[float, float]]] = {}
    for event in on_gpu:
        by_track.setdefault(event["tid"], []).append((event["ts"], event["ts"] + event["dur"]))
    for spans in by_track.values():
        assert all(end <= start for (_, end), (start, _) in zip(sorted(spans), sorted(spans)[1:], strict=False))


COUNTERS = [
    {
        "device": 1,
        "name": "memory used",
        "unit": "B",
        "samples": struct.pack("=QdQd", 1_500, 1048576.0, 2_500, 3145728.0),
    },
    {"device": 1, "name": "SM busy", "unit": "%", "samples": struct.pack("=Qd", 1_500, 42.0)},
]


def test_counters_have_tracks_of_their_own(profile: Callable[..., Profile], tmp_path: Path) -> None:
    p = profile(tmp_path / "trace.json", counters=COUNTERS)
    counters = [e for e in json.loads((tmp_path / "trace.json").read_text())["traceEvents"] if e["ph"] == "C"]
    assert [(e["name"], e["ts"], e["args"]) for e in counters] == [
        ("GPU 1: memory used", 0.5, {"MiB": 1.0}),
        ("GPU 1: memory used", 1.5, {"MiB": 3.0}),
        ("GPU 1: SM busy", 0.5, {"%": 42.0}),
    ]
    assert p.to_dict()["counters"][0] == {
        "name": "GPU 1: memory used",
        "unit": "MiB",
        "samples": 2,
        "min": 1.0,
        "mean": 2.0,
        "max": 3.0,
    }
    p.save_html(tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "<td>GPU 1: memory used</td><td>MiB</td><td>2</td><td>1.0</td><td>2.0</td><td>3.0</td>" in page


def test_the_page_shows_kernels_and_streams(profile: Callable[..., Profile], tmp_path: Path) -> None:
    NAMES.append("<script>alert(1)</script>")
    try:
        p = profile(activities=[*ACTIVITIES, activity(8_000, 9_000, 1, 3)])
    finally:
        NAMES.pop()
    p.save_html(tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "By kernel" in text
    assert "GPU 0: stream 8" in text
    assert "gemm&lt;float, (int)4&gt;" in text
    assert "<script" not in text
    assert text.count('<div class="kernel"') == 5
    assert text.count('<div class="copy"') == 1


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("void at::native::add<c10::Half>(int, c10::Half*)", "at::native::add<c10::Half>"),
        ("ampere_fp16_gemm", "ampere_fp16_gemm"),
        (
            "void (anonymous namespace)::softmax<4, float(*)(int)>(float*)",
            "(anonymous namespace)::softmax<4, float(*)(int)>",
        ),
        ("cutlass::Kernel2<a::b<c> >(a::b<c>::Params)", "cutlass::Kernel2<a::b<c> >"),
        ("(unnamed kernel)", "(unnamed kernel)"),
    ],
)
def test_kernel_names_lose_their_parameters(name: str, expected: str) -> None:
    assert profile_device.readable(name) == expected


def test_without_a_gpu_there_are_no_kernels_and_no_columns_for_them() -> None:
    with cuvil.profile() as p:
        pass
    if torch.cuda.is_initialized():
        pytest.skip("another test uses the GPU of this machine")
    assert p.streams == []
    assert p.rows("kernel") == []
    assert p.attributed_share == 1.0
    assert "GPU" not in p.table()
    assert "CUPTI" not in p.table(by="kernel")
    assert p.to_dict()["kernels"] == []


@pytest.fixture
def torch_profiler() -> Iterator[Callable[..., Any]]:
    gc.collect()  # one that ended in its warm-up counts until it is gone
    yield lambda **options: torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], **options)
    assert not profile_device.torch_is_profiling()


def test_torch_profiler_is_noticed_while_it_records(torch_profiler: Callable[..., Any]) -> None:
    assert not profile_device.torch_is_profiling()
    with torch_profiler():
        assert profile_device.torch_is_profiling()
        with cuvil.profile() as p:
            torch.ones(2).sum()
        assert "stays with its parent" not in p.table()
    assert not profile_device.torch_is_profiling()


def test_torch_profiler_is_noticed_in_its_warm_up(torch_profiler: Callable[..., Any]) -> None:
    schedule = torch.profiler.schedule(wait=1, warmup=1, active=1)
    seen = []
    with torch_profiler(schedule=schedule) as profiler:
        for _ in range(4):
            seen.append(profile_device.torch_is_profiling())
            profiler.step()
    assert seen == [False, True, True, False]


def test_what_torch_profiler_is_asked_runs_nothing_of_the_programs(torch_profiler: Callable[..., Any]) -> None:
    class Trap:
        def __getattribute__(self, name: str) -> Any:
            raise AssertionError(f"{name} was looked at")

    trap = Trap()
    with torch_profiler(schedule=torch.profiler.schedule(wait=10, warmup=1, active=1)):
        assert not profile_device.torch_is_profiling()
    del trap


def test_the_engine_is_told_of_torch_profiler_at_both_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[object] = []
    start, stop = _native.profile_start, _native.profile_stop
    monkeypatch.setattr(_native, "profile_start", lambda text="": (told.append(text), start(text))[1])
    monkeypatch.setattr(_native, "profile_stop", lambda n, shared=False: (told.append(shared), stop(n, shared))[1])
    with cuvil.profile():
        pass
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]), cuvil.profile():
        pass
    assert told == ["", False, profile_device.TORCH_IS_PROFILING, True]
