# Question: over how many unchanged models does Cuvil give eager's answers, and how many does it serve whole?
# Baseline: eager, on the same inputs and seeds. Unit: models. Budget: 0 wrong, 0 crashed, under an hour on two cores.
"""Corpus benchmark: torchvision, timm and transformers models with random weights, compared with eager.

python benchmarks/corpus.py --out corpus.jsonl                 # everything, two at a time, resumable
python benchmarks/corpus.py --sample ci --out ci.jsonl         # a fixed sample
python benchmarks/corpus.py --sample python --device cuda --out gpu.jsonl
python benchmarks/corpus.py --only bert,resnet18 -v            # names that contain a word
python benchmarks/corpus.py --accelerator none --out self.jsonl  # self-check: eager against eager
python benchmarks/corpus.py --report corpus.jsonl --write docs/coverage.md
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import pathlib
import select
import signal
import sys
import time
from collections import Counter
from typing import Any

# Traced at the first call, compared at the second, in use from the third on; read when the accelerator is imported.
os.environ.setdefault("CUVIL_PREPARE", "sync")
os.environ.setdefault("CUVIL_ADOPT", "always")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("PYTHONHASHSEED", "0")

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))

import corpus_run  # noqa: E402
from corpus_models import Spec, load_specs, sample  # noqa: E402
from corpus_report import summary, write_coverage  # noqa: E402

FAULTS = ("wrong", "crash", "error", "timeout", "memory")


class Child:
    """A forked process that runs one model; what kills it kills nothing else."""

    def __init__(self, spec: Spec, accelerator: Any | None, device: str) -> None:
        self.spec, self.started, self.data = spec, time.monotonic(), b""
        self.reader, writer = os.pipe()
        sys.stdout.flush()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(self.reader)
            _child_main(spec, accelerator, device, writer)
        os.close(writer)

    def read(self) -> bool:
        """Takes what has arrived; False at the end of the stream."""
        chunk = os.read(self.reader, 1 << 16)
        self.data += chunk
        return bool(chunk)

    def resident_bytes(self) -> int:
        try:
            with open(f"/proc/{self.pid}/statm", "rb") as file:
                return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        except OSError:
            return 0

    def finish(self, verdict: str | None) -> dict[str, Any]:
        if verdict:
            os.kill(self.pid, signal.SIGKILL)
        _, status = os.waitpid(self.pid, 0)
        os.close(self.reader)
        failed = {"name": self.spec.name, "group": self.spec.group, "wrong": [], "inexact": 0.0}
        if verdict:
            return {**failed, "state": verdict, "reasons": [f"stopped after {time.monotonic() - self.started:.0f} s"]}
        if os.WIFSIGNALED(status):
            name = signal.Signals(os.WTERMSIG(status)).name
            return {**failed, "state": "crash", "reasons": [f"killed by {name}"]}
        try:
            record: dict[str, Any] = json.loads(self.data)
            return record
        except json.JSONDecodeError:
            return {
                **failed,
                "state": "crash",
                "reasons": [f"no answer, exit status {os.waitstatus_to_exitcode(status)}"],
            }


def _child_main(spec: Spec, accelerator: Any | None, device: str, writer: int) -> None:
    import faulthandler
    import warnings

    warnings.simplefilter("ignore")
    faulthandler.enable()
    code = 1
    try:
        answer = json.dumps(corpus_run.run(spec, accelerator, device)).encode()
        while answer:
            answer = answer[os.write(writer, answer) :]
        code = 0
    finally:
        # Interpreter exit has tests of its own; here it would only run torch's atexit handlers in a forked child.
        os._exit(code)


def run_all(specs: list[Spec], accelerator: Any | None, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Runs every model that the output file does not hold yet; returns all records."""
    records: list[dict[str, Any]] = []
    wanted = {spec.name for spec in specs}
    out_path = pathlib.Path(options.out) if options.out else None
    if out_path and out_path.exists():
        records = [record for record in map(json.loads, out_path.read_text().splitlines()) if record["name"] in wanted]
    done = {record["name"] for record in records}
    todo = [spec for spec in specs if spec.name not in done]
    out = out_path.open("a") if out_path else None
    running: list[Child] = []
    counts = Counter(record["state"] for record in records)
    started, position, total = time.monotonic(), 0, len(todo)
    while position < total or running:
        while position < total and len(running) < options.parallel:
            running.append(Child(todo[position], accelerator, options.device))
            position += 1
        ready = select.select([child.reader for child in running], [], [], 0.5)[0]
        for child in list(running):
            verdict = None
            if time.monotonic() - child.started > options.timeout:
                verdict = "timeout"
            elif child.resident_bytes() > options.memory_gib * (1 << 30):
                verdict = "memory"
            elif child.reader not in ready or child.read():
                continue
            running.remove(child)
            record = child.finish(verdict)
            records.append(record)
            counts[record["state"]] += 1
            if out:
                out.write(json.dumps(record) + "\n")
                out.flush()
            if options.verbose or record["state"] in FAULTS:
                detail = (record["wrong"] or record.get("reasons") or [""])[0]
                print(
                    f"{record['name']:56} {record['state']:8} {record.get('seconds', 0):6.1f} s  {detail[:150]}",
                    flush=True,
                )
            elif sum(counts.values()) % 25 == 0:
                states = ", ".join(f"{count} {state}" for state, count in counts.most_common())
                print(
                    f"{sum(counts.values())}/{len(specs)} models, {time.monotonic() - started:.0f} s: {states}",
                    flush=True,
                )
    return records


