# Question: do the soundness programs observe the same with the accelerator off and on, and do plans really serve calls?
"""Runs the soundness cases off and on and prints one line for each.

python tests/soundness/run_cases.py                          # self-check: off against off
python tests/soundness/run_cases.py --accelerator cuvil      # prints planned calls / calls, or the refusals
python tests/soundness/run_cases.py --accelerator fake:memo  # deliberately wrong; must be caught
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import os
import pathlib
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

# Read when the accelerator is imported: traced at the first call, compared at the second, in use from the third on.
if "--defaults" not in sys.argv:
    os.environ.setdefault("CUVIL_PREPARE", "sync")
    os.environ.setdefault("CUVIL_ADOPT", "always")
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))

import cases_lifecycle  # noqa: E402
import cases_more  # noqa: E402
import cases_python  # noqa: E402
import cases_state  # noqa: E402
import cases_values  # noqa: E402
from fakes import FAKES  # noqa: E402
from harness import Case, problems, run_case  # noqa: E402

# Suites, and in how many of their cases a plan must serve at least one call.
SUITES: dict[str, tuple[list[ModuleType], int]] = {
    "first": ([cases_state, cases_values, cases_python, cases_lifecycle], 42),
    "more": ([cases_more], 5),
}


def iter_cases(suite: str) -> Iterator[tuple[str, Case]]:
    for module in SUITES[suite][0]:
        for name, fn in list(vars(module).items()):
            if name.startswith("case_") and inspect.isgeneratorfunction(fn):
                yield name, fn


def load_accelerator(spec: str | None) -> Any:
    if spec is None:
        return None
    return FAKES[spec[5:]]() if spec.startswith("fake:") else importlib.import_module(spec)


def run_one(fn: Case, accelerator: Any, exact: bool = False) -> tuple[list[str], dict[str, Any]]:
    """Problems of one case, and the accelerator's counters over its second run."""
    off = run_case(fn)
    counts: dict[str, Any] = {}
    if accelerator is None:
        return problems(off, run_case(fn), exact), counts
    if hasattr(accelerator, "reset"):
        accelerator.reset()
    accelerator.enable()
    try:
        on = run_case(fn)
        if hasattr(accelerator, "stats"):
            counts = dict(accelerator.stats())
    finally:
        accelerator.disable()
    return problems(off, on, exact), counts


def describe(counts: dict[str, Any]) -> str:
    """Planned calls of all calls, and why the rest was refused."""
    if not counts:
        return ""
    refusals = ", ".join(f"{code} {count}" for code, count in sorted(counts.get("refusals", {}).items()))
    return f"planned {counts['planned']}/{counts['calls']}" + (f"  refused: {refusals}" if refusals else "")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--accelerator", help="module with enable()/disable(), or fake:memo|frozen|static|version")
    parser.add_argument("--suite", choices=tuple(SUITES))
    parser.add_argument("--only", help="comma-separated words; cases whose name contains one")
    parser.add_argument("--exact", action="store_true", help="require bit-equal values")
    parser.add_argument(
        "--defaults", action="store_true", help="prepare in the background; no minimum of planned calls"
    )
    parser.add_argument("-v", "--verbose", action="store_true")
    options = parser.parse_args()
    accelerator = load_accelerator(options.accelerator)
    failed = 0
    for suite in [options.suite] if options.suite else SUITES:
        total = bad = served = 0
        for name, fn in iter_cases(suite):
            if options.only and not any(word in name for word in options.only.split(",")):
                continue
            found, counts = run_one(fn, accelerator, options.exact)
            total, bad, served = total + 1, bad + bool(found), served + bool(counts.get("planned"))
            print(f"{name:48} {f'FAIL ({len(found)})' if found else 'ok':10} {describe(counts)}", flush=True)
            for problem in found[: 50 if options.verbose else 3]:
                print("    " + problem)
        print(f"{suite}: {total - bad} passed, {bad} failed; plans served calls in {served} of {total} cases")
        failed += bad
        strict = options.accelerator == "cuvil" and not (options.only or options.defaults)
        if strict and served < SUITES[suite][1]:
            print(f"{suite}: plans must serve calls in at least {SUITES[suite][1]} cases")
            failed += 1
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
