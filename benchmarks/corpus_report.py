# Turns corpus records into the printed summary and docs/coverage.md.
"""Summary and coverage document of the corpus."""

from __future__ import annotations

import pathlib
from collections import Counter, defaultdict
from typing import Any

Record = dict[str, Any]
STATES = ("whole", "partly", "eager", "wrong", "crash", "error", "timeout", "memory", "unusable", "absent")


def _groups(records: list[Record]) -> dict[str, list[Record]]:
    groups: dict[str, list[Record]] = defaultdict(list)
    for record in records:
        groups[record["group"]].append(record)
    return dict(sorted(groups.items()))


def _code(record: Record) -> str:
    """The reason code of the outermost refusal."""
    reasons = record.get("reasons") or ["no reason given"]
    return str(reasons[0]).partition(":")[0]


def _table(records: list[Record]) -> list[str]:
    lines = ["| group | models | whole | " + " | ".join(STATES[1:]) + " |", "|---" * (len(STATES) + 2) + "|"]
    for group, members in [*_groups(records).items(), ("all", records)]:
        counts = Counter(record["state"] for record in members)
        usable = len(members) - counts["unusable"] - counts["absent"]
        share = f"{counts['whole']} ({100 * counts['whole'] / usable:.1f} %)" if usable else "-"
        lines.append(f"| {group} | {len(members)} | {share} | " + " | ".join(str(counts[s]) for s in STATES[1:]) + " |")
    return lines


def _reason_lines(records: list[Record]) -> list[str]:
    counts = Counter(_code(record) for record in records if record["state"] in ("partly", "eager"))
    return [f"- {count} × {code}" for code, count in counts.most_common()]


def summary(records: list[Record]) -> str:
    """A few lines for the terminal."""
    lines = _table(records)
    inexact = [record for record in records if record.get("inexact", 0.0) > record.get("eager_noise", 0.0)]
    lines += [
        f"bit-exact: {len(records) - len(inexact)} of {len(records)}; "
        f"largest relative deviation {max((r['inexact'] for r in inexact), default=0.0):.2g}"
    ]
    reasons = _reason_lines(records)
    if reasons:
        lines += ["reasons of models not planned whole:", *reasons[:25]]
    on_gpu = [record for record in records if "graphs" in record]
    if on_gpu:
        with_graphs = sum(record["graphs"] > 0 for record in on_gpu)
        lines.append(f"models with plans that are CUDA graphs: {with_graphs} of {len(on_gpu)}")
        in_parts = sum(record.get("graphs_in_parts", 0) > 0 for record in on_gpu)
        lines.append(f"models with plans of several parts, graphs among them: {in_parts} of {len(on_gpu)}")
        why = Counter(reason for record in on_gpu for reason in record["not_graphs"])
        lines += [f"- {count} × {reason[:160]}" for reason, count in why.most_common(15)]
    for record in records:
        if record["state"] in ("wrong", "crash", "error", "timeout", "memory"):
            detail = (record["wrong"] or record.get("reasons") or [""])[0]
            lines.append(f"{record['state'].upper()} {record['name']}: {detail[:200]}")
    return "\n".join(lines)


def _pinned() -> list[str]:
    """The versions of the models' libraries that the project's environments have."""
    pins = sorted((pathlib.Path(__file__).parents[1] / "scripts" / "requirements").glob("*.txt"))
    lines = [line for path in pins for line in path.read_text().splitlines()]
    libraries = ("torch==", "torchvision==", "timm==", "transformers==")
    return [line.replace("==", " ") for line in lines if line.startswith(libraries)]


def write_coverage(records: list[Record], path: pathlib.Path) -> None:
    """Writes the document that lists every model with its state and reason."""
    made = Counter(str(record.get("versions", "versions unknown")) for record in records)
    lines = [
        "# Coverage",
        "",
        "Random weights, eval mode, under `inference_mode` and under `no_grad`, three calls of two shapes each, compared",
        "with eager in structure, dtype, strides, storage and values (`python benchmarks/corpus.py`). *whole*: the third",
        "call of every shape was served by one plan of the outermost module; *partly*: by plans of modules inside it;",
        "*eager*: by nobody, because of the reason given; *unusable*: eager itself raises or differs from itself;",
        "*absent*: the library's version has no such model. Shares are of the usable ones.",
        "",
        *[f"{count} records: {made_with}.  " for made_with, count in made.most_common()],
        f"Tests run fixed samples of these models, with what scripts/requirements pins: {', '.join(_pinned())}.",
        "",
        *_table(records),
        "",
        "## Reasons",
        "",
        *(_reason_lines(records) or ["Every model is planned whole."]),
    ]
    for group, members in _groups(records).items():
        lines += ["", f"## {group}", "", "| model | state | reason |", "|---|---|---|"]
        for record in sorted(members, key=lambda each: str(each["name"])):
            reason = "" if record["state"] == "whole" else str((record["wrong"] or record.get("reasons") or [""])[0])
            reason = " ".join(reason.replace("|", "\\|").split())[:200]
            lines.append(f"| {record['name'].partition('/')[2]} | {record['state']} | {reason} |")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n")
