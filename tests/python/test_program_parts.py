"""Programs cut into parts, as a GPU's graphs with operators between them: what they make is what the whole makes.

On the CPU: a part that is meant for a graph runs in memory of its own, with copies of what it hands on, as a graph does.
CUVIL_RANDOM_PROGRAMS sets how many random programs (default 2000), CUVIL_RANDOM_SEED where they begin.
"""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch
from cuvil import _native
from program_recorder import Recorder, describe_tensors, same_bits
from test_random_programs import FIRST_SEED, MODES, NUM_PROGRAMS, Generator

aten = torch.ops.aten
NUM_BATCHES = 10
# Reasons for which a program is not cut at all.
NOT_CUT = ("sizes depend on data", "share a constant", "an output is a constant of the call", "two constants share")


def run_parts(
    recorder: Recorder, host_ops: list[int], inputs: list[Any], captured: list[Any], as_graphs: bool
) -> tuple[list[torch.Tensor], list[tuple[int, int, bool, str]]]:
    outputs, parts = _native._plan_run_parts(recorder.text(), recorder.constants, host_ops, inputs, captured, as_graphs)
    return outputs, parts


def check_versions(text: str, actual: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    """What the program writes in place has eager's version. What an operator has made may count writes of its own making
    (`arange`, `matmul` of a vector), which a graph's copy does not have."""
    storages = dict(re.findall(r"%(\d+) : \S+ \S+ @(\d+)", text))
    written = {storages[value] for value in re.findall(r"! %(\d+)", text)}
    returned = re.findall(r"%(\d+)", text.rsplit("return", 1)[1])
    for value, a, e in zip(returned, actual, expected, strict=True):
        if storages[value] in written and not a.is_inference():
            assert a._version == e._version, f"%{value} has version {a._version} in place of {e._version}"


def check_program(seed: int) -> list[tuple[int, int, bool, str]]:
    """The parts; none if the program is not cut."""
    generator = Generator(seed)
    rng = generator.rng
    with rng.choice(MODES)():
        originals = generator.make_leaves()
        leaves, copies = copy.deepcopy(originals), copy.deepcopy(originals)
        torch.manual_seed(seed + 1)
        expected = generator.run(*leaves, num_steps=rng.randint(4, 24))
        expected_state = torch.get_rng_state()
        text = generator.recorder.text()
        num_ops = sum(line.startswith("#") for line in text.splitlines())
        host_ops = sorted(rng.sample(range(num_ops), rng.randint(0, min(4, num_ops))))
        as_graphs = rng.random() < 0.7
        torch.manual_seed(seed + 1)
        try:
            try:
                actual, parts = run_parts(generator.recorder, host_ops, *copies, as_graphs)
            except NotImplementedError as error:
                assert any(reason in str(error) for reason in (*NOT_CUT, "warns, which only eager can do")), error
                return []
            assert torch.equal(torch.get_rng_state(), expected_state), "the generator's state differs"
            before, after = [*leaves[0], *leaves[1]], [*copies[0], *copies[1]]
            versions = not as_graphs
            assert describe_tensors([*actual, *after], versions) == describe_tensors([*expected, *before], versions)
            if as_graphs:
                check_versions(text, actual, expected)
            for a, e in zip([*actual, *after], [*expected, *before], strict=True):
                assert same_bits(a, e), f"{a}\nis not\n{e}"
        except Exception as error:
            raise AssertionError(f"seed {seed}, cut at {host_ops}, as graphs {as_graphs}:\n{text}\n{error}") from error
    return parts


@pytest.mark.parametrize("batch", range(NUM_BATCHES))
def test_random_programs_in_parts(batch: int) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        num_cut = num_graphs = 0
        for i in range(batch, NUM_PROGRAMS, NUM_BATCHES):
            parts = check_program(FIRST_SEED + 500_000 + i)
            num_cut += len(parts) > 1
            num_graphs += sum(on_graph for _, _, on_graph, _ in parts)
        assert NUM_PROGRAMS < 500 or (num_cut > NUM_PROGRAMS / NUM_BATCHES / 4 and num_graphs > num_cut)
    finally:
        torch.set_num_threads(threads)