def _preload(specs: list[Spec]) -> None:
    # Children inherit what the parent has imported: a third of a second instead of ten for each model.
    import warnings

    warnings.simplefilter("ignore")
    import torch

    torch.set_num_threads(1)
    families = {spec.name.partition("/")[0] for spec in specs}
    for family in sorted(families):
        importlib.import_module(family)
    if "transformers" in families:
        import transformers

        transformers.logging.set_verbosity_error()
        import corpus_transformers

        corpus_transformers.build("bert")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--accelerator", default="cuvil", help="module with enable/disable/stats/explain, or 'none'")
    parser.add_argument("--sample", choices=("ci", "python"))
    parser.add_argument("--only", help="comma-separated words; models whose name contains one")
    parser.add_argument("--device", default="cpu", help="where models and inputs are, e.g. cuda")
    parser.add_argument("--group", help="comma-separated words; groups that contain one")
    parser.add_argument("--out", help="JSONL file of records; models that it holds are not run again")
    parser.add_argument("--parallel", type=int, default=2)
    parser.add_argument("--timeout", type=float, default=240.0, help="seconds for one model")
    parser.add_argument("--memory-gib", type=float, default=7.0, help="resident memory of one model")
    parser.add_argument("--report", help="only summarise this JSONL file")
    parser.add_argument("--write", help="write the coverage document here")
    parser.add_argument("-v", "--verbose", action="store_true")
    options = parser.parse_args()
    if options.report:
        records = [json.loads(line) for line in pathlib.Path(options.report).read_text().splitlines()]
    else:
        specs = load_specs()
        if options.sample:
            names = sample(options.sample)
            specs = [spec for spec in specs if spec.name in names]
        if options.only:
            specs = [spec for spec in specs if any(word in spec.name for word in options.only.split(","))]
        if options.group:
            specs = [spec for spec in specs if any(word in spec.group for word in options.group.split(","))]
        _preload(specs)
        accelerator = None if options.accelerator == "none" else importlib.import_module(options.accelerator)
        records = run_all(specs, accelerator, options)
    print(summary(records))
    if options.write:
        write_coverage(records, pathlib.Path(options.write))
    return 1 if any(record["state"] in FAULTS for record in records) else 0


if __name__ == "__main__":
    sys.exit(main())
