"""Runs CPython's own test modules with every frame instrumented, or with Cuvil enabled, beside a run without.

    PYTHONPATH=build/py312/python python3.12 tests/python/cpython_suite/run.py            # the sample
    PYTHONPATH=build/py312/python python3.12 tests/python/cpython_suite/run.py --all -j 4 # everything, nightly
    ... run.py test_generators test_descr                                                 # some modules
    ... run.py --mode enabled --all                                                       # cuvil.enable() only

A module fails the comparison when it crashes, when a test fails that passes plainly and modules.py does not expect,
when another number of tests runs, or when a probe does not find what the analysis had said. A module whose run without
Cuvil fails as a whole is compared with nothing; the summary names it apart.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import enum
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
from cpython_suite import modules  # noqa: E402


def run_worker(mode: str, module: str, timeout_s: int) -> dict[str, Any] | str:
    """The worker's report, or why there is none."""
    with tempfile.TemporaryDirectory() as folder:
        environment = dict(os.environ)
        # Relative entries are relative to where this program was started.
        entries = environment.get("PYTHONPATH", "").split(os.pathsep)
        environment["PYTHONPATH"] = os.pathsep.join(str(Path(e).resolve()) for e in entries if e)
        try:
            done = subprocess.run(
                [sys.executable, str(HERE / "worker.py"), mode, module],
                cwd=folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                timeout=timeout_s,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return f"no end after {timeout_s} s"
    text = done.stdout.decode(errors="replace")
    for line in text.splitlines():
        if line.startswith("RESULT "):
            report: dict[str, Any] = json.loads(line.removeprefix("RESULT "))
            return report
    return f"exit status {done.returncode}: {text[-400:]}"


class Verdict(enum.Enum):
    """What became of a module."""

    AS_EXPECTED = enum.auto()
    UNEXPECTED = enum.auto()
    FAILS_WITHOUT = enum.auto()  # The run without Cuvil has no end or no report, so there was nothing to compare with.


@dataclasses.dataclass(frozen=True)
class Outcome:
    """One module: a line to print, and what the summary counts."""

    line: str
    verdict: Verdict
    num_tests: int = 0
    num_probes: int = 0


def compare(module: str, mode: str, timeout_s: int) -> Outcome:
    # Importing torch, which enable() does, has effects of its own: it replaces inspect.getfile, for one.
    plain = run_worker("torch" if mode == "enabled" else "plain", module, timeout_s)
    if isinstance(plain, str):
        return Outcome(f"{module}: not run, it fails without Cuvil too: {plain}", Verdict.FAILS_WITHOUT)
    subject = run_worker(mode, module, 3 * timeout_s)
    if isinstance(subject, str):
        return Outcome(f"{module}: CRASH {subject}", Verdict.UNEXPECTED)
    known = modules.expected(module) if mode == "instrumented" else {}
    new = sorted(set(subject["bad"]) - set(plain["bad"]))
    surprises = [name for name in new if not modules.is_expected(name, known)]
    problems = [f"{name}: {subject['details'].get(name, '').strip().splitlines()[-1:]}" for name in surprises]
    if subject["tests"] != plain["tests"]:
        problems.append(f"{subject['tests']} tests instead of {plain['tests']}")
    report = subject["report"]
    for key in ("mismatches", "unknown"):
        if report.get(key):
            problems.append(f"{report[key]} {key}")
    if report and report["enters"] != report["leaves"]:
        problems.append(f"{report['enters']} frames entered, {report['leaves']} left")
    line = f"{module}: {subject['tests']} tests, {report.get('probes', 0)} probes, {report.get('frames', 0)} frames"
    if expected := [name for name in new if name not in surprises]:
        line += f", expected: {' '.join(expected)}"
    line += "".join(f"\n    FAIL {p}" for p in problems)
    verdict = Verdict.UNEXPECTED if problems else Verdict.AS_EXPECTED
    return Outcome(line, verdict, subject["tests"], report.get("probes", 0))


def summary(outcomes: dict[str, Outcome]) -> str:
    """The last lines: how many of each kind, and by name what was not compared or not as expected."""
    named = {v: [name for name, outcome in outcomes.items() if outcome.verdict is v] for v in Verdict}
    without, unexpected = named[Verdict.FAILS_WITHOUT], named[Verdict.UNEXPECTED]
    version = ".".join(map(str, sys.version_info[:3]))
    lines = [
        f"CPython {version}: {len(outcomes) - len(without)} modules, {sum(o.num_tests for o in outcomes.values())} tests, "
        f"{sum(o.num_probes for o in outcomes.values())} probes, {len(unexpected)} unexpected"
    ]
    if without:
        lines.append(f"fails without Cuvil too: {len(without)}: {' '.join(without)}")
    if unexpected:
        lines.append(f"unexpected: {' '.join(unexpected)}")
    return "\n".join(lines)


def exit_status(outcomes: dict[str, Outcome]) -> int:
    """0 if modules were compared and all were as expected."""
    verdicts = {outcome.verdict for outcome in outcomes.values()}
    return 0 if Verdict.AS_EXPECTED in verdicts and Verdict.UNEXPECTED not in verdicts else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("module", nargs="*")
    parser.add_argument("--all", action="store_true", help="the whole list instead of the sample")
    parser.add_argument("--mode", choices=["instrumented", "enabled"], default="instrumented")
    parser.add_argument("-j", type=int, default=1, metavar="N", help="modules at a time")
    parser.add_argument(
        "--timeout", type=int, default=300, metavar="S", help="for a plain module; three times that else"
    )
    options = parser.parse_args()
    names = options.module or (modules.MODULES if options.all else modules.SAMPLE)
    if absent := [name for name in options.module if not modules.exists(name)]:
        parser.error(f"this Python has no {', '.join(absent)}")
    names = [name for name in names if modules.exists(name)]
    outcomes: dict[str, Outcome] = {}
    with concurrent.futures.ThreadPoolExecutor(options.j) as pool:
        for name, outcome in zip(names, pool.map(lambda n: compare(n, options.mode, options.timeout), names)):
            print(outcome.line, flush=True)
            outcomes[name] = outcome
    print(summary(outcomes))
    return exit_status(outcomes)


if __name__ == "__main__":
    sys.exit(main())
