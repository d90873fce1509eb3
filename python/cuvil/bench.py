"""``python -m cuvil bench``: models timed under eager, torch.compile and Cuvil, interleaved in one process."""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Callable
from typing import Any

from cuvil import models
from cuvil.explanation import duration
from cuvil.measure import interleaved, save, table

_PLAN_TIMEOUT_SECONDS = 20.0


def _parser() -> argparse.ArgumentParser:
    names = "\n".join(f"  {name:<12} {text}" for name, text in models.own_names().items())
    parser = argparse.ArgumentParser(
        prog="python -m cuvil bench",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Times models under Cuvil and its rivals: interleaved calls in one process, medians and p99, and the "
        "time to the first result.",
        epilog=f"names:\n{names}\n  resnet50 …   any torchvision classification model\n"
        "  timm:NAME    any timm model\n\nWeights are random (minilm's are real); nothing is downloaded.",
    )
    parser.add_argument("names", nargs="+", metavar="NAME", help="models to time, see below")
    parser.add_argument("--batch", type=int, default=1, help="samples per call (default 1)")
    parser.add_argument(
        "--dtype",
        choices=["float32", "bfloat16", "float16"],
        help="of weights and inputs (default: float32 on the CPU, float16 on a GPU)",
    )
    parser.add_argument("--threads", type=int, help="threads that torch may use (default: torch's own choice)")
    parser.add_argument("--device", default="cpu", help="cpu, cuda or cuda:N (default cpu)")
    parser.add_argument("--vs", default="eager", help="rivals: eager, compile, or both with a comma (default eager)")
    parser.add_argument("--seconds", type=float, default=5.0, help="timed seconds per model (default 5)")
    parser.add_argument("--explain", action="store_true", help="also print cuvil.explain() of each model")
    parser.add_argument("--json", metavar="FILE", help="also write the results to FILE")
    return parser


def _max_abs_difference(torch: Any, left: Any, right: Any) -> float:
    """Over all tensors of two results of the same structure; infinite where the structure differs."""
    if isinstance(left, torch.Tensor):
        if not isinstance(right, torch.Tensor) or left.shape != right.shape or left.dtype != right.dtype:
            return float("inf")
        return float((left.double() - right.double()).abs().max()) if left.numel() else 0.0
    if isinstance(left, dict):
        if not isinstance(right, dict) or list(left) != list(right):
            return float("inf")
        return max((_max_abs_difference(torch, left[key], right[key]) for key in left), default=0.0)
    if isinstance(left, (list, tuple)):
        if type(left) is not type(right) or len(left) != len(right):
            return float("inf")
        pairs = zip(left, right, strict=True)
        return max((_max_abs_difference(torch, a, b) for a, b in pairs), default=0.0)
    return 0.0 if left == right else float("inf")


def wait_for_plan(call: Callable[[], object], planned: Callable[[], int], timeout_seconds: float) -> float | None:
    """Calls until a plan has served one call; seconds from the start of the first call to that, or None."""
    before = planned()
    begin = time.perf_counter()
    while time.perf_counter() - begin < timeout_seconds:
        call()
        if planned() > before:
            return time.perf_counter() - begin
    return None


