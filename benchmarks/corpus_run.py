# Runs one model of the corpus eagerly and with the accelerator and says what happened; called in a forked child.
"""One model: eager reference, three accelerated calls for each of two shapes and two grad modes, comparison."""

from __future__ import annotations

import copy
import gc
import re
import resource
import time
import traceback
from collections.abc import Callable
from typing import Any

import torch
from corpus_models import Inputs, NotInstalled, Spec, build, versions
from corpus_outputs import Difference, compare

CALLS_PER_SHAPE = 3
# A refused model leaves the calls of its children, which then need as many calls again.
CALLS_IF_REFUSED = 4
MODES: dict[str, Callable[[], Any]] = {"inference_mode": torch.inference_mode, "no_grad": torch.no_grad}


# Each mode starts from a model that was never called; copying one is faster than initialising it again.
COPY_LIMIT_BYTES = 1 << 30


def _size_bytes(model: torch.nn.Module) -> int:
    return sum(tensor.nbytes for tensor in [*model.parameters(), *model.buffers()])


def _call(model: torch.nn.Module, inputs: Inputs) -> Any:
    args, kwargs = copy.deepcopy(inputs)
    torch.manual_seed(2)
    return model(*args, **kwargs)


def _counts(accelerator: Any) -> dict[str, int]:
    stats = accelerator.stats()
    return {name: int(stats[name]) for name in ("calls", "planned", "traces")}


def _moved(value: Any, device: str) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, dict):
        return {key: _moved(each, device) for key, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_moved(each, device) for each in value)
    return value


def _build(spec: Spec, device: str) -> tuple[torch.nn.Module, list[Inputs]]:
    model, inputs = build(spec)
    return (model, inputs) if device == "cpu" else (model.to(device), _moved(inputs, device))


