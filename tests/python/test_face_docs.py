"""docs/architecture.md is true: the types it names are where it says, and no header goes unmentioned."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| (`[^|]*`) \| ([^|]*\.h[^|]*) \|", TEXT, re.MULTILINE)


def types_and_headers() -> list[tuple[str, str]]:
    return [(name, headers) for types, headers in ROWS for name in re.findall(r"`([\w:]+)`", types)]


def test_there_are_rows_to_check() -> None:
    assert len(types_and_headers()) > 40


@pytest.mark.parametrize(("name", "headers"), types_and_headers())
def test_named_type_is_in_the_named_header(name: str, headers: str) -> None:
    namespace, _, short = name.rpartition("::")
    texts = [(ROOT / header.strip()).read_text(encoding="utf-8") for header in headers.split(",")]
    # Attributes and thread-safety macros may stand between the keyword and the name.
    declaration = rf"^(class|struct|enum class)\s+([A-Z_]+(\([^)]*\))?\s+)*{short}\b(?!;)|^using {short} ="
    assert any(
        re.search(declaration, text, re.MULTILINE) and f"namespace cuvil::{namespace}" in text for text in texts
    ), f"{name} is not declared in {headers}"


def test_every_header_is_mentioned() -> None:
    headers = [
        path.relative_to(ROOT).as_posix()
        for folder in ("agent", "jit", "scheduler", "memory")
        for path in (ROOT / folder).rglob("*.h")
        if not path.stem.endswith(("_debug", "_internal"))
    ]
    missing = [header for header in headers if header not in TEXT]
    assert not missing


@pytest.mark.parametrize("document", ["README.md", "docs/architecture.md", "docs/STATUS.md", "docs/performance.md"])
def test_links_between_documents_lead_somewhere(document: str) -> None:
    path = ROOT / document
    for target in re.findall(r"\]\(([^)#:]+)\)", path.read_text(encoding="utf-8")):
        assert (path.parent / target).exists(), target
