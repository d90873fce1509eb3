"""Weights edited or replaced through every door a Python program has."""

from __future__ import annotations

import copy
import gc
import threading
import warnings
import weakref

import numpy as np
import torch
import torch.nn as nn
import torch.nn.utils.parametrize as parametrize
from eager_twin import Fn, attempt, eager_twin, fill, ramp, warm


def _model():
    return fill(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)))


@eager_twin(served=True)
def test_edits_that_leave_no_trace_on_the_version():
    m, x = _model(), ramp(2, 3) * 0.1
    w = m[0].weight
    with torch.no_grad():
        yield from warm("start", m, x)
        w.data.mul_(2)
        yield "data", m(x)
        w.detach().numpy()[0] = 0.5
        yield "numpy", m(x)
        np.asarray(w.detach())[1, 1] = -3.0
        yield "asarray", m(x)
        torch.from_dlpack(w.detach()).add_(0.1)
        yield "dlpack", m(x)
        np.from_dlpack(w.detach())[0, 0] = 9.0
        yield "numpy-dlpack", m(x)
        memoryview(w.detach().numpy())[2, 0] = 4.0
        yield "memoryview", m(x)
        w.untyped_storage().copy_(torch.linspace(0, 1, 12).untyped_storage())
        yield "storage", m(x)
        w.untyped_storage().fill_(0)
        yield "storage-fill", m(x)
        torch.tensor([], dtype=torch.float32).set_(w.untyped_storage(), 0, (12,)).fill_(0.25)
        yield "set-alias", m(x)
        torch.frombuffer(memoryview(w.detach().numpy()), dtype=torch.float32).mul_(3)
        yield "frombuffer", m(x)
        w.data_ptr()
        import ctypes

        ctypes.cast(w.data_ptr(), ctypes.POINTER(ctypes.c_float))[3] = 7.0
        yield "ctypes", m(x)


@eager_twin(served=True)
def test_edits_through_views_made_before_the_plan():
    m, x = _model(), ramp(2, 3) * 0.1
    w = m[0].weight
    flat, row, array, alias = w.data.view(-1), w.data[1], w.detach().numpy(), torch.from_dlpack(w.detach())
    with torch.no_grad():
        yield from warm("start", m, x)
        flat[0] = 5.0
        yield "flat", m(x)
        row.zero_()
        yield "row", m(x)
        array *= -1
        yield "array", m(x)
        alias.add_(1)
        yield "alias", m(x)


@eager_twin(served=True)
def test_storage_resized_or_replaced_under_a_parameter():
    m, x = _model(), ramp(2, 3) * 0.1
    w = m[0].weight
    with torch.no_grad():
        yield from warm("start", m, x)
        w.data = torch.full((4, 3), 0.5)
        yield from warm("data=", m, x)
        w.set_(torch.arange(12.0).view(4, 3))
        yield from warm("set_", m, x)
        w.data = torch.arange(24.0).view(8, 3)[::2]
        yield "strided", m(x)
        w.data = torch.arange(12.0).view(3, 4).t()
        yield "transposed", m(x)
        other = nn.Parameter(torch.full((4, 3), -1.0))
        torch.utils.swap_tensors(m[0].weight, other)
        yield "swapped", m(x)
        w.data = w.data.double()
        yield "double", attempt(m, x)
        w.data = w.data.float()
        yield "float", m(x)


@eager_twin(served=True)
def test_same_storage_address_with_other_contents():
    x = ramp(2, 3) * 0.1
    m = _model()
    with torch.no_grad():
        yield from warm("start", m, x)
        for i in range(20):
            m[0].weight = None
            m[0].weight = nn.Parameter(torch.full((4, 3), float(i)))
            yield f"{i}", m(x)


@eager_twin(served=True)
def test_weight_shared_by_two_models():
    shared = fill(nn.Linear(3, 3))
    a, b = nn.Sequential(shared, nn.ReLU()), nn.Sequential(nn.Tanh(), shared)
    x = ramp(2, 3)
    with torch.no_grad():
        yield from warm("a", a, x)
        yield from warm("b", b, x)
        shared.weight.mul_(2)
        yield "both", (a(x), b(x))
        a[0].weight = nn.Parameter(torch.ones(3, 3))
        yield "replaced", (a(x), b(x))
        b[1] = fill(nn.Linear(3, 3), 0.1)
        shared.weight.zero_()
        yield "apart", (a(x), b(x))