def run(spec: Spec, accelerator: Any | None, device: str = "cpu") -> dict[str, Any]:
    """The record of one model.

    `state` is whole, partly, eager, wrong, error, absent (not in the installed version of the library) or unusable
    (eager itself is not fit).
    """
    record: dict[str, Any] = {"name": spec.name, "group": spec.group, "state": "unusable", "wrong": [], "inexact": 0.0}
    record["versions"] = versions()
    record["device"] = device
    started = time.perf_counter()
    served: list[str] = []
    pristine: torch.nn.Module | None = None
    for mode_name, mode in MODES.items():
        try:
            if pristine is not None:
                model, pristine = pristine, None
            else:
                model, inputs = _build(spec, device)
                if mode is not list(MODES.values())[-1] and _size_bytes(model) < COPY_LIMIT_BYTES:
                    pristine = copy.deepcopy(model)
            with mode():
                eager_start = time.perf_counter()
                references = [_call(model, one) for one in inputs]
                record[f"eager_ms {mode_name}"] = round((time.perf_counter() - eager_start) * 1e3, 2)
                # Once is enough to know whether eager agrees with itself.
                pairs = zip(references, inputs, strict=True) if not served else ()
                repeated = [compare(reference, _call(model, one)) for reference, one in pairs]
        except NotInstalled as error:
            record["state"], record["reasons"] = "absent", [str(error)]
            return record
        except Exception as error:
            record["reasons"] = [f"eager raises {type(error).__name__}: {str(error)[:300]}"]
            return record
        record.setdefault("tensors", sum(each.tensors for each in repeated))
        record.setdefault("not_finite", sum(each.not_finite for each in repeated))
        record.setdefault("eager_noise", max(each.max_relative for each in repeated) if repeated else 0.0)
        if any(each.wrong for each in repeated):
            record["reasons"] = [
                "eager differs from itself: " + "; ".join(w for each in repeated for w in each.wrong)[:300]
            ]
            return record
        if accelerator is not None:
            accelerator.enable()
        try:
            with mode():
                for shape, (reference, one) in enumerate(zip(references, inputs, strict=True)):
                    served.append(
                        _accelerated(model, one, reference, accelerator, f"{mode_name} shape {shape}", record)
                    )
            if accelerator is not None and device != "cpu":
                plans = _plans(accelerator, model)
                graphs = [plan.get("cuda_graph") or {} for plan in plans]
                record["graphs"] = sum(bool(graph.get("captured")) for graph in graphs)
                parts = [part for plan in plans for part in plan.get("parts", [])]
                record["graphs_in_parts"] = sum(bool(part.get("cuda_graph", {}).get("captured")) for part in parts)
                graphs += [part.get("cuda_graph") or part for part in parts]
                record["not_graphs"] = sorted({graph["reason"] for graph in graphs if graph.get("reason")})
            if accelerator is not None and any(each != "whole" for each in served):
                record.setdefault("reasons", _reasons(accelerator, model))
        except Exception as error:
            record["state"] = "error"
            record["reasons"] = [
                f"{mode_name}: {type(error).__name__}: {str(error)[:300]}",
                traceback.format_exc(limit=-4)[-800:],
            ]
            return record
        finally:
            if accelerator is not None:
                accelerator.disable()
        del model, references, repeated
        gc.collect()
    record["served"] = served
    record["seconds"] = round(time.perf_counter() - started, 2)
    record["peak_mib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    if record["wrong"]:
        record["state"] = "wrong"
    elif all(each == "whole" for each in served):
        record["state"] = "whole"
    elif any(each in ("whole", "partly") for each in served):
        record["state"] = "partly"
    else:
        record["state"] = "eager"
    return record


def _accelerated(
    model: torch.nn.Module, one: Inputs, reference: Any, accelerator: Any | None, where: str, record: dict[str, Any]
) -> str:
    """Makes the calls of one shape; returns how the last was served."""
    served = "eager"
    for index in range(CALLS_PER_SHAPE + CALLS_IF_REFUSED):
        if index >= CALLS_PER_SHAPE and (accelerator is None or served != "eager"):
            break
        before = _counts(accelerator) if accelerator is not None else {}
        start = time.perf_counter()
        output = _call(model, one)
        elapsed = time.perf_counter() - start
        after = _counts(accelerator) if accelerator is not None else {}
        difference: Difference = compare(reference, output)
        del output
        record["inexact"] = max(record["inexact"], difference.max_relative)
        record["wrong"] += [f"{where} call {index + 1}: {text}" for text in difference.wrong[:3]]
        if index < CALLS_PER_SHAPE:
            record[f"call{index + 1}_ms"] = round(max(record.get(f"call{index + 1}_ms", 0.0), elapsed * 1e3), 2)
        if after:
            planned, calls = after["planned"] - before["planned"], after["calls"] - before["calls"]
            whole = planned == calls == 1 and index < CALLS_PER_SHAPE
            served = "whole" if whole else "partly" if planned else "eager"
    return served


def _plans(accelerator: Any, model: torch.nn.Module) -> list[dict[str, Any]]:
    return [plan for module in accelerator.explain(model).to_dict()["modules"] for plan in module["plans"]]


def _reasons(accelerator: Any, model: torch.nn.Module) -> list[str]:
    """Refusals as explain() tells them, the outermost module's first."""
    try:
        told = accelerator.explain(model).to_dict()
    except Exception as error:
        return [f"explain() raised {type(error).__name__}: {str(error)[:200]}"]
    found: list[str] = []

    def visit(node: Any) -> None:
        if isinstance(node, dict):
            if "code" in node and "message" in node:
                # Machine-specific prefixes of file names say nothing about the model.
                file = re.sub(r"^.*/(site-packages|lib/python3\.\d+)/", "", str(node.get("file", "")))
                text = f"{node['code']}: {node['message']} ({file}:{node.get('line', 0)})"
                if text not in found:
                    found.append(text)
            for value in node.values():
                visit(value)
        elif isinstance(node, (list, tuple)):
            for value in node:
                visit(value)

    visit(told)
    return found[:6]
