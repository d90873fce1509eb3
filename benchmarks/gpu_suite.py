# Question: how fast is a plan on a GPU, beside what else one can do with the same model?
# Baseline: eager; eager's operators in one graph made by hand; torch.compile. Unit: ms. Budget: 1.03 x the hand-made
# graph + 15 us, at most torch.compile's default, on every row.
"""Latency of thirteen models on a GPU, fp16, all engines in turns in one process.

    python benchmarks/gpu_suite.py                                  # eager, hand, cuvil
    python benchmarks/gpu_suite.py --engines eager,hand,compile,reduce-overhead,freezing,cuvil
    python benchmarks/gpu_suite.py --only resnet50,bert --json gpu.json
    python benchmarks/gpu_suite.py --at-once --engines ...          # compile all rows side by side, then time in turn

A call is timed until the device has finished; `host` is the time until it has returned. `hand` copies its input in and
clones its output, as a caller who keeps outputs must. `ready` is the time from the start of the first call to the end of
the first one that a plan answered, with eager's cost of the calls between. `MiB` is the allocator's peak while an engine
serves, the model's weights included; its budget is 1.10 x eager's + 64 MiB.
"""

from __future__ import annotations

import argparse
import copy
import gc
import multiprocessing
import sys
import time
from collections.abc import Callable
from typing import Any

import cuvil
import torch
from cuvil.measure import Timing, save, table

Row = tuple[str, Callable[[], tuple[torch.nn.Module, tuple[Any, ...], dict[str, Any]]]]
DEVICE = "cuda"  # gpu_floors.py counts on another
ENGINES = ("eager", "hand", "compile", "reduce-overhead", "freezing", "cuvil")


def vision(name: str, batch: int, size: int = 224, **options: Any) -> Callable[[], Any]:
    def build() -> Any:
        import torchvision

        model = torchvision.models.get_model(name, weights=None, **options)
        return model.eval().half().to(DEVICE), (torch.randn(batch, 3, size, size, device=DEVICE).half(),), {}

    return build


def bert() -> Any:
    from transformers import BertConfig, BertModel

    model = BertModel(BertConfig()).eval().half().to(DEVICE)
    return model, (), {"input_ids": torch.randint(0, 30_000, (1, 128), device=DEVICE)}


def whisper() -> Any:
    from transformers import WhisperConfig
    from transformers.models.whisper.modeling_whisper import WhisperEncoder

    config = WhisperConfig(d_model=384, encoder_layers=4, encoder_attention_heads=6, encoder_ffn_dim=1536)
    return WhisperEncoder(config).eval().half().to(DEVICE), (torch.randn(1, 80, 3000, device=DEVICE).half(),), {}


def llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=2048,
        intermediate_size=5632,
        num_hidden_layers=22,
        num_attention_heads=32,
        num_key_value_heads=4,
        vocab_size=32_000,
    )
    with torch.device(DEVICE):
        model = LlamaForCausalLM(config).eval().half()
    ids = torch.randint(0, 32_000, (1, 128), device=DEVICE)
    return model, (), {"input_ids": ids, "use_cache": False}


def mlp() -> Any:
    layers: list[torch.nn.Module] = []
    for _ in range(4):
        layers += [torch.nn.Linear(64, 64), torch.nn.ReLU()]
    return torch.nn.Sequential(*layers).eval().half().to(DEVICE), (torch.randn(1, 64, device=DEVICE).half(),), {}


ROWS: list[Row] = [
    ("resnet50 b1", vision("resnet50", 1)),
    ("resnet50 b32", vision("resnet50", 32)),
    ("inception_v3 b1", vision("inception_v3", 1, 299, init_weights=False)),
    ("efficientnet_b0 b1", vision("efficientnet_b0", 1)),
    ("mobilenet_v3_large b1", vision("mobilenet_v3_large", 1)),
    ("convnext_tiny b1", vision("convnext_tiny", 1)),
    ("vit_b_16 b1", vision("vit_b_16", 1)),
    ("vit_b_16 b32", vision("vit_b_16", 32)),
    ("swin_t b1", vision("swin_t", 1)),
    ("bert-base b1 s128", bert),
    ("whisper-tiny encoder b1", whisper),
    ("tinyllama-1.1b prefill 128", llama),
    ("mlp b1", mlp),
]


