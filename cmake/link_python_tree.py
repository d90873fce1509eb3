"""Mirrors python/cuvil into a build tree by symbolic links, so that it can be imported beside the built extension.

Usage: link_python_tree.py SOURCE_PACKAGE BUILD_PACKAGE
Files that are added to or removed from the package later are picked up by the next build; compiled extensions in
BUILD_PACKAGE are left alone.
"""

import sys
from pathlib import Path


def main() -> int:
    source, build = Path(sys.argv[1]), Path(sys.argv[2])
    build.mkdir(parents=True, exist_ok=True)
    wanted = {p.name: p for p in source.iterdir() if p.name not in ("__pycache__", "_native")}
    for entry in build.iterdir():
        if entry.is_symlink() and entry.name not in wanted:
            entry.unlink()
    for name, target in wanted.items():
        link = build / name
        if link.is_symlink() and link.readlink() == target:
            continue
        link.unlink(missing_ok=True)
        link.symlink_to(target)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