@eager_twin(served=True)
def test_tied_and_untied_weights():
    emb, head = fill(nn.Embedding(5, 3)), nn.Linear(3, 5, bias=False)
    head.weight = emb.weight
    m = nn.Sequential(emb, head)
    ids = torch.tensor([0, 4, 2])
    with torch.no_grad():
        yield from warm("tied", m, ids)
        emb.weight[4] = 1.0
        yield "row", m(ids)
        head.weight = nn.Parameter(head.weight.detach().clone())
        yield from warm("untied", m, ids)
        emb.weight.zero_()
        yield "only-one", m(ids)


@eager_twin(served=True)
def test_numpy_owner_and_from_numpy():
    array = np.linspace(-1, 1, 9, dtype=np.float32).reshape(3, 3)
    m = Fn(lambda s, x: x @ s.w, w=torch.from_numpy(array))
    with torch.no_grad():
        yield from warm("start", m, ramp(2, 3))
        array[:] = 2.0
        yield "filled", m(ramp(2, 3))
        array[::2] = 0.0
        yield "rows", m(ramp(2, 3))
        del array
        gc.collect()
        yield "owner-gone", m(ramp(2, 3))


@eager_twin(served=True)
def test_optimizer_step_and_weight_averaging():
    m, x = _model(), ramp(2, 3) * 0.1
    ema = torch.optim.swa_utils.AveragedModel(m)
    opt = torch.optim.AdamW(m.parameters(), lr=0.1)
    with torch.no_grad():
        yield from warm("start", m, x)
        yield from warm("ema", ema, x)
    for i in range(3):
        opt.zero_grad()
        m(x).sum().backward()
        opt.step()
        ema.update_parameters(m)
        with torch.no_grad():
            yield f"step{i}", (m(x), ema(x))


@eager_twin(served=True)
def test_load_state_dict_assign_and_strict():
    m, x = _model(), ramp(2, 3) * 0.1
    state = {k: v * 2 for k, v in copy.deepcopy(m.state_dict()).items()}
    with torch.no_grad():
        yield from warm("start", m, x)
        m.load_state_dict(state)
        yield from warm("copied", m, x)
        m.load_state_dict({k: v + 1 for k, v in state.items()}, assign=True)
        yield from warm("assigned", m, x)
        m.load_state_dict({"0.weight": torch.zeros(4, 3)}, strict=False)
        yield "partial", m(x)


@eager_twin(served=True)
def test_parametrize_weight_norm_and_spectral_norm():
    m, x = _model(), ramp(2, 3) * 0.1
    with torch.no_grad():
        yield from warm("plain", m, x)
        nn.utils.parametrizations.weight_norm(m[0])
        yield from warm("weight-norm", m, x)
        m[0].parametrizations.weight.original0.mul_(3)
        yield "g", m(x)
        torch.manual_seed(0)
        nn.utils.parametrizations.spectral_norm(m[2])
        m.eval()
        yield from warm("spectral-eval", m, x)
        m.train()
        yield from warm("spectral-train", m, x)
        m.eval()
        yield "spectral-eval-again", m(x)
        with parametrize.cached():
            yield from warm("cached", m, x)
        parametrize.remove_parametrizations(m[0], "weight")
        yield "removed", m(x)


@eager_twin(served=True)
def test_legacy_weight_norm_hook():
    m, x = _model(), ramp(2, 3) * 0.1
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        yield from warm("plain", m, x)
        torch.nn.utils.weight_norm(m[0])
        yield from warm("hook", m, x)
        m[0].weight_g.mul_(2)
        yield "g", m(x)
        torch.nn.utils.remove_weight_norm(m[0])
        yield "removed", m(x)


@eager_twin(served=True)
def test_pruning_masks():
    from torch.nn.utils import prune

    m, x = _model(), ramp(2, 3) * 0.1
    with torch.no_grad():
        yield from warm("plain", m, x)
        prune.l1_unstructured(m[0], "weight", amount=4)
        yield from warm("pruned", m, x)
        m[0].weight_mask.fill_(1)
        yield "unmasked", m(x)
        prune.remove(m[0], "weight")
        yield "permanent", m(x)