def tensors_of(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    return [t for each in value for t in tensors_of(each)] if isinstance(value, (list, tuple)) else []


def hand_made(model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[], Any]:
    static_args = tuple(a.clone() for a in args)
    static_kwargs = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in kwargs.items()}
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            model(*static_args, **static_kwargs)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = tensors_of(model(*static_args, **static_kwargs))
    pairs = list(zip(static_args, args, strict=True))
    pairs += [(static_kwargs[k], v) for k, v in kwargs.items() if isinstance(v, torch.Tensor)]

    def call(_kept: torch.nn.Module = model) -> Any:  # the graph reads the model's weights where they are
        for target, source in pairs:
            target.copy_(source)
        graph.replay()
        return [result.clone() for result in results]

    return call


def make_engine(
    name: str, model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Callable[[], Any], float]:
    """The engine's call, warm, and for cuvil the seconds until a plan answered."""
    ready = 0.0
    if name == "cuvil":

        def call() -> Any:
            return model(*args, **kwargs)

        start = time.perf_counter()
        planned = cuvil.stats()["planned"]
        while cuvil.stats()["planned"] == planned and time.perf_counter() - start < 60:
            call()
            torch.cuda.synchronize()
        ready = time.perf_counter() - start
        for _ in range(60):
            call()
    else:
        twin = cuvil.opt_out(copy.deepcopy(model))
        if name == "hand":
            call = hand_made(twin, args, kwargs)
        elif name == "eager":

            def call() -> Any:
                return twin(*args, **kwargs)
        else:
            import torch._inductor.config as inductor

            mode = None if name == "compile" else "reduce-overhead"
            compiled = cuvil.opt_out(torch.compile(twin, mode=mode, dynamic=False))
            with inductor.patch(freezing=name == "freezing"):
                for _ in range(4):
                    compiled(*args, **kwargs)

            def call() -> Any:
                result = compiled(*args, **kwargs)
                # reduce-overhead overwrites its outputs at the next call.
                return result if mode is None else [t.clone() for t in tensors_of(result)]

        for _ in range(10):
            call()
    torch.cuda.synchronize()
    return call, ready


def held_bytes() -> int:
    torch.cuda.synchronize()
    gc.collect()
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved()


def run_row(
    name: str, build: Callable[[], Any], engines: list[str], rounds: int, wait: Callable[[], None] = lambda: None
) -> dict[str, Any]:
    torch.manual_seed(0)
    model, args, kwargs = build()
    weights = sum(t.nbytes for t in [*model.parameters(), *model.buffers()])
    eager = cuvil.opt_out(copy.deepcopy(model))
    reference = [t.double() for t in tensors_of(eager(*args, **kwargs))]
    calls: dict[str, Callable[[], Any]] = {}
    record: dict[str, Any] = {"row": name, "engines": {}}
    for engine in engines:
        # Some engines have torch drop the cuBLAS workspace of the program's own stream; whoever comes next would pay.
        eager(*args, **kwargs)
        before = held_bytes()
        try:
            calls[engine], ready = make_engine(engine, model, args, kwargs)
        except Exception as error:  # a rival that cannot run is a line of the record
            record["engines"][engine] = {"error": f"{type(error).__name__}: {error}"[:200]}
            continue
        held = held_bytes() - before - (0 if engine == "cuvil" else weights)
        torch.cuda.reset_peak_memory_stats()
        for _ in range(5):
            calls[engine]()
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_reserved() - before + (weights if engine == "cuvil" else 0)
        results = [t.double() for t in tensors_of(calls[engine]())]
        worst = max(((a - b).abs().max().item() for a, b in zip(results, reference, strict=True)), default=0.0)
        record["engines"][engine] = {
            "held_mib": held / 2**20,
            "peak_mib": peak / 2**20,
            "ready_s": ready,
            "max_abs_difference": worst,
        }
    wait()
    for call in calls.values():
        for _ in range(10):
            call()
    samples: dict[str, list[float]] = {engine: [] for engine in calls}
    hosts: dict[str, list[float]] = {engine: [] for engine in calls}
    names = list(calls)
    for turn in range(rounds):
        for engine in names[turn % len(names) :] + names[: turn % len(names)]:
            torch.cuda.synchronize()
            start = time.perf_counter_ns()
            result = calls[engine]()
            host = time.perf_counter_ns()
            torch.cuda.synchronize()
            samples[engine].append(time.perf_counter_ns() - start)
            hosts[engine].append(host - start)
            del result
    for engine in calls:
        timing = Timing.of(samples[engine])
        record["engines"][engine] |= {
            "median_ms": timing.median_ns / 1e6,
            "p99_ms": timing.p99_ns / 1e6,
            "host_us": Timing.of(hosts[engine]).median_ns / 1e3,
        }
    plans = [plan for module in cuvil.explain(model).to_dict()["modules"] for plan in module["plans"]]
    record["plan"] = [plan.get("cuda_graph", plan.get("parts")) for plan in plans[:3]]
    record["state"] = cuvil.explain(model).summary()
    return record


