"""``python -m cuvil profile``: a program as ``python -m cuvil run`` runs it, with a profile of all of it."""

from __future__ import annotations

import os
import sys

from cuvil import run
from cuvil.profiling import BY, Profile

_DEFAULT_OUTPUT = "cuvil-trace.json"
_ROWS = 20

_USAGE = """\
usage: python -m cuvil profile [options] SCRIPT [options] [--] [ARG...]
       python -m cuvil profile [options] -m MODULE [options] [--] [ARG...]

Runs a program as `python -m cuvil run` would, times the steps of Cuvil's plans and every torch.nn.Module call, writes a
trace for https://ui.perfetto.dev and prints a table on stderr when the program ends.

options, before SCRIPT or right behind it (`--` ends them, and everything from the first other argument on is SCRIPT's):
  -o, --output FILE    the trace (cuvil-trace.json)
  --html FILE          a page with tables and a timeline, too
  --by KEY             what the printed table tells apart: line, module, operator or kernel (line)

What is recorded: module calls that Cuvil intercepts, at any depth, from the program's import of torch on; a call that a
plan answers is recorded by its steps, with the modules and lines that they come from. Tensor code outside of modules is
not seen, and of eager code inside of them only the modules, not the single operators. Calls that Cuvil times to decide
whether a plan is worth having are recorded as a whole; CUVIL_ADOPT=always does without them. On a GPU every kernel and
copy is recorded with the line that asked for it, inside of CUDA graphs too; while that is so, launches are slower.
"""


class _WrongUse(Exception):
    pass


def _take_options(argv: list[str], options: dict[str, str]) -> list[str]:
    """Moves leading options from `argv` to `options`; returns the rest."""
    names = {"-o": "output", "--output": "output", "--html": "html", "--by": "by"}
    while argv:
        name, equals, value = argv[0].partition("=")
        if name not in names or (equals and not name.startswith("--")):
            break
        if not equals:
            if len(argv) < 2:
                raise _WrongUse(f"{name} needs a value")
            value = argv[1]
        options[names[name]] = value
        argv = argv[1 if equals else 2 :]
    return argv


def _parse(argv: list[str]) -> tuple[list[str], dict[str, str]]:
    """The arguments for `run`, and the options."""
    options = {"output": _DEFAULT_OUTPUT, "by": "line"}
    argv = _take_options(argv, options)
    if not argv:
        raise _WrongUse("no program to run")
    target = argv[: 2 if argv[0] == "-m" else 1]
    if target[-1] == "-m":
        raise _WrongUse("-m needs a module")
    rest = _take_options(argv[len(target) :], options)
    if rest[:1] == ["--"]:
        rest = rest[1:]
    if options["by"] not in BY:
        raise _WrongUse(f"--by {options['by']}: choose one of {', '.join(BY)}")
    for name in ("output", "html"):
        folder = os.path.dirname(os.path.abspath(options.get(name, "")))
        if not os.path.isdir(folder):
            raise _WrongUse(f"there is no folder {folder}")
    return [*target, *rest], options


def _tell(profile: Profile, options: dict[str, str]) -> None:
    """The program's exit status and exception stay what they are, also if the profile cannot be written."""
    written = [options["output"]]
    try:
        profile.save_trace(options["output"])
        if "html" in options:
            profile.save_html(options["html"])
            written.append(options["html"])
    except OSError as error:
        print(f"\ncuvil: the profile cannot be written: {error}", file=sys.stderr)
    else:
        print(f"\ncuvil: profile in {' and '.join(written)}", file=sys.stderr)
    print(profile.table(by=options["by"], limit=_ROWS), file=sys.stderr)


def main(argv: list[str]) -> int:
    if argv and argv[0] in ("-h", "--help"):
        sys.stdout.write(_USAGE)
        return 0
    try:
        arguments, options = _parse(argv)
    except _WrongUse as error:
        sys.stderr.write(f"python -m cuvil profile: {error}\n\n{_USAGE}")
        return 2
    # The program may change its folder.
    options |= {name: os.path.abspath(options[name]) for name in ("output", "html") if name in options}
    own_main = sys.modules["__main__"]
    pid = os.getpid()
    profile = Profile()
    try:
        with profile:
            return run.main(arguments)
    finally:
        # A child of a fork has no profile, and a program that was not found none either.
        if os.getpid() == pid and sys.modules["__main__"] is not own_main:
            _tell(profile, options)
