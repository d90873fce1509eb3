"""The extension needs libc, libm, libgcc_s and the dynamic loader, and exports one symbol.

Everything else — CUDA, CUPTI, libnuma, libstdc++, LLVM, torch — is linked statically or looked for at run time.
Tests the extension that `import cuvil` would load, or the files named in CUVIL_LINKAGE_FILES (separated by colons).
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import subprocess
from pathlib import Path

import pytest

# libgcc_s holds the unwinder that every C++ library of a process shares; a copy of our own aborts when it meets an
# exception of libtorch's (docs/design/0006-torch-boundary.md).
ALLOWED_NEEDED = {"libc.so.6", "libm.so.6", "libgcc_s.so.1", "ld-linux-x86-64.so.2", "ld-linux-aarch64.so.1"}
EXPORTED = {"PyInit__native"}
# Debian 12's static LLVM calls arc4random, which glibc has from this version on (auditwheel: manylinux_2_36).
NEWEST_GLIBC = (2, 36)
SIZE_LIMIT_BYTES = 64 << 20
# The extension is unusable under these, and only these, other linkages; CI's sanitizer builds are not shipped.
SANITIZER_RUNTIMES = ("libasan", "libtsan", "libubsan")


def _extensions() -> list[Path]:
    named = os.environ.get("CUVIL_LINKAGE_FILES")
    if named:
        return [Path(name) for name in named.split(":")]
    package = importlib.util.find_spec("cuvil")
    if package is None or not package.submodule_search_locations:
        return []
    return [
        path
        for folder in package.submodule_search_locations
        for path in Path(folder).glob(f"_native.{importlib.machinery.EXTENSION_SUFFIXES[0].lstrip('.')}")
    ]


def _run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def _needed(path: Path) -> set[str]:
    lines = _run("readelf", "--wide", "--dynamic", str(path)).splitlines()
    return {line.split("[")[1].rstrip("]") for line in lines if "(NEEDED)" in line}


@pytest.fixture(params=_extensions() or [Path()], ids=lambda path: path.name or "none")
def extension(request: pytest.FixtureRequest) -> Path:
    path: Path = request.param
    assert path.name, "no built extension: set PYTHONPATH to a build's python folder, or install cuvil"
    if any(library.startswith(SANITIZER_RUNTIMES) for library in _needed(path)):
        pytest.skip("a sanitizer build")
    return path


def test_needs_libc_libm_and_the_loader_only(extension: Path) -> None:
    assert _needed(extension) <= ALLOWED_NEEDED


def test_exports_one_symbol(extension: Path) -> None:
    lines = _run("nm", "--dynamic", "--defined-only", "--format=posix", str(extension)).splitlines()
    assert {line.split()[0] for line in lines} == EXPORTED


def test_imports_nothing_of_torch_or_cuda_or_cxx(extension: Path) -> None:
    lines = _run("nm", "--dynamic", "--undefined-only", "--format=posix", str(extension)).splitlines()
    names = {line.split()[0].partition("@")[0] for line in lines}
    foreign = {
        n
        for n in names
        if n.startswith(("_ZN2at", "_ZN3c10", "aoti_", "torch_", "cu", "cupti", "numa_", "_ZSt", "_ZNSt", "_ZN4llvm"))
    }
    assert not foreign


def test_runs_on_debian_12(extension: Path) -> None:
    versions = set()
    for line in _run("readelf", "--wide", "--version-info", str(extension)).splitlines():
        for word in line.split():
            if word.startswith("GLIBC_") and word[6:7].isdigit():
                versions.add(tuple(int(part) for part in word[6:].split(".")))
    assert versions and max(versions) <= NEWEST_GLIBC


def test_has_no_search_path_and_no_text_relocations(extension: Path) -> None:
    dynamic = _run("readelf", "--wide", "--dynamic", str(extension))
    for tag in ("RPATH", "RUNPATH", "TEXTREL"):
        assert tag not in dynamic


def test_is_not_larger_than_expected(extension: Path) -> None:
    assert extension.stat().st_size <= SIZE_LIMIT_BYTES
