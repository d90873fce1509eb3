"""What tensors tell about their storage without an operator, found by an attack."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from eager_twin import Fn, eager_twin, ramp

QUESTIONS: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "is a view": lambda x, w: x._is_view(),
    "is the base of a view": lambda x, w: x._base is w,
    "is an alias": lambda x, w: torch._C._is_alias_of(x, w),
    "is set to": lambda x, w: x.is_set_to(w),
    "has the same address": lambda x, w: x.data_ptr() == w.data_ptr(),
}


@pytest.mark.parametrize("question", QUESTIONS.values(), ids=QUESTIONS)
def test_argument_that_may_alias_state(question):
    def program():
        m = Fn(lambda self, x: x * 2 if question(x, self.w) else x * 3, w=ramp(4))
        with torch.no_grad():
            for turn in range(2):
                for kind, argument in enumerate((m.w, m.w[:], ramp(4), ramp(5)[:4])):
                    for i in range(5):
                        yield f"{turn} {kind} {i}", m(argument)

    eager_twin(program)()


@pytest.mark.parametrize("question", QUESTIONS.values(), ids=QUESTIONS)
def test_arguments_that_may_alias_each_other(question):
    def program():
        m = Fn(lambda self, x, y: x * 2 if question(x, y) else x * 3)
        x = ramp(4)
        with torch.no_grad():
            for turn in range(2):
                for kind, other in enumerate((x, x[:], ramp(4), ramp(5)[:4])):
                    for i in range(5):
                        yield f"{turn} {kind} {i}", m(x, other)
                        yield f"{turn} {kind} {i} exchanged", m(other, x)

    eager_twin(program)()