@eager_twin(served=True)
def test_device_and_dtype_moves():
    m, x = _model(), ramp(2, 3) * 0.1
    with torch.no_grad():
        yield from warm("float", m, x)
        m.double()
        yield from warm("double", m, x.double())
        yield "mismatch", attempt(m, x)
        m.half()
        yield "half", m(x.half())
        m.to(torch.bfloat16)
        yield "bfloat16", m(x.bfloat16())
        m.to("meta")
        yield "meta", str(m(x.to("meta", torch.bfloat16)).device)
        m.to_empty(device="cpu")
        fill(m.float())
        yield "back", m(x)
        m.share_memory()
        yield "shared-memory", m(x)
        m[0].weight.detach().fill_(0.5)
        yield "shared-edited", m(x)


@eager_twin(served=True)
def test_buffer_registered_replaced_and_made_none():
    m = Fn(lambda s, x: x * s.scale if s.scale is not None else x)
    m.register_buffer("scale", torch.tensor(2.0))
    with torch.no_grad():
        yield from warm("two", m, ramp(3))
        m.scale.fill_(3.0)
        yield "filled", m(ramp(3))
        m.scale = torch.tensor([1.0, 2.0, 3.0])
        yield "vector", m(ramp(3))
        m.scale = None
        yield "none", m(ramp(3))
        m.register_buffer("scale", torch.tensor(5.0), persistent=False)
        yield "five", m(ramp(3))
        m._buffers["scale"] = torch.tensor(6.0)
        yield "through-dict", m(ramp(3))
        del m.scale
        yield "deleted", attempt(m, ramp(3))
        m.scale = 7.0
        yield "number", m(ramp(3))


@eager_twin(served=True)
def test_parameter_lists_and_dicts():
    m = Fn(lambda s, x: sum((x * p for p in s.ps), x) + s.pd["a"] * len(s.pd))
    m.ps = nn.ParameterList([nn.Parameter(torch.full((3,), float(i))) for i in range(2)])
    m.pd = nn.ParameterDict({"a": nn.Parameter(torch.ones(3))})
    with torch.no_grad():
        yield from warm("start", m, ramp(3))
        m.ps.append(nn.Parameter(torch.full((3,), 9.0)))
        yield from warm("appended", m, ramp(3))
        m.ps[0] = nn.Parameter(torch.full((3,), -1.0))
        yield "set", m(ramp(3))
        m.pd["b"] = nn.Parameter(torch.zeros(3))
        yield "dict", m(ramp(3))
        m.pd["a"].data.mul_(4)
        yield "data", m(ramp(3))


@eager_twin(served=True)
def test_plain_tensor_attribute_in_containers():
    m = Fn(
        lambda s, x: x * s.table["a"][0] + s.pair[1] + s.holder.t,
        table={"a": [torch.ones(3)]},
        pair=(1, torch.ones(3)),
        holder=type("Holder", (), {"t": torch.ones(3)})(),
    )
    with torch.no_grad():
        yield from warm("start", m, ramp(3))
        m.table["a"][0] = torch.full((3,), 2.0)
        yield "list", m(ramp(3))
        m.table["a"][0].mul_(5)
        yield "edited", m(ramp(3))
        m.pair[1].fill_(7)
        yield "tuple", m(ramp(3))
        m.holder.t = torch.zeros(3)
        yield "object", m(ramp(3))


@eager_twin(served=True)
def test_zero_dim_tensor_as_a_scalar():
    m = Fn(lambda s, x: x * s.k + x.add(1, alpha=2) / s.k, k=torch.tensor(2.0))
    with torch.no_grad():
        yield from warm("two", m, ramp(3))
        m.k.fill_(4.0)
        yield from warm("four", m, ramp(3))
        m.k = torch.tensor(2, dtype=torch.int64)
        yield "integer", m(ramp(3))
        m.k = torch.tensor(2.0, dtype=torch.float64)
        yield "double", m(ramp(3))
        m.k = 2.0
        yield "number", m(ramp(3))
        m.k = 2
        yield "int", m(ramp(3))


@eager_twin(served=True)
def test_requires_grad_of_weights_toggled():
    m, x = _model(), ramp(2, 3) * 0.1
    with torch.no_grad():
        yield from warm("grad-weights", m, x)
    m.requires_grad_(False)
    yield from warm("frozen", m, x)
    with torch.inference_mode():
        yield from warm("inference", m, x)
    m[0].bias.requires_grad_(True)
    y = m(x)
    yield "thawed", y
    y.sum().backward()
    yield "grad", m[0].bias.grad


@eager_twin(served=True)
def test_weights_made_in_inference_mode():
    with torch.inference_mode():
        m = _model()
        x = ramp(2, 3) * 0.1
        yield from warm("start", m, x)
        m[0].weight.mul_(2)
        yield "edited", m(x)
        m[0].weight.data[0] = 1.0
        yield "data", m(x)
    with torch.no_grad():
        yield "no-grad", m(x.clone())


