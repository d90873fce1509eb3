"""cuvil.profile(): what is recorded, to which module and line it is attributed, and what stays as it is."""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
import textwrap
import threading
import traceback
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import cuvil
import pytest
import torch
from cuvil import _native
from cuvil.profiling import Profile
from torch import nn


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x * self.weight
        return torch.sigmoid(y)


class Net(nn.Module):
    """Two modules of one class, one inside a container, beside operators of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Scale()
        self.rest = nn.ModuleList([Scale()])
        self.out = nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        x = torch.tanh(x)
        x = self.rest[0](x)
        return self.out(x)


class ReadsData(Net):
    """Is refused, so that it runs as Python while the modules inside of it are planned."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.sum().item() > 1e9:
            return x
        return super().forward(x)


def line_of(function: Callable[..., Any], text: str) -> str:
    """file:line of the one line in `function` that contains `text`."""
    lines, first = inspect.getsourcelines(function)
    (offset,) = (i for i, line in enumerate(lines) if text in line and "line_of" not in line)
    return f"{inspect.getsourcefile(function)}:{first + offset}"


def ready(model: nn.Module, *args: torch.Tensor) -> nn.Module:
    for _ in range(4):
        model(*args)
    return model


def sites(profile: Profile, kind: str) -> list[tuple[str, str, str]]:
    """(module, place, operator) of the intervals of one kind, in order."""
    found = [i.site for i in profile.intervals() if i.site.kind == kind]
    return [(site.module, site.place, site.operator) for site in found]


def test_steps_of_a_plan_name_module_line_and_operator(enable: Any) -> None:
    enable()
    model, x = Net().eval(), torch.randn(3, 8)
    expected = model(x)
    ready(model, x)
    with cuvil.profile() as p:
        result = model(x)
    assert torch.equal(result, expected)
    assert sites(p, "step") == [
        ("Net.first", line_of(Scale.forward, "x * self"), "aten::mul.Tensor"),
        ("Net.first", line_of(Scale.forward, "sigmoid"), "aten::sigmoid"),
        ("Net", line_of(Net.forward, "tanh"), "aten::tanh"),
        ("Net.rest.0", line_of(Scale.forward, "x * self"), "aten::mul.Tensor"),
        ("Net.rest.0", line_of(Scale.forward, "sigmoid"), "aten::sigmoid"),
        ("Net.out", line_of(Net.forward, "self.out"), "aten::linear"),
    ]
    here = line_of(test_steps_of_a_plan_name_module_line_and_operator, "result = model")
    assert sites(p, "plan") == [("Net", here, "")]
    assert not sites(p, "call")


def test_eager_calls_are_recorded_at_every_depth_with_the_line_that_calls(enable: Any) -> None:
    enable()
    model, x = cuvil.opt_out(Net().eval()), torch.randn(3, 8)
    with cuvil.profile() as p:
        assert model(x).shape == (3, 2)
    here = line_of(test_eager_calls_are_recorded_at_every_depth_with_the_line_that_calls, "model(x).shape")
    assert sites(p, "call") == [
        ("Net", here, ""),
        ("Net.first", line_of(Net.forward, "self.first"), ""),
        ("Net.rest.0", line_of(Net.forward, "self.rest[0]"), ""),
        ("Net.out", line_of(Net.forward, "self.out"), ""),
    ]
    assert [i.depth for i in p.intervals()] == [0, 1, 1, 1]
    assert not sites(p, "step")


def test_calls_inside_torchs_containers_stand_at_the_users_line(enable: Any) -> None:
    enable()
    model = cuvil.opt_out(nn.Sequential(nn.Linear(8, 8), nn.ReLU()).eval())
    with cuvil.profile() as p:
        model(torch.randn(1, 8))
    here = line_of(test_calls_inside_torchs_containers_stand_at_the_users_line, "model(torch.randn")
    assert sites(p, "call") == [("Sequential", here, ""), ("Sequential.0", here, ""), ("Sequential.1", here, "")]


