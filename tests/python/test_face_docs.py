"""docs/architecture.md is true: the types it names are where it says, and no header or type goes unmentioned."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| (`[^|]*`) \| ([^|]*\.h[^|]*) \|", TEXT, re.MULTILINE)
# Attributes, alignment and thread-safety macros may stand between the keyword and the name.
DECLARATION = r"(?:class|struct|enum class)\s+(?:(?:[A-Z_]+(?:\([^)]*\))?|alignas\([^)]*\)|\[\[.*?\]\])\s+)*"
HEADERS = [
    path
    for folder in ("agent", "jit", "scheduler", "memory")
    for path in sorted((ROOT / folder).rglob("*.h"))
    if not path.stem.endswith(("_debug", "_internal"))
]


def types_and_headers() -> list[tuple[str, str]]:
    return [(name, headers) for types, headers in ROWS for name in re.findall(r"`([\w:]+)`", types)]


def test_there_are_rows_to_check() -> None:
    assert len(types_and_headers()) > 40


@pytest.mark.parametrize(("name", "headers"), types_and_headers())
def test_named_type_is_in_the_named_header(name: str, headers: str) -> None:
    namespace, _, short = name.rpartition("::")
    texts = [(ROOT / header.strip()).read_text(encoding="utf-8") for header in headers.split(",")]
    declaration = rf"^{DECLARATION}{short}\b(?!;)|^using {short} ="
    assert any(
        re.search(declaration, text, re.MULTILINE) and f"namespace cuvil::{namespace}" in text for text in texts
    ), f"{name} is not declared in {headers}"


def test_every_header_is_mentioned() -> None:
    missing = [path.relative_to(ROOT).as_posix() for path in HEADERS if path.relative_to(ROOT).as_posix() not in TEXT]
    assert not missing


def public_types(text: str) -> list[str]:
    """Types that a header declares at namespace scope, as `namespace::Name`; what is nested is indented."""
    found = []
    namespaces = [""]
    for line in text.splitlines():
        opened = re.match(r"(?:inline )?namespace(?: cuvil::)?([\w:]*).*\{", line)
        if opened:
            namespaces.append(opened.group(1))
        elif line.startswith("}  // namespace"):
            namespaces.pop()
        declared = re.match(rf"(?:template\s*<.*>\s*)?{DECLARATION}(\w+)\s*(?:final\b|[:{{]|$)", line)
        if declared:
            found.append(f"{namespaces[-1]}::{declared.group(1)}")
    return found


def test_types_are_found_in_a_header() -> None:
    header = """
namespace cuvil::agent {
class Forward;
class ABSL_LOCKABLE ForwardToo;
struct Plain {
  struct Nested {
    int x;
  };
};
enum class Kind : uint8_t { kOne, kTwo };
template <typename T>
class Holder final : public Base {
};
class ABSL_LOCKABLE Lock {
};
struct alignas(16) Aligned {
};
class [[nodiscard]] Scope {
};
}  // namespace cuvil::agent
"""
    assert public_types(header) == [
        f"agent::{name}" for name in ("Plain", "Kind", "Holder", "Lock", "Aligned", "Scope")
    ]


def test_every_type_is_named() -> None:
    named = {name for name, _ in types_and_headers()}
    declared = {
        (path.relative_to(ROOT).as_posix(), name)
        for path in HEADERS
        for name in public_types(path.read_text(encoding="utf-8"))
    }
    assert len(declared) > 200
    missing = sorted(f"{header}: {name}" for header, name in declared if name not in named)
    assert not missing, "no table of docs/architecture.md has " + ", ".join(missing)


def test_exceptions_are_caught_in_the_boundaries_only() -> None:
    sources = [
        path
        for folder in ("agent", "jit", "scheduler", "memory", "python")
        for suffix in ("*.h", "*.cc")
        for path in (ROOT / folder).rglob(suffix)
    ]
    catching = {
        path.relative_to(ROOT).as_posix()
        for path in sources
        if re.search(r"^[^/]*\bcatch \(", path.read_text(encoding="utf-8"), re.MULTILINE)
    }
    assert catching == {"agent/boundary.h", "scheduler/torch/boundary.h"}


@pytest.mark.parametrize("document", ["README.md", "docs/architecture.md", "docs/STATUS.md", "docs/performance.md"])
def test_links_between_documents_lead_somewhere(document: str) -> None:
    path = ROOT / document
    for target in re.findall(r"\]\(([^)#:]+)\)", path.read_text(encoding="utf-8")):
        assert (path.parent / target).exists(), target
