"""``python -m cuvil run``: a script or module as ``python`` would run it, with Cuvil on.

What the program sees (``__main__``, sys.argv, sys.path[0], exit status, traceback) is what it sees under plain
``python``. torch is not imported ahead of the program, which may want to set environment variables first: Cuvil is
turned on when the program's own import of torch finishes.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import os
import pkgutil
import sys
import traceback
from collections.abc import Callable, Sequence
from types import CodeType, ModuleType, TracebackType

_USAGE = """\
usage: python -m cuvil run SCRIPT [ARG...]
       python -m cuvil run -m MODULE [ARG...]

Runs a program as `python SCRIPT ARG...` or `python -m MODULE ARG...` would, with Cuvil turned on as soon as the
program has imported torch. Where Cuvil cannot work, one line on stderr says why and the program runs without it.

SCRIPT is a file, or a directory or zip file that holds __main__.py.

environment:
  CUVIL_DISABLE=1      run without Cuvil
  CUVIL_LOG=info       tell what is planned and refused (debug: more)
  CUVIL_PREPARE=sync   prepare plans in the calling thread instead of the background
  CUVIL_ADOPT=always   use every plan that is right, without timing it against eager
  CUVIL_PLANS=16       plans kept per module
On a GPU:
  CUVIL_GRAPH_MEMORY=0.125   what CUDA graphs may hold of each GPU: a share with a point, or bytes such as 512M
  CUVIL_STREAMS=4            streams that branches of one CUDA graph may use
"""


def enable_or_tell() -> None:
    """Turn Cuvil on; where it refuses, one line on stderr says why and the program goes on without it."""
    import cuvil

    try:
        cuvil.enable()
    except RuntimeError as error:
        print(f"cuvil: off: {error}", file=sys.stderr)


class _EnableAfterTorch(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds torch once, and turns Cuvil on when that import has finished; leaves no trace in torch's module or spec."""

    def __init__(self) -> None:
        self._loader: importlib.abc.Loader | None = None

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return None
        self._loader = spec.loader
        spec.loader = self
        return spec

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        assert self._loader is not None
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        assert self._loader is not None and module.__spec__ is not None
        module.__spec__.loader = self._loader
        module.__loader__ = self._loader
        self._loader.exec_module(module)
        enable_or_tell()


def enable_when_torch_is_imported() -> None:
    if "torch" in sys.modules:
        enable_or_tell()
    else:
        sys.meta_path.insert(0, _EnableAfterTorch())


def _fail(message: str) -> int:
    # The wording and the status of the interpreter's own complaint.
    print(f"{sys.executable}: {message}", file=sys.stderr)
    return 2


def _main_module(spec: importlib.machinery.ModuleSpec | None, file: str, loader: object) -> ModuleType:
    module = ModuleType("__main__")
    module.__dict__.update(
        __builtins__=sys.modules["builtins"],
        __file__=file,
        __cached__=spec.cached if spec is not None else None,
        __loader__=loader,
        __package__=spec.parent if spec is not None else None,
        __spec__=spec,
    )
    return module


def _load_script(path: str) -> tuple[ModuleType, Callable[[], CodeType]]:
    path = os.path.abspath(path)  # As python does since 3.9, in __file__ and in tracebacks.
    importer = pkgutil.get_importer(path)
    if importer is not None:
        spec = getattr(importer, "find_spec", lambda _: None)("__main__")
        if spec is not None:
            return _load_spec(spec, path)
    loader = importlib.machinery.SourceFileLoader("__main__", path)

    def code() -> CodeType:
        # Not through the loader's cache: a script leaves no .pyc behind.
        with open(path, "rb") as file:
            return compile(file.read(), path, "exec", dont_inherit=True)

    return _main_module(None, path, loader), code


def _load_spec(spec: importlib.machinery.ModuleSpec, first_path: str) -> tuple[ModuleType, Callable[[], CodeType]]:
    loader = spec.loader
    assert loader is not None
    origin = spec.origin or first_path

    def code() -> CodeType:
        found = loader.get_code(spec.name)  # type: ignore[attr-defined]
        if not isinstance(found, CodeType):
            raise ImportError(f"No code object available for {spec.name}")  # noqa: TRY004 - what python raises.
        return found

    return _main_module(spec, origin, loader), code


