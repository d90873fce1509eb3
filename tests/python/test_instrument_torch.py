"""Real models compute the same, bit for bit, with every frame of the call instrumented."""

from __future__ import annotations

import os

import pytest
from cuvil import _native

torch = pytest.importorskip("torch")
os.environ.setdefault("HF_HUB_OFFLINE", "1")


def same(a, b):
    if torch.is_tensor(a):
        return a.dtype == b.dtype and a.stride() == b.stride() and torch.equal(a, b)
    if isinstance(a, dict):
        return type(a) is type(b) and list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b)


def resnet50():
    models = pytest.importorskip("torchvision.models")
    return models.resnet50(), (torch.randn(1, 3, 64, 64),), {}


def bert():
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        hidden_size=64, intermediate_size=128, num_attention_heads=4, num_hidden_layers=3, vocab_size=100
    )
    return transformers.BertModel(config), (torch.randint(0, 100, (1, 16)),), {}


def t5():
    transformers = pytest.importorskip("transformers")
    model = transformers.T5Model(transformers.T5Config(d_model=64, d_ff=128, num_layers=2, vocab_size=100))
    return model, (), {"input_ids": torch.randint(0, 100, (1, 8)), "decoder_input_ids": torch.randint(0, 100, (1, 4))}


def generate():
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=100,
    )

    class Generate(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.model = transformers.LlamaForCausalLM(config)

        def forward(self, ids):
            return self.model.generate(ids, max_new_tokens=5, do_sample=False)

    return Generate(), (torch.randint(3, 100, (1, 6)),), {}


@pytest.mark.parametrize("make", [resnet50, bert, t5, generate])
def test_model_is_bit_equal_and_every_frame_is_seen(make):
    _native._debug_self_test()
    torch.manual_seed(0)
    model, args, kwargs = make()
    model.eval()
    with torch.inference_mode():
        expected = model(*args, **kwargs)
        for _ in range(3):
            result, error, report = _native._debug_run(0, model, *args, **kwargs)
            assert error is None and same(expected, result)
            assert report["mismatches"] == 0 and report["unknown"] == 0 and report["refused"] == 0
            assert report["started_outside"] == 0 and report["in_sink"] == 0 and report["probes"] > 10_000
            assert report["frames"] == report["instrumented"] + report["no_room"]
    assert report["status"] == "" and report["no_room"] == 0
