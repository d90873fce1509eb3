"""Switches that a captured CUDA graph has built in: setting any of them is seen, and setting it back too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from cuvil import _native

C: Any = torch._C


def attribute(owner: Any, name: str, value: Any) -> tuple[Callable[[], Any], Callable[[Any], None], Any]:
    return (lambda: getattr(owner, name)), (lambda new: setattr(owner, name, new)), value


def functions(getter: str, setter: str, value: Any) -> tuple[Callable[[], Any], Callable[[Any], None], Any]:
    return getattr(C, getter, None), getattr(C, setter, None), value


matmul = torch.backends.cuda.matmul
SWITCHES = {
    "matmul allow_tf32": attribute(matmul, "allow_tf32", True),
    "fp16 reduction": attribute(matmul, "allow_fp16_reduced_precision_reduction", False),
    "bf16 reduction": attribute(matmul, "allow_bf16_reduced_precision_reduction", False),
    "fp16 accumulation": attribute(matmul, "allow_fp16_accumulation", True),
    "matmul precision": (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, "medium"),
    "conv fp32_precision": attribute(torch.backends.cudnn.conv, "fp32_precision", "ieee"),
    "rnn fp32_precision": attribute(torch.backends.cudnn.rnn, "fp32_precision", "ieee"),
    "blas": (torch.backends.cuda.preferred_blas_library, torch.backends.cuda.preferred_blas_library, "cublaslt"),
    "linalg": (torch.backends.cuda.preferred_linalg_library, torch.backends.cuda.preferred_linalg_library, "magma"),
    "cudnn benchmark": attribute(torch.backends.cudnn, "benchmark", True),
    "cudnn benchmark_limit": functions("_cuda_get_cudnn_benchmark_limit", "_cuda_set_cudnn_benchmark_limit", 7),
    "cudnn deterministic": attribute(torch.backends.cudnn, "deterministic", True),
    "cudnn enabled": attribute(torch.backends.cudnn, "enabled", False),
    "deterministic": (torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms, True),
    "fill uninitialized": attribute(torch.utils.deterministic, "fill_uninitialized_memory", False),
    "flash": functions("_get_flash_sdp_enabled", "_set_sdp_use_flash", False),
    "flash 3": functions("_get_fa3_sdp_enabled", "_set_sdp_use_fa3", None),
    "flash 4": functions("_get_fa4_sdp_enabled", "_set_sdp_use_fa4", None),
    "mem efficient": functions("_get_mem_efficient_sdp_enabled", "_set_sdp_use_mem_efficient", False),
    "math": functions("_get_math_sdp_enabled", "_set_sdp_use_math", False),
    "cudnn attention": functions("_get_cudnn_sdp_enabled", "_set_sdp_use_cudnn", False),
    "overrideable": functions("_get_overrideable_sdp_enabled", "_set_sdp_use_overrideable", False),
    "math reduction": functions(
        "_get_math_sdp_allow_fp16_bf16_reduction", "_set_math_sdp_allow_fp16_bf16_reduction", True
    ),
    "attention order": functions("_get_sdp_priority_order", "_set_sdp_priority_order", [2, 1, 0, 3, 4]),
    "sm carveout": functions("_get_sm_carveout_experimental", "_set_sm_carveout_experimental", 4),
    "depthwise kernel": functions("_get_cudnn_depthwise_kernel", "_set_cudnn_depthwise_kernel", "native"),
    "grouped gemm": functions("_get_cublaslt_prefer_grouped_gemm", "_set_cublaslt_prefer_grouped_gemm", None),
}


@pytest.mark.parametrize("name", SWITCHES)
def test_a_switch_is_seen(name: str) -> None:
    getter, setter, value = SWITCHES[name]
    if getter is None or setter is None:
        pytest.skip("this torch has no such switch")
    before, answers = getter(), _native._cuda_switches()[0]
    assert _native._cuda_switches()[0] == answers
    if value is None:
        value = not before
    assert value != before
    try:
        setter(value)
        assert _native._cuda_switches()[0] != answers
    finally:
        setter(before)
    assert _native._cuda_switches()[0] == answers


def test_contradicting_answers_are_never_equal() -> None:
    # Torch refuses to say whether TF32 is allowed when two ways of asking for it disagree; its operators then raise.
    before = matmul.fp32_precision
    try:
        matmul.fp32_precision = "tf32"
        with pytest.raises(RuntimeError):
            torch._C._get_cublas_allow_tf32()
        assert _native._cuda_switches()[0] != _native._cuda_switches()[0]
    finally:
        matmul.fp32_precision = before
    assert _native._cuda_switches()[0] == _native._cuda_switches()[0]


def test_few_answers_take_a_call_of_python() -> None:
    assert _native._cuda_switches()[1] <= 3
