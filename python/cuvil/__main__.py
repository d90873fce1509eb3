"""``python -m cuvil``: run, profile, doctor, bench."""

from __future__ import annotations

import sys

_USAGE = """\
usage: python -m cuvil COMMAND ...

commands:
  run SCRIPT [ARG...]      run a Python script with Cuvil on (also: run -m MODULE [ARG...])
  profile SCRIPT [-o FILE] [ARG...]
                           run a Python script with Cuvil on and tell which lines its time goes to (also: -m MODULE)
  doctor [--json FILE]     tell what will work on this machine, and how to fix what does not
  bench NAME... [options]  time models: eager, torch.compile and Cuvil, interleaved in one process

`python -m cuvil COMMAND --help` tells more; `python -m cuvil --version` prints the version.
"""


def main(argv: list[str]) -> int:
    if not argv:
        sys.stderr.write(_USAGE)
        return 2
    command, rest = argv[0], argv[1:]
    if command in ("-h", "--help", "help"):
        sys.stdout.write(_USAGE)
        return 0
    if command in ("-V", "--version"):
        from cuvil import __version__

        print(f"cuvil {__version__}")
        return 0
    # Each command imports only what it needs: `run` must not load anything that the script would find loaded.
    if command == "run":
        from cuvil import run

        return run.main(rest)
    if command == "profile":
        from cuvil import profile_run

        return profile_run.main(rest)
    if command == "doctor":
        from cuvil import doctor

        return doctor.main(rest)
    if command == "bench":
        from cuvil import bench

        return bench.main(rest)
    sys.stderr.write(f"python -m cuvil: no command {command!r}\n\n{_USAGE}")
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