def row_process(index: int, engines: list[str], rounds: int, pipe: Any) -> None:
    """Prepares a row, says so, waits to be told to time it, and sends the record, or what went wrong."""

    def wait() -> None:
        pipe.send("ready")
        pipe.recv()

    name, build = ROWS[index]
    try:
        cuvil.enable()
        with torch.inference_mode():
            pipe.send(run_row(name, build, engines, rounds, wait))
    except Exception as error:  # one model that is missing here must not hide the others
        pipe.send(f"{name}: {type(error).__name__}: {str(error)[:300]}")


def run_at_once(rows: list[Row], options: argparse.Namespace) -> list[dict[str, Any]]:
    context = multiprocessing.get_context("spawn")
    processes, pipes = [], []
    for row in rows:
        ours, theirs = context.Pipe()
        arguments = (ROWS.index(row), options.engines.split(","), options.rounds, theirs)
        process = context.Process(target=row_process, args=arguments)
        process.start()
        processes.append(process)
        pipes.append(ours)
        theirs.close()

    def receive(pipe: Any) -> Any:
        try:
            return pipe.recv()
        except EOFError:
            return "a process died"

    started = time.perf_counter()
    first = [receive(pipe) for pipe in pipes]
    print(f"all rows are prepared after {time.perf_counter() - started:.0f} s", flush=True)
    records = []
    for (name, _), pipe, answer in zip(rows, pipes, first, strict=True):
        if answer == "ready":
            pipe.send("go")
            answer = receive(pipe)
        if isinstance(answer, str):
            print(answer if name in answer else f"{name}: {answer}", flush=True)
            continue
        records.append(answer)
        print(name, answer["state"], answer["plan"][:1], flush=True)
    for process in processes:
        process.join()
    return records


def report(records: list[dict[str, Any]], engines: list[str]) -> str:
    header = ["median / p99, ms", *engines, "host us", "ready s", "MiB", "/ hand", "budget", "eager MiB", "memory"]
    rows = []
    for record in records:
        found = record["engines"]

        def cell(engine: str, found: dict[str, Any] = found) -> str:
            entry = found.get(engine, {})
            return f"{entry['median_ms']:.3f}/{entry['p99_ms']:.3f}" if "median_ms" in entry else "-"

        ours, hand = found.get("cuvil", {}), found.get("hand", {})
        ratio = verdict = "-"
        if "median_ms" in ours and "median_ms" in hand:
            ratio = f"{ours['median_ms'] / hand['median_ms']:.2f}"
            limit = hand["median_ms"] * 1.03 + 0.015
            if "median_ms" in found.get("compile", {}):
                limit = min(limit, found["compile"]["median_ms"])
            verdict = "met" if ours["median_ms"] <= limit else "NOT met"
        peak, eager_peak = ours.get("peak_mib", 0.0), found.get("eager", {}).get("peak_mib", 0.0)
        rows.append(
            [
                record["row"],
                *(cell(engine) for engine in engines),
                f"{ours.get('host_us', 0):.1f}",
                f"{ours.get('ready_s', 0):.2f}",
                f"{peak:.0f}",
                ratio,
                verdict,
                f"{eager_peak:.0f}",
                "met" if peak <= 1.1 * eager_peak + 64 else "NOT met",
            ]
        )
    return table(header, rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", default="eager,hand,cuvil", help=f"of {', '.join(ENGINES)}")
    parser.add_argument("--only", default="", help="rows whose name contains one of these words")
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--at-once", action="store_true", help="a process for each row; timed one after the other")
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("gpu_suite: torch finds no GPU; run this on a machine with one", file=sys.stderr)
        return 2
    engines = options.engines.split(",")
    words = [word for word in options.only.split(",") if word]
    rows = [row for row in ROWS if not words or any(word in row[0] for word in words)]
    records: list[dict[str, Any]] = []
    if options.at_once:
        records = run_at_once(rows, options)
    else:
        cuvil.enable()
        with torch.inference_mode():
            for name, build in rows:
                try:
                    records.append(run_row(name, build, engines, options.rounds))
                except Exception as error:  # one model that is missing here must not hide the others
                    print(f"{name}: {type(error).__name__}: {str(error)[:300]}", flush=True)
                    continue
                finally:
                    gc.collect()
                    torch.cuda.empty_cache()
                print(records[-1]["row"], records[-1]["state"], records[-1]["plan"][:1], flush=True)
                if options.json:
                    save(options.json, ["python", *sys.argv], rows=records)
    if options.json:
        save(options.json, ["python", *sys.argv], rows=records)
    print(report(records, engines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
