"""``python -m cuvil profile``: the program as it is, and a profile beside it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import cuvil
import pytest

PACKAGE = str(Path(cuvil.__file__).absolute().parent.parent)  # programs run in a folder of their own

SCRIPT = """\
import sys
import torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = torch.nn.Linear(4, 4)

    def forward(self, x):
        return torch.relu(self.fc(x))

def main():
    model = Net().eval()
    with torch.no_grad():
        for _ in range(6):
            model(torch.ones(2, 4))

if __name__ == "__main__":
    main()
    print(__name__, sys.argv[1:])
    sys.exit(3)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "script.py").write_text(SCRIPT)
    return tmp_path


def profile(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "cuvil", "profile", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        cwd=folder,
        env=os.environ | {"CUVIL_PREPARE": "sync", "CUVIL_ADOPT": "always", "PYTHONPATH": PACKAGE},
    )


def slice_names(path: Path) -> set[str]:
    return {event["name"] for event in json.loads(path.read_text())["traceEvents"] if event["ph"] == "X"}


@pytest.mark.parametrize(
    ("arguments", "given"),
    [
        (["script.py", "-o", "out.json"], []),
        (["script.py", "--output=out.json", "a", "-o", "b"], ["a", "-o", "b"]),
        (["-o", "out.json", "script.py", "--", "-o", "mine"], ["-o", "mine"]),
        (["-m", "script", "-o", "out.json", "x"], ["x"]),
    ],
)
def test_a_program_is_profiled_and_gets_its_own_arguments(folder: Path, arguments: list[str], given: list[str]) -> None:
    done = profile(folder, *arguments)
    assert done.stdout == f"__main__ {given}\n", done.stderr
    assert done.returncode == 3
    assert {"aten::linear", "aten::relu", "Net.fc", "Net (Net)"} <= slice_names(folder / "out.json")
    assert "script.py:10" in done.stderr
    assert sorted(p.name for p in folder.iterdir() if p.suffix in (".json", ".html", ".part")) == ["out.json"]


def test_the_page_and_the_table_can_be_chosen(folder: Path) -> None:
    done = profile(folder, "script.py", "--html", "page.html", "--by", "module")
    assert "Net.fc" in done.stderr
    assert "with inner" in done.stderr
    assert "profile in " in done.stderr
    assert "aten::relu" in (folder / "page.html").read_text(encoding="utf-8")
    assert "aten::relu" in slice_names(folder / "cuvil-trace.json")


def test_a_program_that_raises_has_a_profile_and_its_own_traceback(folder: Path) -> None:
    (folder / "raises.py").write_text(SCRIPT.replace("sys.exit(3)", "raise KeyError('mine')"))
    done = profile(folder, "raises.py", "-o", "out.json")
    plain = subprocess.run(
        [sys.executable, "raises.py"], capture_output=True, text=True, timeout=120, check=False, cwd=folder
    )
    assert done.returncode == plain.returncode == 1
    assert done.stderr.replace(str(folder) + os.sep, "").startswith(plain.stderr.replace(str(folder) + os.sep, ""))
    assert "aten::relu" in slice_names(folder / "out.json")


def test_the_program_may_change_its_folder_and_cuvils_switch_is_respected(folder: Path) -> None:
    (folder / "moves.py").write_text(SCRIPT.replace("    main()", "    import os; os.chdir('/'); main()"))
    assert profile(folder, "moves.py", "-o", "out.json").returncode == 3
    assert "aten::relu" in slice_names(folder / "out.json")


def test_a_program_may_not_take_a_profile_of_its_own_inside(folder: Path) -> None:
    (folder / "inner.py").write_text(
        textwrap.dedent(
            """
            import cuvil
            try:
                with cuvil.profile(): pass
            except RuntimeError as error:
                print(error)
            """
        )
    )
    assert "being taken already" in profile(folder, "inner.py").stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "no program"),
        (["-o"], "needs a value"),
        (["-m"], "needs a module"),
        (["script.py", "--by", "colour"], "choose one of line, module, operator, kernel"),
        (["script.py", "-o", "none/out.json"], "no folder"),
        (["--nonsense", "script.py"], "usage"),
    ],
)
def test_wrong_use_is_said_before_anything_runs(folder: Path, arguments: list[str], words: str) -> None:
    done = profile(folder, *arguments)
    assert done.returncode == 2
    assert words in done.stderr
    assert not done.stdout
    assert [path.name for path in folder.iterdir()] == ["script.py"]


def test_a_program_that_is_not_there_leaves_no_profile(folder: Path) -> None:
    done = profile(folder, "missing.py")
    assert done.returncode == 2
    assert "can't open file" in done.stderr
    assert [path.name for path in folder.iterdir()] == ["script.py"]


def test_a_trace_that_cannot_be_written_changes_no_exit_status(folder: Path) -> None:
    (folder / "taken").mkdir()
    done = profile(folder, "script.py", "-o", "taken")
    assert done.returncode == 3
    assert "cannot be written" in done.stderr
    assert "script.py:10" in done.stderr
