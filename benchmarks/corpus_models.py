# The models of the corpus and how each is built; corpus_models.json holds the list.
#
# timm entries carry the smallest resolution at which the architecture runs; transformers entries the kind of input.
"""Model list and builders of the corpus."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import pathlib
import sys
from collections.abc import Iterator
from typing import Any

import torch

_LIST = pathlib.Path(__file__).with_name("corpus_models.json")
_SAMPLES = pathlib.Path(__file__).with_name("corpus_samples.json")

Inputs = tuple[tuple[Any, ...], dict[str, Any]]


@dataclasses.dataclass(frozen=True)
class Spec:
    """One model: `name` is unique, `group` is what the summary adds up by."""

    name: str
    group: str
    options: dict[str, Any]


class NotInstalled(Exception):
    """The installed version of the library has no such model."""


def versions() -> str:
    """What a record was made with, as one phrase."""
    import timm
    import torchvision
    import transformers

    python = ".".join(map(str, sys.version_info[:3]))
    return (
        f"Python {python}, torch {torch.__version__}, torchvision {torchvision.__version__}, "
        f"timm {timm.__version__}, transformers {transformers.__version__}"
    )


def load_specs() -> list[Spec]:
    """Every model of the corpus in a fixed order."""
    return [Spec(row["name"], row["group"], row.get("options", {})) for row in json.loads(_LIST.read_text())]


def sample(name: str) -> set[str]:
    """Model names of a fixed sample: 'ci' (40) or 'python' (100)."""
    return set(json.loads(_SAMPLES.read_text())[name])


def build(spec: Spec) -> tuple[torch.nn.Module, list[Inputs]]:
    """The model in eval mode with random weights, and the arguments of one call for each of the two shapes."""
    torch.manual_seed(0)
    family, _, name = spec.name.partition("/")
    with _cheap_initialisation():
        model, inputs = {"torchvision": _torchvision, "timm": _timm, "transformers": _transformers}[family](name, spec)
    return _randomize(model.eval()), inputs


@contextlib.contextmanager
def _cheap_initialisation() -> Iterator[None]:
    # Drawing half a billion normal numbers takes minutes; large tensors repeat one block of them instead.
    block = torch.rand(1 << 16)
    originals = {name: getattr(torch.Tensor, name) for name in ("uniform_", "normal_", "erfinv_")}

    def tiled(name: str, tensor: torch.Tensor, low: float, high: float, generator: Any) -> torch.Tensor:
        count = block.numel()
        if tensor.numel() < 4 * count or not tensor.is_contiguous() or tensor.device.type != "cpu":
            return originals[name](tensor, low, high, generator=generator)
        flat, values = tensor.detach().view(-1), (block * (high - low) + low).to(tensor.dtype)
        whole = flat.numel() // count
        flat[: whole * count].view(whole, count).copy_(values)
        flat[whole * count :].copy_(values[: flat.numel() - whole * count])
        return tensor

    def uniform_(self: torch.Tensor, a: float = 0.0, b: float = 1.0, *, generator: Any = None) -> torch.Tensor:
        return tiled("uniform_", self, a, b, generator)

    def normal_(self: torch.Tensor, mean: float = 0.0, std: float = 1.0, *, generator: Any = None) -> torch.Tensor:
        half_width = std * 3.0**0.5
        if self.numel() < 4 * block.numel():
            return originals["normal_"](self, mean, std, generator=generator)
        return tiled("uniform_", self, mean - half_width, mean + half_width, generator)

    def erfinv_(self: torch.Tensor) -> torch.Tensor:
        # Part of trunc_normal_, and the slow one; a uniform distribution of the same width does as well here.
        return self if self.numel() >= 4 * block.numel() else originals["erfinv_"](self)

    for replacement in (uniform_, normal_, erfinv_):
        setattr(torch.Tensor, replacement.__name__, replacement)
    try:
        yield
    finally:
        for name in originals:
            delattr(torch.Tensor, name)


def _randomize(model: torch.nn.Module) -> torch.nn.Module:
    # Many architectures start from zeros or ones, with which a wrong plan would go unnoticed.
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if not tensor.is_floating_point() or tensor.numel() == 0:
                continue
            small = name.endswith(("running_mean", "running_var", "bias")) or tensor.dim() <= 1
            if not small and bool(tensor.view(-1)[:64].any() if tensor.is_contiguous() else True):
                continue
            noise = torch.empty(tensor.shape, dtype=torch.float32).uniform_(-1.0, 1.0, generator=generator)
            if name.endswith("running_var"):
                tensor.copy_(1.0 + 0.3 * noise)
            else:
                tensor.add_((0.05 * noise).to(tensor.dtype))
    return model


def _images(shapes: list[tuple[int, ...]]) -> list[Inputs]:
    return [((torch.randn(shape),), {}) for shape in shapes]


def _torchvision(name: str, spec: Spec) -> tuple[torch.nn.Module, list[Inputs]]:
    import torchvision

    kwargs: dict[str, Any] = {"weights": None}
    if spec.group in ("torchvision segmentation", "torchvision detection"):
        kwargs["weights_backbone"] = None
    if name in ("googlenet", "inception_v3"):
        kwargs["init_weights"] = False
    if "image_size" in spec.options:
        kwargs["image_size"] = spec.options["image_size"]
    module = getattr(torchvision.models, spec.options.get("module", ""), torchvision.models)
    model = (
        module.get_model(name, **kwargs)
        if hasattr(module, "get_model")
        else torchvision.models.get_model(name, **kwargs)
    )
    size = spec.options.get("size", 64)
    if spec.group == "torchvision detection":
        model.transform.min_size, model.transform.max_size = (size,), 2 * size
        images = [[torch.rand(3, size, size + 32)], [torch.rand(3, size, size), torch.rand(3, size + 16, size)]]
        return model, [((batch,), {}) for batch in images]
    if spec.group == "torchvision video":
        frames = spec.options.get("frames", 8)
        return model, _images([(1, 3, frames, size, size), (2, 3, frames, size, size)])
    if spec.group == "torchvision optical flow":
        return model, [
            ((torch.rand(n, 3, size, size), torch.rand(n, 3, size, size)), {"num_flow_updates": 2}) for n in (1, 2)
        ]
    if spec.options.get("fixed"):
        return model, _images([(1, 3, size, size), (2, 3, size, size)])
    return model, _images([(1, 3, size, size), (2, 3, size + 32, size)])


def _timm(name: str, spec: Spec) -> tuple[torch.nn.Module, list[Inputs]]:
    import timm

    size = spec.options["size"]
    if not timm.is_model(name):
        raise NotInstalled(f"timm {timm.__version__} has no {name}")
    kwargs = {"img_size": size} if spec.options.get("img_size") else {}
    channels = spec.options.get("channels", 3)
    return timm.create_model(name, **kwargs), _images([(1, channels, size, size), (2, channels, size, size)])


def _transformers(name: str, spec: Spec) -> tuple[torch.nn.Module, list[Inputs]]:
    import corpus_transformers
    import transformers

    options = spec.options
    if not corpus_transformers.is_known(options["type"], options.get("class")):
        raise NotInstalled(f"transformers {transformers.__version__} has no {name}")
    model = corpus_transformers.build(options["type"], options.get("class"))
    inputs = [
        ((), corpus_transformers.make_inputs(options["kind"], model, batch, length))
        for batch, length in ((1, 16), (2, 11))
    ]
    return model, inputs