@eager_twin
def test_weights_replaced_by_another_thread_during_calls():
    m, x = fill(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))), torch.ones(8, 64)
    values = [0.0, 1.0, 2.0]
    stop = threading.Event()

    def replace():
        i = 0
        while not stop.is_set():
            i += 1
            m[0].weight = nn.Parameter(torch.full((64, 64), values[i % 3]), requires_grad=False)
            if i % 5 == 0:
                gc.collect(0)

    with torch.no_grad():
        m[0].bias.zero_()
        m[1].weight.copy_(torch.eye(64))
        m[1].bias.zero_()
        m[0].weight.fill_(1.0)
        yield from warm("before", m, x)
        thread = threading.Thread(target=replace)
        thread.start()
        try:
            good = True
            for _ in range(300):
                y = m(x)
                good = good and any(torch.equal(y, torch.full_like(y, 64 * v)) for v in values)
        finally:
            stop.set()
            thread.join()
        yield "must:every-result-is-of-one-weight", good
        m[0].weight = nn.Parameter(torch.full((64, 64), 5.0))
        yield "after", m(x)


@eager_twin
def test_plans_do_not_keep_weights_alive():
    m, x = _model(), ramp(2, 3)
    with torch.no_grad():
        yield from warm("start", m, x)
        old = weakref.ref(m[0].weight)
        storage = weakref.ref(m[0].weight.untyped_storage())
        m[0].weight = nn.Parameter(torch.zeros(4, 3))
        yield from warm("replaced", m, x)
        gc.collect()
        yield "must:old-weight-freed", old() is None
        yield "must:old-storage-freed", storage() is None
        model = weakref.ref(m)
        del m
        gc.collect()
        yield "must:model-freed", model() is None


@eager_twin
def test_lazy_modules_materialise():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        m = nn.Sequential(nn.LazyLinear(4), nn.ReLU(), nn.LazyLinear(2))
    torch.manual_seed(0)
    with torch.no_grad():
        yield "first", m(ramp(2, 3))
        yield from warm("then", m, ramp(2, 3))
        yield "type", type(m[0]).__name__


@eager_twin(served=True)
def test_batch_norm_statistics_and_folding_bait():
    m = fill(nn.Sequential(nn.Conv2d(2, 3, 3, bias=False), nn.BatchNorm2d(3), nn.ReLU())).eval()
    x = ramp(1, 2, 5, 5) * 0.1
    with torch.no_grad():
        yield from warm("start", m, x)
        m[1].running_var.data.mul_(4)
        yield "var", m(x)
        m[1].running_mean.numpy()[:] = 0.5
        yield "mean", m(x)
        m[1].eps = 1.0
        yield "eps", m(x)
        m[1].weight.data = torch.full((3,), 3.0)
        yield "weight", m(x)
        m[0].weight.data = m[0].weight.data.to(memory_format=torch.channels_last)
        yield "channels-last", m(x)
        m[1].track_running_stats = False
        yield "track", m(x)
        m[1].running_mean = m[1].running_var = None
        yield "none", m(x)


@eager_twin(served=True)
def test_recurrent_weights_flattened_and_edited():
    m = fill(nn.LSTM(3, 4, batch_first=True))
    x = ramp(2, 3, 3) * 0.1
    with torch.no_grad():
        yield from warm("start", m, x)
        m.weight_hh_l0.mul_(2)
        yield "edited", m(x)
        m.weight_ih_l0 = nn.Parameter(torch.zeros(16, 3))
        yield "replaced", m(x)
        m.flatten_parameters()
        yield "flattened", m(x)
        m.bias_hh_l0.data.add_(1)
        yield "data", m(x)
        yield "state", m(x, (torch.ones(1, 2, 4), torch.zeros(1, 2, 4)))


@eager_twin(served=True)
def test_embedding_with_max_norm_writes_its_weight():
    m = fill(nn.Embedding(5, 3, max_norm=1.0))
    ids = torch.tensor([0, 4, 2])
    plain = fill(nn.Embedding(5, 3))
    with torch.no_grad():
        for i in range(6):
            yield f"{i}", (m(ids), m.weight)
        m.weight.fill_(3.0)
        yield "refilled", (m(ids), m.weight)
        yield from warm("plain", plain, ids)
        plain.max_norm = 1.0
        yield "max-norm-set", (plain(ids), plain.weight)
