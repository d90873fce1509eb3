"""What an enabled Cuvil costs a process that runs no model: call-heavy pure-Python programs, off and on in turns.

Baseline: the same process with Cuvil disabled.
Unit:     ratio of the medians, per program; pairs are interleaved and who goes first alternates.
Budget:   1 % over all programs (geometric mean).

    python benchmarks/hook_bench.py [--json FILE]
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator

import cuvil
from cuvil.measure import Progress, save, table

BUDGET = 1.01


def fibonacci() -> int:
    def fib(n: int) -> int:
        return n if n < 2 else fib(n - 1) + fib(n - 2)

    return fib(20)


class _Vector:
    def __init__(self, x: float, y: float) -> None:
        self.x, self.y = x, y

    def __add__(self, other: _Vector) -> _Vector:
        return _Vector(self.x + other.x, self.y + other.y)

    def dot(self, other: _Vector) -> float:
        return self.x * other.x + self.y * other.y

    @property
    def norm2(self) -> float:
        return self.dot(self)

    def scaled(self, factor: float = 2.0) -> _Vector:
        return _Vector(self.x * factor, self.y * factor)


def methods() -> float:
    position, step, total = _Vector(0.0, 0.0), _Vector(0.5, 0.25), 0.0
    for index in range(3_000):
        position = (position + step).scaled(1.0) if index % 7 else _Vector(0.0, 0.0)
        total += position.norm2 + position.dot(step)
    return total


def generators() -> int:
    def tree(depth: int) -> Iterator[int]:
        if depth:
            yield from tree(depth - 1)
            yield depth
            yield from tree(depth - 1)

    def kept(values: Iterator[int], test: Callable[[int], bool]) -> Iterator[int]:
        for value in values:
            if test(value):
                yield value

    return sum(kept(iter(range(6_000)), lambda v: bool(v & 1))) + sum(tree(9)) + sum(i * i for i in range(3_000))


_DOCUMENT = {"list": [{"id": n, "name": f"item {n}", "tags": ["a", "b"], "price": n * 1.5} for n in range(60)]}


def encoder() -> int:
    parts: list[str] = []

    def encode(value: object) -> None:
        if isinstance(value, str):
            parts.append('"' + value + '"')
        elif isinstance(value, dict):
            for key, inner in value.items():
                encode(key)
                encode(inner)
        elif isinstance(value, list):
            for inner in value:
                encode(inner)
        else:
            parts.append(repr(value))

    for _ in range(6):
        encode(_DOCUMENT)
    return len("".join(parts))


def exceptions() -> int:
    def check(value: int) -> int:
        if value % 3 == 0:
            raise ValueError(value)
        return value

    total = 0
    for value in range(6_000):
        try:
            total += check(value)
        except ValueError as error:
            total -= error.args[0]
    return total


PROGRAMS: tuple[Callable[[], object], ...] = (fibonacci, methods, generators, encoder, exceptions)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=200, help="pairs per program (default 200)")
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args()
    rows, results = [], {}
    for program in PROGRAMS:
        samples: dict[bool, list[int]] = {False: [], True: []}
        progress = Progress(program.__name__)
        for _ in range(5):
            program()
        for round_number in range(options.rounds):
            for on in (False, True) if round_number % 2 else (True, False):
                (cuvil.enable if on else cuvil.disable)()
                # Specialised call sites recover within some calls of a switch; that is the switch's price, not Cuvil's.
                program()
                begin = time.perf_counter_ns()
                program()
                samples[on].append(time.perf_counter_ns() - begin)
            progress((round_number + 1) / options.rounds)
        progress.close()
        off, on_ns = statistics.median(samples[False]), statistics.median(samples[True])
        ratio = on_ns / off
        # Half of the pairs against the other half, all with Cuvil off: what this machine calls equal.
        noise = statistics.median(samples[False][::2]) / statistics.median(samples[False][1::2])
        results[program.__name__] = {"off_ns": off, "on_ns": on_ns, "ratio": ratio, "noise_ratio": noise}
        rows.append([program.__name__, f"{off / 1e6:.3f}", f"{on_ns / 1e6:.3f}", f"{ratio:.4f}", f"{noise:.4f}"])
    cuvil.disable()
    mean = math.exp(statistics.fmean(math.log(r["ratio"]) for r in results.values()))
    print(table(["", "off ms", "on ms", "on/off", "off/off"], rows))
    print(
        f"geometric mean {mean:.4f} over {options.rounds} pairs each; budget {BUDGET} {'met' if mean <= BUDGET else 'NOT met'}"
    )
    if options.json:
        save(options.json, ["python", *sys.argv], results=results, geometric_mean=mean, rounds=options.rounds)
    return 0 if mean <= BUDGET else 1


if __name__ == "__main__":
    sys.exit(main())
