"""The command line: help that is true, errors that say what to do, exit statuses."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

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
