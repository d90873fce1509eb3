"""A fixed sample of the corpus: real architectures, random weights, eager's answers, plans in use."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys

import corpus_models
import pytest
import torch
from corpus_outputs import compare
from eager_twin import ACCELERATOR

_SCRIPT = pathlib.Path(corpus_models.__file__).with_name("corpus.py")
# Of the sample, planned whole.
MINIMUM_WHOLE = 30


@pytest.mark.slow
def test_sample_of_forty_models(tmp_path):
    for package in ("torchvision", "timm", "transformers"):
        pytest.importorskip(package)
    out = tmp_path / "records.jsonl"
    command = [sys.executable, str(_SCRIPT), "--sample", "ci", "--out", str(out), "--accelerator", ACCELERATOR, "-v"]
    result = subprocess.run(
        command, capture_output=True, text=True, timeout=1500, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert result.returncode == 0, result.stdout[-6000:] + result.stderr[-3000:]
    records = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(records) == len(corpus_models.sample("ci"))
    states = {record["name"]: record["state"] for record in records}
    if ACCELERATOR == "cuvil":
        assert sum(state == "whole" for state in states.values()) >= MINIMUM_WHOLE, result.stdout[-6000:]


def test_samples_name_models_of_the_corpus():
    names = {spec.name for spec in corpus_models.load_specs()}
    assert len(names) == len(corpus_models.load_specs())
    assert len(corpus_models.sample("ci")) == 40
    assert len(corpus_models.sample("python")) == 100
    assert corpus_models.sample("ci") <= names
    assert corpus_models.sample("python") <= names


def test_corpus_is_as_large_as_it_claims():
    specs = corpus_models.load_specs()
    timm = [spec for spec in specs if spec.group == "timm"]
    assert len(timm) >= 250
    assert len({spec.options["family"] for spec in timm}) >= 90
    assert sum(spec.group == "transformers" for spec in specs) >= 120


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        (lambda t: t.clone().add_(1), "values differ"),
        (lambda t: t.double(), "dtype"),
        (lambda t: t.t().contiguous().t(), "strides"),
        (lambda t: torch.cat([t, t])[:2], "storage"),
        (lambda t: t.clone().requires_grad_(), "requires_grad"),
        (lambda t: [t], "became list"),
        (lambda t: t[0].clone(), "shape"),
    ],
)
def test_comparison_notices(changed, words):
    t = torch.arange(6.0).reshape(2, 3).clone()
    assert not compare({"a": (t, 1)}, {"a": (t.clone(), 1)}).wrong
    assert words in " ".join(compare({"a": (t, 1)}, {"a": (changed(t), 1)}).wrong)