def _bench_one(torch: Any, name: str, options: argparse.Namespace, rivals: list[str]) -> dict[str, Any]:
    import cuvil

    print(f"{name}: building", file=sys.stderr, flush=True)
    dtype = getattr(torch, options.dtype)
    model = models.cast(models.build(name, options.batch), dtype, options.device)
    on_gpu = options.device.startswith("cuda")

    def caller(module: Any) -> Callable[[], object]:
        def call() -> object:
            with torch.inference_mode():
                result = module(*model.args, **model.kwargs)
            if on_gpu:
                torch.cuda.synchronize(options.device)  # A call is over when its result is there.
            return result

        return call

    def planned_calls() -> int:
        return int(cuvil.stats().get("planned", 0))

    record: dict[str, Any] = {"name": name, "batch": options.batch, "dtype": options.dtype, "device": options.device}
    calls: dict[str, Callable[[], object]] = {}
    first: dict[str, float | None] = {}
    notes: dict[str, str] = {}

    # Eager and torch.compile work on twins of the module, which share its weights and are opted out.
    eager = cuvil.opt_out(models.twin(model.module))
    calls["eager"] = caller(eager)
    begin = time.perf_counter()
    expected = calls["eager"]()
    first["eager"] = time.perf_counter() - begin
    differences = {"eager": 0.0}

    if "compile" in rivals:
        print(f"{name}: torch.compile is compiling (often half a minute)", file=sys.stderr, flush=True)
        inner = cuvil.opt_out(models.twin(model.module))
        call = caller(cuvil.opt_out(torch.compile(inner)))
        begin = time.perf_counter()
        try:
            result = call()
        except Exception as error:  # noqa: BLE001 - a rival that cannot run is a line of the table.
            notes["compile"] = _first_line(error)
        else:
            first["compile"] = time.perf_counter() - begin
            differences["compile"] = _max_abs_difference(torch, expected, result)
            calls["compile"] = call

    calls["cuvil"] = caller(model.module)
    begin = time.perf_counter()
    calls["cuvil"]()
    first_call = first["cuvil"] = time.perf_counter() - begin
    ready = wait_for_plan(calls["cuvil"], planned_calls, _PLAN_TIMEOUT_SECONDS)
    record["first_planned_seconds"] = None if ready is None else first_call + ready
    differences["cuvil"] = _max_abs_difference(torch, expected, calls["cuvil"]())

    gc.collect()
    before = planned_calls()
    order = [key for key in ("eager", "compile", "cuvil") if key in calls]
    timings = interleaved({key: calls[key] for key in order}, seconds=options.seconds, label=f"{name}: timing")
    served = planned_calls() - before
    record["planned_share"] = served / timings["cuvil"].n
    explanation = cuvil.explain(model.module)
    if served == 0:
        notes["cuvil"] = explanation.summary()
    record["contenders"] = {
        key: {
            **timings[key].to_dict(),
            "first_seconds": first[key],
            "max_abs_difference": differences[key],
        }
        for key in order
    }
    record["notes"] = notes
    record["explanation"] = explanation.to_dict()

    rows = []
    for key in ("eager", *(["compile"] if "compile" in rivals else []), "cuvil"):
        if key not in timings:
            rows.append([key, "cannot run", "", "", "", ""])
            continue
        timing = timings[key]
        started = first[key]
        rows.append(
            [
                "torch.compile" if key == "compile" else key,
                "" if started is None else f"{started:.3g} s",
                duration(timing.median_ns),
                duration(timing.p99_ns),
                f"{timings['eager'].median_ns / timing.median_ns:.2f}×",
                f"{differences[key]:.1e}",
            ]
        )
    print(
        f"\n{name}, batch {options.batch}, {options.dtype}, {options.device}, n = {timings['cuvil'].n} each, interleaved"
    )
    print(table(["", "first result", "median", "p99", "vs eager", "max |difference|"], rows))
    if record["first_planned_seconds"] is not None:
        print(
            f"cuvil: first planned call {record['first_planned_seconds']:.3g} s after the first call began; "
            f"{record['planned_share']:.0%} of the timed calls were served by a plan"
        )
    for key, note in notes.items():
        print(f"{key}: {note}")
    if options.explain:
        print(f"\n{explanation}")
    return record


def _first_line(error: BaseException) -> str:
    text = str(error).strip() or type(error).__name__
    return f"{type(error).__name__}: {text.splitlines()[0]}"[:160]


def main(argv: list[str]) -> int:
    options = _parser().parse_args(argv)
    rivals = [part.strip() for part in options.vs.split(",") if part.strip()]
    unknown = [rival for rival in rivals if rival not in ("eager", "compile")]
    if unknown or options.batch < 1 or options.seconds <= 0:
        print(f"bench: cannot use {unknown[0] if unknown else 'these numbers'!r}; see --help", file=sys.stderr)
        return 2
    try:
        import torch
    except ImportError:
        print("bench: torch is not installed for this Python: pip install torch", file=sys.stderr)
        return 1
    import cuvil

    if options.threads:
        torch.set_num_threads(options.threads)
    if options.device.startswith("cuda") and not torch.cuda.is_available():
        print("bench: torch sees no CUDA device; see `python -m cuvil doctor`", file=sys.stderr)
        return 1
    if options.dtype is None:
        options.dtype = "float16" if options.device.startswith("cuda") else "float32"
    for name in options.names:
        try:
            models.check(name)
        except models.UnknownModel as error:
            print(f"bench: {name}: {error}", file=sys.stderr)
            return 2
    try:
        cuvil.enable()
    except RuntimeError as error:
        print(f"bench: {error}", file=sys.stderr)
        return 1
    records: list[dict[str, Any]] = []
    try:
        for name in options.names:
            records.append(_bench_one(torch, name, options, rivals))
    finally:  # What was measured is kept, whatever ends the run.
        if options.json and records:
            save(options.json, ["python", "-m", "cuvil", "bench", *argv], results=records)
            print(f"\nwritten to {options.json}")
    return 0
