"""One direction: a folder includes itself and what its row lists, nothing else (docs/design/0001-layering.md).

Runs under pytest, and alone: python tests/layering_test.py
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

# The longest prefix of a file's folder names its row; a row may include itself.
ROWS: dict[str, tuple[str, ...]] = {
    "memory/device": (),
    "memory": ("memory/device",),
    "jit/cir": (),
    "jit": ("jit/cir",),
    "scheduler/torch": ("jit/cir",),
    "scheduler": ("scheduler/torch", "jit/cir", "jit", "memory", "memory/device"),
    "agent/trace": ("jit/cir",),
    "agent": ("agent/trace", "jit/cir", "jit", "scheduler", "scheduler/torch"),
    "python/cuvil/_native": ("agent",),
}

_PYTHON = r"(Python|frameobject|structmember|opcode)\.h|(cpython|internal)/.*|pycore_.*"

# Headers of others that only some folders may include directly, as (pattern, folders, suffixes).
RESERVED: tuple[tuple[str, tuple[str, ...], tuple[str, ...]], ...] = (
    (_PYTHON, ("agent", "python/cuvil/_native"), (".h", ".cc", ".c")),
    (r"llvm(-c)?/.*", ("jit",), (".cc",)),
    (r"(cuda|cuda_runtime.*|nvml|cudnn.*|cublas.*|numa|numaif)\.h", ("memory/device",), (".h", ".cc")),
    (r"cupti.*\.h", ("scheduler",), (".h", ".cc")),
    (r"(ATen|torch|c10|caffe2)/.*", (), ()),
)

SOURCE_SUFFIXES = (".h", ".cc", ".c", ".def")
_INCLUDE = re.compile(r'^\s*#\s*include(?:_next)?\s*(["<])([^">]+)[">]')


@dataclass(frozen=True)
class Violation:
    """A forbidden include, by line."""

    file: str
    line: int
    reason: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.reason}"


def row_of(path: str) -> str | None:
    """The row of a path relative to the root; None outside every row."""
    folder = path.rpartition("/")[0]
    while folder:
        if folder in ROWS:
            return folder
        folder = folder.rpartition("/")[0]
    return None


def check(path: str, text: str) -> Iterator[Violation]:
    """Checks the includes of one file, given its path relative to the root."""
    row = row_of(path)
    if row is None:
        return
    suffix = Path(path).suffix
    for number, line in enumerate(text.splitlines(), 1):
        match = _INCLUDE.match(line)
        if not match:
            continue
        quote, target = match.groups()
        target_row = row_of(target)
        if target_row is not None:
            if target_row != row and target_row not in ROWS[row]:
                yield Violation(path, number, f"{row} may not include {target_row} ({target})")
            if quote == "<":
                yield Violation(path, number, f"<{target}> is ours: include it in quotes")
        elif quote == '"' and (ROOT / Path(path).parent / target).exists():
            yield Violation(path, number, f'"{target}": write the path from the repository root')
        for pattern, folders, suffixes in RESERVED:
            if re.fullmatch(pattern, target) and not (row in folders and suffix in suffixes):
                where = f"{' and '.join(folders)} ({', '.join(suffixes)})" if folders else "no folder at all"
                yield Violation(path, number, f"<{target}> belongs to {where}")


def sources() -> Iterator[Path]:
    """Every source file that belongs to a row."""
    for top in sorted({row.split("/")[0] for row in ROWS}):
        for path in sorted((ROOT / top).rglob("*")):
            if path.suffix in SOURCE_SUFFIXES and path.is_file():
                yield path


def violations() -> list[Violation]:
    found: list[Violation] = []
    for path in sources():
        found.extend(check(path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")))
    return found


def test_no_folder_includes_what_its_row_forbids() -> None:
    assert list(sources()), "no source file found: the test looks in the wrong place"
    assert not violations(), "\n" + "\n".join(map(str, violations()))


def test_the_table_is_acyclic() -> None:
    order: list[str] = []

    def visit(row: str, path: tuple[str, ...]) -> None:
        assert row not in path, f"cycle: {' -> '.join((*path, row))}"
        if row not in order:
            for dependency in ROWS[row]:
                visit(dependency, (*path, row))
            order.append(row)

    for row in ROWS:
        visit(row, ())


def test_every_forbidden_direction_is_noticed() -> None:
    for row in ROWS:
        for other in ROWS:
            found = list(check(f"{row}/x.cc", f'#include "{other}/y.h"\n'))
            assert bool(found) == (other != row and other not in ROWS[row]), (row, other)


def test_reserved_headers_are_noticed() -> None:
    cases = {
        ("jit/x.cc", "<llvm/IR/Module.h>"): False,
        ("jit/x.h", "<llvm/IR/Module.h>"): True,
        ("jit/cir/x.cc", "<llvm/IR/Module.h>"): True,
        ("agent/x.cc", "<llvm/IR/Module.h>"): True,
        ("agent/x.h", "<Python.h>"): False,
        ("agent/trace/x.h", "<Python.h>"): True,
        ("scheduler/x.cc", "<Python.h>"): True,
        ("scheduler/x.cc", "<cuda.h>"): True,
        ("scheduler/x.cc", "<cupti.h>"): False,
        ("agent/x.cc", "<ATen/ATen.h>"): True,
        ("scheduler/torch/x.cc", "<torch/csrc/stable/library.h>"): True,
        ("agent/x.cc", "<internal/pycore_frame.h>"): False,
        ("jit/x.cc", "<vector>"): False,
    }
    for (path, header), forbidden in cases.items():
        assert bool(list(check(path, f"#include {header}\n"))) == forbidden, (path, header)


def main() -> int:
    found = violations()
    for violation in found:
        print(violation)
    print(f"layering: {len(list(sources()))} files, {len(found)} violations")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
