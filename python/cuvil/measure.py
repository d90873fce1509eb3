"""Interleaved timing: contenders take turns in one process, so that drift of the machine hits all of them alike."""

from __future__ import annotations

import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from cuvil import environment


@dataclass(frozen=True)
class Timing:
    """`n` samples of one contender, in ns."""

    n: int
    median_ns: float
    p99_ns: float
    min_ns: float
    total_ns: float

    @staticmethod
    def of(samples_ns: Sequence[float]) -> Timing:
        ordered = sorted(samples_ns)
        rank = max(0, math.ceil(0.99 * len(ordered)) - 1)  # Nearest rank: a value that was really measured.
        return Timing(len(ordered), statistics.median(ordered), ordered[rank], ordered[0], sum(ordered))

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


class Progress:
    """One line on a terminal that is overwritten; on anything else a line every few seconds."""

    def __init__(self, label: str) -> None:
        self._label = label
        self._last = time.monotonic()
        self._shown = False

    def __call__(self, done: float) -> None:
        now = time.monotonic()
        if sys.stderr.isatty():
            if now - self._last >= 0.2:
                sys.stderr.write(f"\r{self._label}: {min(done, 1):4.0%}")
                sys.stderr.flush()
                self._last, self._shown = now, True
        elif now - self._last >= 10:
            print(f"{self._label}: {min(done, 1):.0%}", file=sys.stderr, flush=True)
            self._last = now

    def close(self) -> None:
        if self._shown:
            sys.stderr.write("\r" + " " * (len(self._label) + 8) + "\r")
            sys.stderr.flush()


def interleaved(
    contenders: Mapping[str, Callable[[], object]],
    *,
    seconds: float,
    min_rounds: int = 30,
    max_rounds: int = 20_000,
    between: Callable[[str], None] | None = None,
    label: str = "timing",
) -> dict[str, Timing]:
    """Times the contenders in turns for about `seconds`; who starts a round rotates.

    `between` is called, outside the clock, with the name of the contender whose turn comes. CUDA work must be waited
    for by the contender itself.
    """
    names = list(contenders)
    samples: dict[str, list[float]] = {name: [] for name in names}
    progress = Progress(label)
    begin = time.perf_counter()
    for round_number in range(max_rounds):
        elapsed = time.perf_counter() - begin
        if round_number >= min_rounds and elapsed >= seconds:
            break
        progress(max(round_number / max_rounds, min(elapsed / max(seconds, 1e-9), round_number / max(min_rounds, 1))))
        first = round_number % len(names)
        for name in names[first:] + names[:first]:
            call = contenders[name]
            if between is not None:
                between(name)
            start = time.perf_counter_ns()
            result = call()
            samples[name].append(time.perf_counter_ns() - start)
            del result  # Freed outside the clock, but before the next contender allocates.
    progress.close()
    return {name: Timing.of(values) for name, values in samples.items()}


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns as wide as their widest cell; the first is aligned left, the others right."""
    widths = [max(len(str(row[i])) for row in [header, *rows]) for i in range(len(header))]

    def line(row: Sequence[str]) -> str:
        cells = [row[0].ljust(widths[0])] + [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        return "  ".join(cells).rstrip()

    return "\n".join([line(header), "  ".join("-" * width for width in widths), *(line(row) for row in rows)])


def save(path: str, command: Sequence[str], **results: Any) -> None:
    """Writes a measurement as JSON, with the command that made it and the machine it was made on."""
    document = {"command": list(command), **environment.describe(), **results}
    with open(path, "w", encoding="utf-8") as file:
        json.dump(document, file, indent=2, ensure_ascii=False)
        file.write("\n")