def test_code_below_a_folder_called_torch_is_the_programs(
    enable: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "torch" / "models"
    folder.mkdir(parents=True)
    (folder / "own_model.py").write_text(
        "from torch import nn\n\nclass Own(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.fc = nn.Linear(8, 8)\n\n    def forward(self, x):\n        return self.fc(x)\n"
    )
    monkeypatch.syspath_prepend(str(folder))
    own = __import__("own_model")
    enable()
    model, x = own.Own().eval(), torch.randn(3, 8)
    ready(model, x)
    with cuvil.profile() as p:
        model(x)
    assert sites(p, "step") == [("Own.fc", f"{folder / 'own_model.py'}:9", "aten::linear")]
    eager = cuvil.opt_out(own.Own().eval())
    with cuvil.profile() as p:
        eager(x)
    assert sites(p, "call")[1] == ("Own.fc", f"{folder / 'own_model.py'}:9", "")


def test_plans_inside_of_an_eager_model_have_its_paths(enable: Any) -> None:
    enable()
    model, x = ReadsData().eval(), torch.randn(3, 8)
    for _ in range(8):
        model(x)
    with cuvil.profile() as p:
        model(x)
    assert [site[0] for site in sites(p, "call")] == ["ReadsData"]
    assert [site[0] for site in sites(p, "plan")] == ["ReadsData.first", "ReadsData.rest.0", "ReadsData.out"]
    assert {site[0] for site in sites(p, "step")} == {"ReadsData.first", "ReadsData.rest.0", "ReadsData.out"}


def test_a_module_that_is_registered_nowhere_is_named_by_its_type(enable: Any) -> None:
    class Hides(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.hidden = [Scale()]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.hidden[0](x) + 1

    enable()
    model, x = Hides().eval(), torch.randn(8)
    with cuvil.profile() as p:
        cuvil.opt_out(model)(x)
    assert [site[0] for site in sites(p, "call")] == ["Hides", "Hides.<Scale>"]
    cuvil.opt_out(model, False)
    ready(model, x)
    with cuvil.profile() as p:
        model(x)
    assert {site[0] for site in sites(p, "step")} == {"Hides", "Hides.<Scale>"}


def test_traced_and_compared_calls_are_told_apart(enable: Any) -> None:
    enable()
    model, x = Net().eval(), torch.randn(3, 8)
    with cuvil.profile() as p:
        for _ in range(6):
            model(x)
    kinds = [i.site.kind for i in p.intervals() if i.depth == 0]
    # A trace may have to be made anew, but not three times.
    assert kinds == sorted(kinds, reverse=True)
    assert set(kinds) == {"preparation", "plan"}
    assert kinds.count("preparation") >= 2
    assert "(trace, or comparison of plan and eager)" in [row.key for row in p.rows("operator")]


def test_calls_that_decide_about_a_plan_are_left_undisturbed(enable: Any) -> None:
    enable(adopt="measure")
    model, x = Net().eval(), torch.randn(3, 8)
    for _ in range(2):
        model(x)
    with cuvil.profile() as p:
        for _ in range(4):
            model(x)
    assert [(i.site.kind, i.depth) for i in p.intervals()] == [("plan", 0), ("call", 0), ("plan", 0), ("call", 0)]


def test_own_times_add_up_and_shares_too(enable: Any) -> None:
    enable()
    planned, eager, x = Net().eval(), cuvil.opt_out(Net().eval()), torch.randn(3, 8)
    ready(planned, x)
    with cuvil.profile() as p:
        for _ in range(3):
            planned(x)
            eager(x)
    outermost = sum(i.end_ns - i.start_ns for i in p.intervals() if i.depth == 0)
    numbers = p.to_dict()
    assert numbers["recorded_ns"] == outermost > 0
    assert outermost <= numbers["duration_ns"]
    for by in ("line", "module", "operator"):
        rows = numbers[f"{by}s"]
        assert sum(row["total_ns"] for row in rows) == outermost
        assert sum(row["share"] for row in rows) == pytest.approx(1)
        assert all(row["mean_ns"] * row["calls"] == pytest.approx(row["total_ns"]) for row in rows if row["calls"])
        assert sum(row["calls"] for row in rows) == sum(1 for _ in p.intervals())
    modules = {row["module"]: row for row in numbers["modules"]}
    assert modules["Net"]["inclusive_ns"] == outermost
    assert modules["Net.rest"]["calls"] == 0  # a container that is never called
    assert modules["Net.rest"]["inclusive_ns"] == modules["Net.rest.0"]["total_ns"]
    operators = {row["operator"]: row["calls"] for row in numbers["operators"]}
    assert operators["aten::sigmoid"] == 6  # of the plan; of eager code only the modules are known
    assert operators["(plan: guards, arguments, result)"] == 3
    assert operators["(eager: Python and operators)"] == 12


def test_the_table_has_a_row_for_each_line_and_says_what_it_leaves_out(enable: Any) -> None:
    enable()
    model, x = Net().eval(), torch.randn(3, 8)
    ready(model, x)
    with cuvil.profile() as p:
        model(x)
    for by, key in (("line", os.path.basename(__file__)), ("module", "Net.rest.0"), ("operator", "aten::tanh")):
        text = p.table(by=by)
        assert text.splitlines()[2].split()[:2] == [by, "calls"]
        assert key in text
        assert " %" in text
    assert p.table(by="operator", limit=1).endswith("and 4 more")
    with pytest.raises(ValueError, match="'line', 'module', 'operator', 'kernel'"):
        p.table(by="colour")


def test_threads_have_tracks_of_their_own_with_their_names(enable: Any) -> None:
    enable()
    model, x = Net().eval(), torch.randn(3, 8)
    ready(model, x)
    expected = model(x)
    wrong = []

    def work() -> None:
        with torch.no_grad():
            wrong.extend(1 for _ in range(50) if not torch.equal(model(x), expected))

    with cuvil.profile() as p:
        threads = [threading.Thread(target=work, name=f"worker {i}") for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not wrong
    assert sorted(thread.name for thread in p.threads) == [f"worker {i}" for i in range(4)]
    assert sorted(thread.id for thread in p.threads) == sorted(thread.ident for thread in threads)
    for thread in p.threads:
        assert [i.site.kind for i in thread.intervals].count("plan") == 50
        assert len(thread.intervals) == 50 * 7


def test_a_thread_may_be_in_a_call_when_the_profile_begins_and_ends(enable: Any) -> None:
    inside, go_on = threading.Event(), threading.Event()

    class Waits(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            inside.set()
            assert go_on.wait(60)
            return x + 1

    enable()
    model = cuvil.opt_out(Waits())
    x = torch.zeros(1)
    results = []

    def wait_for(profile: bool) -> threading.Thread:
        inside.clear()
        go_on.clear()
        thread = threading.Thread(target=lambda: results.append(model(x)))
        thread.start()
        assert inside.wait(60)
        return thread

    thread = wait_for(profile=False)
    with cuvil.profile() as p:  # began before
        go_on.set()
        thread.join()
    assert not list(p.intervals())
    with cuvil.profile() as p:  # goes on afterwards
        thread = wait_for(profile=True)
    go_on.set()
    thread.join()
    assert not list(p.intervals())
    assert len(results) == 2


def test_a_second_profile_is_refused_and_the_first_goes_on(enable: Any) -> None:
    enable()
    with cuvil.profile() as p:
        with pytest.raises(RuntimeError, match="a profile is being taken already"), cuvil.profile():
            pytest.fail("the block must not run")
        refused = []

        def other() -> None:
            try:
                cuvil.profile().__enter__()
            except RuntimeError as error:
                refused.append(str(error))

        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        assert len(refused) == 1
        cuvil.opt_out(Scale())(torch.ones(8))
    assert len(list(p.intervals())) == 1
    with pytest.raises(RuntimeError, match="taken once"), p:
        pytest.fail("the block must not run")
    with cuvil.profile():
        pass


def test_nothing_can_be_asked_before_the_end() -> None:
    with cuvil.profile() as p:
        for ask in (p.table, p.to_dict, lambda: p.save_html("x.html"), lambda: p.save_trace("x.json")):
            with pytest.raises(RuntimeError, match="has not ended"):
                ask()


def test_an_exception_inside_the_block_is_raised_and_the_trace_written(enable: Any, tmp_path: Path) -> None:
    enable()
    path = tmp_path / "trace.json"
    error = KeyError("mine")
    with pytest.raises(KeyError) as caught, cuvil.profile(path):
        cuvil.opt_out(Scale())(torch.ones(8))
        raise error
    assert caught.value is error
    assert any(event["ph"] == "X" for event in json.loads(path.read_text())["traceEvents"])
    assert os.listdir(tmp_path) == ["trace.json"]


def test_a_module_that_raises_is_recorded_and_raises(enable: Any) -> None:
    enable()
    model = cuvil.opt_out(Net().eval())
    with cuvil.profile() as p, pytest.raises(RuntimeError, match="must match"):
        model(torch.randn(3, 5))
    assert [(i.site.module, i.site.kind, i.depth) for i in p.intervals()] == [
        ("Net", "call", 0),
        ("Net.first", "call", 1),
    ]


def test_a_trace_that_cannot_be_written_is_said_before_the_block_or_after_it(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no folder"), cuvil.profile(tmp_path / "none" / "trace.json"):
        pytest.fail("the block must not run")
    folder = tmp_path / "folder"
    folder.mkdir()
    with pytest.raises(IsADirectoryError), cuvil.profile(folder):
        pass
    with pytest.raises(KeyError) as caught, cuvil.profile(folder):
        raise KeyError("mine")
    assert any("could not be written" in line for line in traceback.format_exception(caught.value))
    assert os.listdir(tmp_path) == ["folder"]


def slices(path: Path) -> list[dict[str, Any]]:
    return [event for event in json.loads(path.read_text())["traceEvents"] if event["ph"] == "X"]


def test_the_trace_has_tracks_for_modules_lines_and_steps(enable: Any, tmp_path: Path) -> None:
    enable()
    path = tmp_path / "trace.json"
    model, eager, x = Net().eval(), cuvil.opt_out(Net().eval()), torch.randn(3, 8)
    ready(model, x)
    with cuvil.profile(path) as p:
        model(x)
        eager(x)
    trace = json.loads(path.read_text())
    names = {e["tid"]: e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name"}
    assert sorted(names.values()) == ["MainThread: lines", "MainThread: modules", "MainThread: plan steps"]
    assert {event["ph"] for event in trace["traceEvents"]} == {"X", "M"}
    assert {event["pid"] for event in trace["traceEvents"]} == {os.getpid()}
    on_track: dict[str, list[str]] = {name.split(": ")[1]: [] for name in names.values()}
    for event in slices(path):
        on_track[names[event["tid"]].split(": ")[1]].append(event["name"])
    assert on_track["plan steps"][0] == "plan of Net"
    assert on_track["plan steps"][1:] == [operator for _, _, operator in sites(p, "step")]
    assert sorted(on_track["modules"]) == sorted(
        ["Net (Net)", "Net.first", "Net.rest", "Net.rest.0", "Net.out"]
        + ["Net (Net)", "Net.first (Scale)", "Net.rest.0 (Scale)", "Net.out (Linear)"]
    )
    assert line_of(Scale.forward, "sigmoid") in on_track["lines"]
    step = next(event for event in slices(path) if event["name"] == "aten::tanh")
    assert step["args"]["module"] == "Net"
    assert step["args"]["line"] == line_of(Net.forward, "tanh")
    assert step["args"]["function"] == "Net.forward"


def test_slices_nest_and_are_microseconds_from_the_start(enable: Any, tmp_path: Path) -> None:
    enable()
    path = tmp_path / "trace.json"
    model, x = ReadsData().eval(), torch.randn(3, 8)
    with cuvil.profile(path) as p:
        for _ in range(9):
            model(x)
    by_track: dict[int, list[tuple[float, float]]] = {}
    for event in slices(path):
        assert event["ts"] >= 0
        assert event["ts"] + event["dur"] <= (p.end_ns - p.start_ns) / 1000 + 0.001
        by_track.setdefault(event["tid"], []).append((event["ts"], event["ts"] + event["dur"]))
    assert len(by_track) == 3
    for spans in by_track.values():
        stack: list[float] = []
        for start, end in sorted(spans, key=lambda span: (span[0], -span[1])):
            while stack and stack[-1] <= start + 0.0005:
                stack.pop()
            assert not stack or end <= stack[-1] + 0.0005
            stack.append(end)
    last = max((event for event in slices(path)), key=lambda event: event["ts"] + event["dur"])
    assert last["ts"] + last["dur"] == pytest.approx((max(i.end_ns for i in p.intervals()) - p.start_ns) / 1000)


class Reader(HTMLParser):
    """Collects tags, and refuses a document whose tags do not close."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.attributes: list[tuple[str, str | None]] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes += attrs
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def test_the_page_stands_alone_and_escapes_what_it_shows(enable: Any, tmp_path: Path) -> None:
    enable()
    evil = type('<script>alert("1")</script>&amp;', (Scale,), {})
    model = nn.Sequential()
    model.add_module("<img src=x onerror=alert(1)>\"'", evil())
    path = tmp_path / "page.html"
    with cuvil.profile() as p:
        cuvil.opt_out(model)(torch.ones(8))
    p.save_html(path)
    page = Reader()
    page.feed(path.read_text(encoding="utf-8"))
    assert not page.open
    assert page.tags <= {"html", "head", "meta", "title", "style", "body", "h1", "h2", "h3", "p"} | {
        *("table", "tr", "th", "td", "div")
    }
    assert not {name for name, _ in page.attributes} & {"src", "href", "onerror", "onclick"}
    text = "".join(page.text)
    assert "<img src=x onerror=alert(1)>\"'" in text
    assert '<script>alert("1")</script>&amp;' in text
    assert "Timeline" in text
    assert all(f"By {by}" in text for by in ("line", "module", "operator"))
    assert "url(" not in path.read_text(encoding="utf-8")
    assert os.listdir(tmp_path) == ["page.html"]


def test_a_profile_without_records_is_a_profile(enable: Any, tmp_path: Path) -> None:
    enable()
    with cuvil.profile(tmp_path / "trace.json") as p:
        torch.ones(3).sum()
    assert p.notes == ["No torch.nn.Module was called."]
    assert "No torch.nn.Module was called." in p.table()
    assert p.to_dict()["lines"] == []
    assert slices(tmp_path / "trace.json") == []
    p.save_html(tmp_path / "page.html")
    assert "No torch.nn.Module" in (tmp_path / "page.html").read_text(encoding="utf-8")


def test_with_cuvil_off_the_block_runs_and_the_profile_says_why_it_is_empty(tmp_path: Path) -> None:
    assert not cuvil.enabled()
    with cuvil.profile(tmp_path / "trace.json") as p:
        result = Scale()(torch.ones(8))
    assert torch.equal(result, torch.sigmoid(torch.ones(8)))
    assert not cuvil.enabled()
    assert "Cuvil was off" in p.table()
    assert slices(tmp_path / "trace.json") == []


def test_cuvil_may_be_turned_on_and_off_inside_of_the_block(enable: Any) -> None:
    model = cuvil.opt_out(Scale())
    with cuvil.profile() as p:
        model(torch.ones(8))
        enable()
        cuvil.opt_out(model)  # enable() above forgot it
        model(torch.ones(8))
        cuvil.disable()
        model(torch.ones(8))
    assert len(sites(p, "call")) == 1


def test_dropped_intervals_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(number: int, shared: bool = False) -> dict[str, Any]:
        record = original(number, shared)
        assert record is not None
        return record | {"dropped": 1234}

    original = _native.profile_stop
    monkeypatch.setattr(_native, "profile_stop", stop)
    with cuvil.profile() as p:
        pass
    assert "1,234 intervals found no room and are missing." in p.table()
    assert p.to_dict()["dropped"] == 1234


def test_a_fork_leaves_the_profile_to_the_parent(tmp_path: Path) -> None:
    script = tmp_path / "forks.py"
    script.write_text(
        textwrap.dedent(
            """
            import os, sys, torch, cuvil
            os.environ["CUVIL_PREPARE"] = "sync"
            cuvil.enable()
            model = cuvil.opt_out(torch.nn.Linear(2, 2))
            class Forks(torch.nn.Module):
                def forward(self, x):
                    self.pid = os.fork()
                    return model(x)
            forks = cuvil.opt_out(Forks())
            with cuvil.profile(sys.argv[1]) as p:
                forks(torch.ones(1, 2))
            if forks.pid == 0:
                with cuvil.profile() as own:
                    model(torch.ones(1, 2))
                ok = "stays with its parent" in p.table() and len(list(own.intervals())) == 1
                os._exit(0 if ok else 1)
            status = os.waitstatus_to_exitcode(os.waitpid(forks.pid, 0)[1])
            print(status, len(list(p.intervals())), os.path.exists(sys.argv[1]))
            """
        )
    )
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path / "trace.json")],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.stdout == "0 2 True\n", done.stderr


def test_where_there_is_no_engine_the_block_runs() -> None:
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "import sys; sys.modules['cuvil._native'] = None; import cuvil\n"
            "with cuvil.profile() as p: print('ran')\n"
            "print(p.table())\n",
        ],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout.startswith("ran\n")
    assert "Cuvil was off" in done.stdout
