"""``python -m cuvil run`` against plain ``python``: the program must not be able to tell the difference."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import zipfile
from pathlib import Path

import cuvil as cuvil_package
import pytest

TELL = """\
import sys, __main__
print(__name__, sys.argv, sys.path[0], __file__ if "__file__" in globals() else None)
print(__spec__.name if __spec__ else None, __package__, __main__.__dict__ is globals(), type(__builtins__).__name__)
"""


def run(arguments: list[str], cwd: Path, *, cuvil: bool) -> subprocess.CompletedProcess[str]:
    front = [sys.executable, "-m", "cuvil", "run"] if cuvil else [sys.executable]
    package = str(Path(cuvil_package.__file__).parent.parent)
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": package}
    return subprocess.run(
        [*front, *arguments], cwd=cwd, capture_output=True, text=True, timeout=120, check=False, env=environment
    )


def assert_same(arguments: list[str], cwd: Path) -> subprocess.CompletedProcess[str]:
    plain, ours = run(arguments, cwd, cuvil=False), run(arguments, cwd, cuvil=True)
    assert (ours.returncode, ours.stdout, ours.stderr) == (plain.returncode, plain.stdout, plain.stderr)
    return ours


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(textwrap.dedent(text))
    return path


def test_script_sees_its_own_arguments_path_and_main(tmp_path: Path) -> None:
    write(tmp_path, "sub/program.py", TELL)
    assert "'--help'" in assert_same(["sub/program.py", "-m", "--help", "x y"], tmp_path).stdout


def test_script_through_a_symbolic_link_gets_the_real_folder(tmp_path: Path) -> None:
    write(tmp_path, "real/program.py", TELL)
    (tmp_path / "link.py").symlink_to("real/program.py")
    assert "real" in assert_same(["link.py"], tmp_path).stdout


def test_module_and_package_run_by_name(tmp_path: Path) -> None:
    write(tmp_path, "single.py", TELL)
    write(tmp_path, "pack/__init__.py", "")
    write(tmp_path, "pack/__main__.py", TELL)
    assert_same(["-m", "single", "a"], tmp_path)
    assert "pack.__main__ pack" in assert_same(["-m", "pack", "a"], tmp_path).stdout


def test_directory_and_zip_file_run(tmp_path: Path) -> None:
    write(tmp_path, "folder/__main__.py", TELL)
    with zipfile.ZipFile(tmp_path / "app.zip", "w") as archive:
        archive.writestr("__main__.py", TELL)
    assert_same(["folder", "a"], tmp_path)
    assert_same(["app.zip", "a"], tmp_path)


@pytest.mark.parametrize(
    "program",
    [
        "raise SystemExit(7)",
        "raise SystemExit('bye')",
        "import sys; sys.exit()",
        "def f():\n    raise ValueError('no')\nf()",
        "try:\n    1 / 0\nexcept ZeroDivisionError as error:\n    raise KeyError('k') from error",
        "raise ExceptionGroup('many', [ValueError(1), TypeError(2)])",
        "x = (1,\n",
        "import no_such_module_anywhere",
        "import sys\nsys.excepthook = lambda *a: print('mine', a[0], a[2].tb_lineno)\nraise ValueError",
        "import sys, traceback\nsys.excepthook = lambda t, v, tb: print(len(traceback.extract_tb(tb)))\nraise ValueError",
        "import atexit, __main__\nx = 5\natexit.register(lambda: print(__main__.x))",
        "import sys\nprint([n for n in sys.modules if n in ('torch', 'argparse', 'json', 'numpy')])",
    ],
)
def test_exit_status_output_and_traceback_are_plain_pythons(program: str, tmp_path: Path) -> None:
    write(tmp_path, "program.py", program)
    assert_same(["program.py"], tmp_path)


def test_keyboard_interrupt_ends_by_the_signal(tmp_path: Path) -> None:
    write(tmp_path, "program.py", "raise KeyboardInterrupt\n")
    assert assert_same(["program.py"], tmp_path).returncode == -signal.SIGINT


def test_missing_script_and_module_fail_as_under_python(tmp_path: Path) -> None:
    assert_same(["nothing.py"], tmp_path)
    assert_same(["-m", "no_such_module_anywhere"], tmp_path)


def test_program_classes_can_be_pickled(tmp_path: Path) -> None:
    write(
        tmp_path,
        "program.py",
        "import pickle\nclass C:\n    pass\nprint(type(pickle.loads(pickle.dumps(C()))) is C)\n",
    )
    assert assert_same(["program.py"], tmp_path).stdout == "True\n"


def fake_torch(folder: Path) -> None:
    write(folder, "torch/__init__.py", "import os\nVALUE = os.environ.get('SET_BY_PROGRAM')\n")


def test_torch_is_imported_by_the_program_and_only_then_cuvil_turns_on(tmp_path: Path) -> None:
    fake_torch(tmp_path)
    write(
        tmp_path,
        "program.py",
        """\
        import os, sys
        os.environ["SET_BY_PROGRAM"] = "yes"
        import cuvil
        calls = []
        cuvil.enable = lambda: calls.append("torch" in sys.modules)
        import torch
        print(torch.VALUE, calls, type(torch.__loader__).__name__, torch.__spec__.loader is torch.__loader__)
        import torch
        print(calls, [type(f).__name__ for f in sys.meta_path if "Torch" in type(f).__name__])
        """,
    )
    result = run(["program.py"], tmp_path, cuvil=True)
    assert result.stdout == "yes [True] SourceFileLoader True\n[True] []\n", result.stderr


def test_where_cuvil_refuses_the_program_runs_without_it(tmp_path: Path) -> None:
    fake_torch(tmp_path)
    write(
        tmp_path,
        "program.py",
        """\
        import cuvil
        def refuse():
            raise RuntimeError("torch 0.1 is too old")
        cuvil.enable = refuse
        import torch
        print("went on")
        """,
    )
    result = run(["program.py"], tmp_path, cuvil=True)
    assert (result.returncode, result.stdout) == (0, "went on\n")
    assert result.stderr == "cuvil: off: torch 0.1 is too old\n"


def test_failing_import_of_torch_is_the_programs_to_handle(tmp_path: Path) -> None:
    write(tmp_path, "torch/__init__.py", "raise ImportError('broken')\n")
    write(tmp_path, "program.py", "try:\n    import torch\nexcept ImportError as e:\n    print(e)\n")
    assert assert_same(["program.py"], tmp_path).stdout == "broken\n"
