"""The command line: help that is true, errors that say what to do, exit statuses."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import cuvil
import pytest
from cuvil import bench, doctor
from cuvil.__main__ import main


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(f"\n  {name} " in text for name in ("run", "profile", "doctor", "bench"))


@pytest.mark.parametrize("command", ["run", "profile", "doctor", "bench"])
def test_every_command_has_help(command: str) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "cuvil", command, "--help"], capture_output=True, text=True, timeout=60, check=False
    )
    assert result.returncode == 0
    assert f"python -m cuvil {command}" in result.stdout


def test_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"cuvil {cuvil.__version__}\n"


@pytest.mark.parametrize("arguments", [[], ["nonsense"], ["run"], ["run", "--nonsense", "x.py"]])
def test_wrong_use_exits_with_status_2_and_the_usage(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    assert "usage: python -m cuvil" in capsys.readouterr().err


def test_bench_refuses_unknown_rivals(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(["mlp", "--vs", "magic"]) == 2
    assert "magic" in capsys.readouterr().err


def test_bench_names_an_unknown_model_before_anything_is_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    pytest.importorskip("torch")
    monkeypatch.setattr(bench, "_bench_one", lambda *_: pytest.fail("measured"))
    assert bench.main(["mlp", "decoder23", "--json", str(tmp_path / "f.json")]) == 2
    error = capsys.readouterr().err
    assert "decoder23: no such model, but decoder32" in error
    assert all(name in error for name in ("mlp", "bert-base", "minilm", "resnet50", "timm:NAME"))
    assert not cuvil.enabled()
    assert not list(tmp_path.iterdir())


def test_the_machine_can_be_described_after_torch_has_loaded_its_libraries() -> None:
    """CUPTI of CUDA 13.2 dies of a question where there is no driver."""
    program = "import torch; from cuvil import environment; print(environment.describe()['cpu'])"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip()


def test_bench_keeps_what_was_measured_when_a_later_model_fails(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("torch")

    def measure(torch: object, name: str, *_: object) -> dict[str, str]:
        if name == "bert-base":
            raise MemoryError
        return {"name": name}

    monkeypatch.setattr(bench, "_bench_one", measure)
    monkeypatch.setattr(bench.models, "check", lambda name: None)
    try:
        with pytest.raises(MemoryError):
            bench.main(["mlp", "bert-base", "--json", str(tmp_path / "f.json")])
    finally:
        cuvil.disable()
    assert json.loads((tmp_path / "f.json").read_text())["results"] == [{"name": "mlp"}]


def test_whatever_disables_the_engine_disables_it_for_the_doctor() -> None:
    pytest.importorskip("torch")
    program = (
        "import os, cuvil\nfrom cuvil import environment\n"
        "for value in ('', '0', '1', 'true', 'no', ' ', '00'):\n"
        "    os.environ['CUVIL_DISABLE'] = value\n"
        "    cuvil.enable()\n"
        "    print(repr(value), bool(environment.disabled()), cuvil.enabled())\n"
        "    cuvil.disable()\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    lines = [line.rsplit(maxsplit=2) for line in done.stdout.splitlines()]
    assert len(lines) == 7
    assert all({disabled, enabled} == {"True", "False"} for _, disabled, enabled in lines), done.stdout


def test_doctor_calls_a_disabled_engine_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setenv("CUVIL_DISABLE", "true")
    (model,) = doctor._end_to_end(torch)
    assert model.level is doctor.Level.NOTE
    assert "CUVIL_DISABLE=true is set" in model.text
    assert any("CUVIL_DISABLE=true" in finding.text for finding in doctor._engine())


def test_doctor_advises_what_the_readme_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuvil._native, "__name__", "cuvil.unavailable")
    (engine,) = doctor._engine()
    assert engine.level is doctor.Level.FAIL
    assert "`pip install .`" in engine.fix


def findings(*levels: doctor.Level) -> list[doctor.Finding]:
    return [doctor.Finding(f"part {n}", level, "text", "fix" if n else "") for n, level in enumerate(levels)]


def test_doctor_exits_with_0_when_nothing_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = findings(doctor.Level.OK, doctor.Level.WARN, doctor.Level.NOTE)
    monkeypatch.setattr(doctor, "findings", lambda: iter(found))
    assert doctor.main([]) == 0
    text = capsys.readouterr().out
    assert "→ fix" in text
    assert text.endswith("Cuvil works here.\n")


def test_doctor_exits_with_1_and_repeats_the_first_failure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    found = findings(doctor.Level.OK, doctor.Level.FAIL)
    monkeypatch.setattr(doctor, "findings", lambda: iter(found))
    assert doctor.main(["--json", str(tmp_path / "report.json")]) == 1
    assert capsys.readouterr().out.endswith("Cuvil does not work here: text\n")
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["works"] is False
    assert report["findings"][1] == {"subject": "part 1", "level": "fail", "text": "text", "fix": "fix"}


def test_doctor_reports_a_check_that_breaks_and_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def _broken_check() -> None:
        raise OSError("no /proc")

    def _fine() -> list[doctor.Finding]:
        return findings(doctor.Level.OK)

    monkeypatch.setattr(doctor, "_CHECKS", (_broken_check, _fine))
    first, second = doctor.findings()
    assert (first.level, first.subject) == (doctor.Level.FAIL, "broken check")
    assert "no /proc" in first.text
    assert second.level is doctor.Level.OK


class FakeCuda:
    """torch.cuda as far as the doctor asks it."""

    def __init__(self, backend: str) -> None:
        self.backend = backend

    def is_available(self) -> bool:
        return True

    def get_allocator_backend(self) -> str:
        return self.backend


def sampled(*names: str, problem: str = "") -> dict[str, object]:
    samples = [(n, 0, name, "%", 50.0) for n, name in enumerate(names)]
    return {"problem": problem, "samples": samples, "rounds": 7, "cpu_ns": 10, "wall_ns": 1000, "period_ns": 5}


def gpu_findings(
    monkeypatch: pytest.MonkeyPatch, report: dict[str, object], backend: str = "native"
) -> dict[str, doctor.Finding]:
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=FakeCuda(backend)))
    monkeypatch.setattr(doctor, "_end_to_end", lambda torch, device: iter([]))
    monkeypatch.setattr(cuvil._native, "sample_gpus", lambda milliseconds: report)
    budget = {"graph_budget_bytes": 1 << 30, "graph_bytes": 3 << 20, "graph_workspace_bytes": 1 << 20}
    monkeypatch.setattr(cuvil._native, "stats", lambda: budget)
    return {finding.subject: finding for finding in doctor._cuda()}


def test_doctor_tells_what_a_gpu_can_do(monkeypatch: pytest.MonkeyPatch) -> None:
    found = gpu_findings(monkeypatch, sampled("SM occupancy", "PCIe sent", "SM occupancy"))
    assert {finding.level for finding in found.values()} == {doctor.Level.OK}
    assert found["live counters"].text == "PCIe sent, SM occupancy; reading them takes 1.00% of a core"
    assert "may hold 1 GiB and hold 4 MiB (CUVIL_GRAPH_MEMORY" in found["graph memory"].text


def test_doctor_says_how_to_get_graphs_and_counters_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    found = gpu_findings(monkeypatch, sampled(problem="no NVML"), "cudaMallocAsync")
    allocator, counters = found["CUDA allocator"], found["live counters"]
    assert allocator.level is counters.level is doctor.Level.WARN
    assert allocator.fix == "leave backend:cudaMallocAsync out of PYTORCH_CUDA_ALLOC_CONF"
    assert "no NVML" in counters.text
    assert "NVIDIA_DRIVER_CAPABILITIES" in counters.fix


def test_doctor_notes_a_gpu_without_occupancy(monkeypatch: pytest.MonkeyPatch) -> None:
    counters = gpu_findings(monkeypatch, sampled("SM busy"))["live counters"]
    assert counters.level is doctor.Level.NOTE
    assert "Hopper" in counters.text


def test_doctor_asks_no_gpu_where_torch_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=SimpleNamespace(is_available=lambda: False)))
    monkeypatch.setattr(cuvil._native, "sample_gpus", lambda milliseconds: pytest.fail("asked"))
    assert not list(doctor._cuda())


def test_sampling_without_a_gpu_says_why() -> None:
    report = cuvil._native.sample_gpus(1)
    assert report["problem"] or report["samples"]


class FakeGpu:
    """A GPU on which work is done when somebody waits for it."""

    def __init__(self) -> None:
        self.waited: list[object] = []

    def synchronize(self, device: object) -> None:
        self.waited.append(device)


def test_bench_waits_for_the_gpu_in_every_timed_call(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import torch
    from cuvil import models

    gpu = FakeGpu()
    dtypes: list[torch.dtype] = []

    def cast(model: models.Model, dtype: torch.dtype, device: str) -> models.Model:
        dtypes.append(dtype)
        assert device == "cuda:1"
        return model  # Stays on the CPU, in float32.

    calls = 0

    class Counted(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            nonlocal calls
            if not torch.compiler.is_compiling():
                calls += 1
            return torch.relu(x)

    monkeypatch.setattr(models, "cast", cast)
    monkeypatch.setattr(models, "build", lambda name, batch: models.Model(Counted().eval(), (torch.ones(4),), {}))
    monkeypatch.setattr(models, "twin", lambda module: Counted().eval())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", gpu.synchronize)
    monkeypatch.setattr(bench, "wait_for_plan", lambda call, planned, timeout: None)
    try:
        assert bench.main(["mlp", "--device", "cuda:1", "--seconds", "0.01"]) == 0
    finally:
        cuvil.disable()
    assert dtypes == [torch.float16]
    # What a plan answers runs no Python, but is waited for.
    assert len(gpu.waited) >= calls > 0
    assert set(gpu.waited) == {"cuda:1"}
    text = capsys.readouterr().out
    assert "float16, cuda:1" in text