def _module_spec(name: str) -> importlib.machinery.ModuleSpec | str:
    """The spec to run for ``-m name``, or the interpreter's sentence about why there is none."""
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        return f"Error while finding module specification for {name!r} ({type(error).__name__}: {error})"
    if spec is None:
        return f"No module named {name}"
    if spec.submodule_search_locations is not None:
        if name.endswith(".__main__"):
            return "Cannot use package as __main__ module"
        inner = _module_spec(name + ".__main__")
        if isinstance(inner, str):
            return f"{inner}; {name!r} is a package and cannot be directly executed"
        return inner
    if spec.loader is None:
        return f"{name!r} is a namespace package and cannot be executed"
    return spec


def _without_own_frames(trace: TracebackType | None) -> TracebackType | None:
    """Drops the frames that led to the program: this file's, and the import system's while it was found and compiled."""
    while trace is not None and (
        trace.tb_frame.f_code.co_filename == __file__
        or trace.tb_frame.f_code.co_filename.startswith("<frozen importlib")
    ):
        trace = trace.tb_next
    return trace


def _execute(module: ModuleType, code: Callable[[], CodeType]) -> int:
    # The module stays in sys.modules after the program's last line: atexit handlers, daemon threads, pickle and
    # multiprocessing look it up there. runpy would have put the old one back.
    sys.modules["__main__"] = module
    try:
        exec(code(), module.__dict__)  # noqa: S102 - running the user's program is the purpose.
    except SystemExit:
        raise
    except BaseException as error:
        error.__traceback__ = _without_own_frames(error.__traceback__)
        sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__
        try:
            sys.excepthook(type(error), error, error.__traceback__)
        except Exception:  # noqa: BLE001 - a broken hook of the program's: print both, as the interpreter does.
            print("Error in sys.excepthook:", file=sys.stderr)
            traceback.print_exc()
            print("\nOriginal exception was:", file=sys.stderr)
            sys.__excepthook__(type(error), error, error.__traceback__)
        # Reported once, above. Raising on leaves the exit status to the interpreter, which ends the process by SIGINT
        # after a KeyboardInterrupt and with status 1 after anything else.
        sys.excepthook = lambda *_: None
        raise
    return 0


def main(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help"):
        (sys.stdout if argv else sys.stderr).write(_USAGE)
        return 0 if argv else 2
    if argv[0] == "--":
        argv = argv[1:]
    if argv and (argv[0] == "-m" or (argv[0].startswith("-m") and not argv[0].startswith("--"))):
        name, rest = (argv[1] if len(argv) > 1 else "", argv[2:]) if argv[0] == "-m" else (argv[0][2:], argv[1:])
        if not name:
            return _fail("Argument expected for the -m option")
        sys.argv = ["-m", *rest]  # What python shows while it looks for the module.
        spec = _module_spec(name)
        if isinstance(spec, str):
            print(f"{sys.executable}: {spec}", file=sys.stderr)
            return 1
        module, code = _load_spec(spec, name)
        sys.argv = [spec.origin or name, *rest]
        enable_when_torch_is_imported()
        return _execute(module, code)

    if not argv or argv[0].startswith("-"):
        sys.stderr.write(_USAGE)
        return 2
    script, rest = argv[0], argv[1:]
    if not os.path.exists(script):
        return _fail(f"can't open file {os.path.abspath(script)!r}: [Errno 2] No such file or directory")
    container = os.path.isdir(script) or (pkgutil.get_importer(script) is not None)
    if not sys.flags.safe_path:
        # `python -m cuvil` put the current directory first; a program expects its own.
        first = os.path.abspath(script) if container else os.path.dirname(os.path.realpath(script))
        sys.path[0] = first
    elif container:
        sys.path.insert(0, os.path.abspath(script))
    sys.argv = [script, *rest]
    module, code = _load_script(script)
    if container and module.__spec__ is None:
        print(f"{sys.executable}: can't find '__main__' module in {os.path.abspath(script)!r}", file=sys.stderr)
        return 1
    enable_when_torch_is_imported()
    return _execute(module, code)
