"""``kfac_engine.torch.KFAC`` and ``match_parameters`` against torch's autograd."""

import contextlib
import copy

import numpy as np
import pytest
import torch
import torch.distributed
from torch import nn

import kfac_engine as ke
from kfac_engine.torch import KFAC
from tests.exporters.ordinary import MODULES, create, gradients, perturb, write

# Rounding of a batch of 7 in float32; a wrong layout or pair differs by more than 0.1.
TOLERANCE = 1e-4


@pytest.fixture(scope="module", params=list(MODULES))
def case(request, tmp_path_factory):
    """A module, its batch, and its export with ``optimize=False``."""
    module, batch, targets = create(request.param)
    path = write(module, batch, "plain", tmp_path_factory.mktemp("plain") / "model.onnx")
    return request.param, module, batch, targets, path


def backward(module, batch, targets):
    module.zero_grad()
    nn.functional.cross_entropy(module(batch), targets).backward()
    return {name: p.grad.clone() for name, p in module.named_parameters()}


@pytest.mark.quick
def test_gradients_of_a_trained_module_equal_autograd(case):
    _, module, batch, targets, path = case
    moved = perturb(module)
    moved.load_state_dict({**moved.state_dict(), **dict(module.named_buffers())})
    engine = ke.Engine.from_onnx(path, loss="categorical")
    matches = ke.match_parameters(engine, moved.state_dict())
    parameters = dict(moved.named_parameters())
    engine.set_parameters(matches.to_engine(parameters))  # tensors that require gradients
    found = matches.to_module(engine.gradients({"x": batch}, targets).gradients)
    for name, truth in gradients(moved, batch, targets).items():
        difference = torch.from_dlpack(found[name]).double() - torch.from_numpy(truth)
        assert abs(difference).max() <= TOLERANCE * max(abs(truth).max(), 1e-3), name


@pytest.mark.quick
def test_step_replaces_gradients_by_those_of_the_engine(case):
    _, module, batch, targets, path = case
    module = copy.deepcopy(module)
    kfac = KFAC(module, batch[:3], loss="categorical", kl_clip=None, model=path, seed=5)
    engine = ke.Engine.from_onnx(path, loss="categorical", seed=5)
    before = backward(module, batch, targets)
    pointers = {name: p.grad.data_ptr() for name, p in module.named_parameters()}
    assert kfac.step(batch) == 1.0
    engine.observe({"x": batch})
    file_names = engine.parameters
    names = {n: next(f for f, o in kfac.matches.layouts.items() if n in o.names) for n in before}
    assert {*names.values()} == {*file_names}
    natural = engine.precondition({names[n]: g for n, g in before.items()})
    for name, parameter in module.named_parameters():
        assert parameter.grad.data_ptr() == pointers[name]
        np.testing.assert_array_equal(parameter.grad.numpy(), natural[names[name]])


def test_step_of_parts_is_that_of_the_whole_batch(case):
    """Several calls of ``backward`` add up gradients, and ``step`` takes all their inputs."""
    _, module, batch, targets, path = case
    if any(isinstance(m, nn.modules.batchnorm._BatchNorm) and m.training for m in module.modules()):
        pytest.skip("a part is normalized by its own statistics")
    module, options = copy.deepcopy(module), {"loss": "categorical", "model": path, "seed": 5}
    parts = [(batch[:3], targets[:3]), (batch[3:], targets[3:])]
    whole = KFAC(module, batch[:3], **options)
    backward(module, batch, targets)
    whole.step(batch, targets)
    expected = {name: p.grad.clone() for name, p in module.named_parameters()}
    kfac = KFAC(module, batch[:3], **options)
    module.zero_grad()
    for inputs, labels in parts:
        share = len(labels) / len(targets)
        (share * nn.functional.cross_entropy(module(inputs), labels)).backward()
    kfac.step(parts)
    for name, parameter in module.named_parameters():
        atol = 1e-3 * float(abs(expected[name]).max())
        np.testing.assert_allclose(parameter.grad, expected[name], rtol=1e-3, atol=atol)
    with pytest.raises(ke.InputError, match="leave targets out"):
        kfac.step(parts, targets)
    with pytest.raises(ke.InputError, match="a pair"):
        kfac.step([(batch, targets, 1)])


@pytest.mark.quick
def test_module_is_exported_without_a_file_and_keeps_its_modes():
    module, batch, targets = create("cnn")
    module.train()
    module[1].eval()
    modes = [part.training for part in module.modules()]
    kfac = KFAC(module, batch[:3], loss="categorical")
    assert [part.training for part in module.modules()] == modes
    assert kfac.engine.buffers  # training form: a normalization is in training mode
    assert kfac.engine.parameters.keys() == dict(module.named_parameters()).keys()
    losses = []
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    for _ in range(30):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(module(batch), targets)
        loss.backward()
        assert 0 < kfac.step(batch) <= 1
        optimizer.step()
        losses.append(float(loss))
    assert losses[-1] < losses[0] / 2


@pytest.mark.quick
def test_training_form_has_the_gradients_of_torch_in_training_mode(tmp_path):
    module, batch, targets = create("cnn")
    path = write(module, batch, "plain", tmp_path / "cnn.onnx")
    engine = ke.Engine.from_onnx(path, loss="categorical", train_form=True)
    matches = ke.match_parameters(engine, module.state_dict())
    found = matches.to_module(engine.gradients({"x": batch}, targets).gradients)
    for name, truth in gradients(module.train(), batch, targets).items():
        if name != "0.bias":  # its gradient is zero: the normalization subtracts the bias
            np.testing.assert_allclose(found[name], truth, atol=1e-3 * abs(truth).max(), rtol=0)


@pytest.mark.quick
def test_kl_clip_bounds_the_product_of_gradient_and_step(case):
    _, module, batch, targets, path = case
    module = copy.deepcopy(module)
    kfac = KFAC(module, batch[:3], loss="categorical", kl_clip=1e-4, model=path)
    before = backward(module, batch, targets)
    scale = kfac.step(batch)
    product = sum(
        float((p.grad.double() / scale * before[n].double()).sum())
        for n, p in module.named_parameters()
    )
    assert scale**2 * product <= 1e-4 * (1 + 1e-4)


@pytest.mark.quick
@pytest.mark.parametrize(
    ("name", "how", "words"),
    [
        ("cnn", "legacy", "folded a normalization into 'onnx::Conv"),
        ("cnn", "dynamo", r"folded a normalization into '0\.weight'"),
        ("encoder", "legacy", r"merged .*layers\.1\."),
        ("encoder", "dynamo", r"merged .*layers\.1\."),
        ("lstm", "legacy", "'onnx::LSTM_"),
    ],
)
def test_changed_parameters_are_refused_by_name(name, how, words, tmp_path):
    module, batch, _ = create(name)
    path = write(module, batch, how, tmp_path / "model.onnx")
    with pytest.raises(ke.InputError, match=words):
        KFAC(module, batch[:3], loss="categorical", model=path)


@pytest.mark.quick
def test_frozen_parameters_keep_no_gradient_and_others_are_preconditioned():
    module, batch, targets = create("mlp")
    module[0].requires_grad_(False)
    kfac = KFAC(module, batch[:3], loss="categorical")
    assert kfac.engine.parameters.keys() == {"2.weight", "2.bias"}
    nn.functional.cross_entropy(module(batch), targets).backward()
    kfac.step(batch)
    assert module[0].weight.grad is None


@pytest.mark.quick
def test_step_refuses_missing_gradients_and_wrong_inputs():
    module, batch, targets = create("mlp")
    kfac = KFAC(module, batch[:3], loss="categorical")
    with pytest.raises(ke.InputError, match=r"call loss\.backward"):
        kfac.step(batch)
    before = backward(module, batch, targets)
    with pytest.raises(ke.InputError, match="the file has 1 inputs of the module, got 2"):
        kfac.step((batch, batch))
    for wrong in (None, 5, "x", {"x": batch}, [None]):
        with pytest.raises(ke.InputError, match="must be a tensor"):
            kfac.step(wrong)
        with pytest.raises(ke.InputError, match="must be a tensor"):
            KFAC(module, wrong, loss="categorical")
    for wrong in (0, -1.0, "x"):
        with pytest.raises(ke.InputError, match="kl_clip"):
            KFAC(module, batch[:3], loss="categorical", kl_clip=wrong)
    module[0].weight.grad[0, 0] = float("nan")
    with pytest.raises(ke.NonFiniteError, match=r"0\.weight"):
        kfac.step(batch)
    torch.testing.assert_close(module[2].weight.grad, before["2.weight"], rtol=0, atol=0)
    assert kfac.engine.counter == 0


def replace(module, name, part):
    setattr(module, name, part)
    return module


@pytest.mark.quick
def test_a_gradient_whose_elements_share_memory_is_replaced():
    module, batch, targets = create("mlp")
    found = []
    for convert in (torch.clone, lambda gradient: gradient):
        backward(module, batch, targets)
        module[2].bias.grad = convert(torch.ones(1).expand(3))
        kfac = KFAC(module, batch[:3], loss="categorical", seed=3)
        kfac.step(batch)
        found.append({n: p.grad.clone() for n, p in module.named_parameters()})
    for name, gradient in found[0].items():
        torch.testing.assert_close(gradient, found[1][name], rtol=0, atol=0)


@pytest.mark.quick
def test_sparse_gradient_is_refused_by_name():
    torch.manual_seed(0)
    module = nn.Sequential(nn.Embedding(9, 4, sparse=True), nn.Flatten(), nn.Linear(8, 3))
    batch, targets = torch.randint(0, 9, (7, 2)), torch.randint(0, 3, (7,))
    kfac = KFAC(module, batch[:3], loss="categorical")
    before = backward(module, batch, targets)
    with pytest.raises(ke.InputError, match=r"'0\.weight' is sparse"):
        kfac.step(batch)
    torch.testing.assert_close(module[2].weight.grad, before["2.weight"], rtol=0, atol=0)


@pytest.mark.quick
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["mlp", "cnn", "tied"])
def test_half_precision_has_the_natural_gradients_of_float32(name, dtype):
    module, batch, targets = create(name)
    module = module.to(dtype)  # weights that both types hold
    wide = copy.deepcopy(module).float()
    narrow = batch.to(dtype) if batch.is_floating_point() else batch
    before = backward(wide, narrow.float() if batch.is_floating_point() else batch, targets)
    for parameter, gradient in zip(module.parameters(), before.values(), strict=True):
        parameter.grad = gradient.to(dtype)
    for own, other in zip(module.parameters(), wide.parameters(), strict=True):
        other.grad = own.grad.float()
    options = {"loss": "categorical", "damping": 0.1, "seed": 1}
    for made, inputs in ((module, narrow), (wide, narrow.to(batch.dtype))):
        KFAC(made, inputs[:3], **options).step(inputs)
    for own, other in zip(module.parameters(), wide.parameters(), strict=True):
        assert own.grad.dtype == dtype
        close = {"rtol": 2 * torch.finfo(dtype).eps, "atol": 1e-4 * float(abs(other.grad).max())}
        torch.testing.assert_close(own.grad.float(), other.grad, **close)


@pytest.mark.quick
def test_natural_gradient_beyond_its_element_type_changes_no_gradient():
    module, batch, _ = create("mlp")
    module, batch = module.half(), batch.half()
    kfac = KFAC(module, batch[:3], loss="categorical", kl_clip=None, damping=1e-4)
    for parameter in module.parameters():
        parameter.grad = torch.full_like(parameter, 3e4)
    with pytest.raises(ke.NonFiniteError, match="exceeds the range of its element type"):
        kfac.step(batch)
    assert all((p.grad == 3e4).all() for p in module.parameters())


@contextlib.contextmanager
def lone_process(folder):
    """Open a process group of one process."""
    address = f"file://{folder / 'store'}"
    torch.distributed.init_process_group("gloo", init_method=address, rank=0, world_size=1)
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


WRAPPERS = {
    "compile": lambda m: torch.compile(m, backend="eager"),
    "compiled part": lambda m: replace(m, "0", torch.compile(m[0], backend="eager")),
    "DataParallel": nn.DataParallel,
    "DistributedDataParallel": nn.parallel.DistributedDataParallel,
    "two": lambda m: torch.compile(nn.DataParallel(m), backend="eager"),
}


@pytest.mark.quick
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_wrapped_module_has_the_natural_gradients_of_the_module(wrapper, tmp_path):
    with lone_process(tmp_path):
        module, batch, targets = create("mlp")
        wrapped = WRAPPERS[wrapper](copy.deepcopy(module))
        for made in (module, wrapped):
            backward(made, batch, targets)
            KFAC(made, batch[:3], loss="categorical", seed=2).step(batch)
        for own, other in zip(wrapped.parameters(), module.parameters(), strict=True):
            torch.testing.assert_close(own.grad, other.grad, rtol=0, atol=0)


@pytest.mark.quick
def test_several_processes_need_a_communicator(tmp_path, monkeypatch):
    with lone_process(tmp_path):
        module, batch, _ = create("mlp")
        wrapped = nn.parallel.DistributedDataParallel(module)
        monkeypatch.setattr(type(wrapped.process_group), "size", lambda group: 2)
        with pytest.raises(ke.InputError, match=r"2 processes .* pass communicator="):
            KFAC(wrapped, batch[:3], loss="categorical")


class Undecided(nn.Module):
    """A module that torch cannot export."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        return self.head(x) if x.sum() > 0 else -self.head(x)


@pytest.mark.quick
def test_errors_of_the_exporter_are_one_line():
    batch = torch.randn(3, 6)
    with pytest.raises(ke.InputError, match=r"torch cannot export .*model=\.$") as failure:
        KFAC(Undecided(), batch, loss="categorical")
    assert len(str(failure.value).splitlines()) == 1
    with pytest.raises(ke.InputError, match="a module of torch is needed, got function"):
        KFAC(lambda x: x, batch, loss="categorical")
    with pytest.raises(ke.InputError, match=r"^torch cannot export .* Give a batch of examples as"):
        KFAC(nn.Linear(6, 3), batch[0], loss="categorical")
    with pytest.raises(ke.InputError, match=r"give CrossEntropyLoss\(\), not the class itself"):
        KFAC(nn.Linear(6, 3), batch, loss=nn.CrossEntropyLoss)


def scaled_step(module, batch, targets, kfac, loop, *, unscale=False, **options):
    """Return the parameters after a step of a loop with a gradient scaler, and the factor."""
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    module.zero_grad()
    loop.scale(nn.functional.cross_entropy(module(batch), targets)).backward()
    if unscale:
        loop.unscale_(optimizer)
    factor = kfac.step(batch, **options)
    loop.step(optimizer)
    loop.update()
    return [p.detach().clone() for p in module.parameters()], factor


@pytest.mark.quick
@pytest.mark.parametrize("way", ["scaler", "unscale"])
@pytest.mark.parametrize("kl_clip", [1e-4, None])
def test_a_gradient_scaler_does_not_change_the_update(way, kl_clip):
    found = []
    for scale in (1.0, 65536.0):
        module, batch, targets = create("mlp")
        kfac = KFAC(module, batch[:3], loss="categorical", kl_clip=kl_clip, seed=4)
        scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        options = {"scaler": scaler} if way == "scaler" else {"unscale": True}
        found.append(scaled_step(module, batch, targets, kfac, scaler, **options))
    assert found[0][1] == pytest.approx(found[1][1], rel=1e-5)
    assert found[0][1] < 1 or kl_clip is None
    for own, other in zip(*(parameters for parameters, _ in found), strict=True):
        torch.testing.assert_close(own, other, rtol=1e-5, atol=1e-6)


@pytest.mark.quick
def test_scaled_gradients_are_refused_where_the_scaler_is_not_given():
    module, batch, targets = create("mlp")
    kfac = KFAC(module, batch[:3], loss="categorical")
    scaler = torch.amp.GradScaler("cpu")
    with pytest.raises(ke.InputError, match=r"call step\(inputs, scaler=scaler\)"):
        scaled_step(module, batch, targets, kfac, scaler)
    with pytest.raises(ke.InputError, match="scaler must be a GradScaler, got float"):
        kfac.step(batch, scaler=65536.0)
    with pytest.raises(ke.InputError, match="call step without scaler="):
        scaled_step(module, batch, targets, kfac, scaler, unscale=True, scaler=scaler)


@pytest.mark.quick
def test_overflow_of_scaled_gradients_skips_the_step():
    module, batch, targets = create("mlp")
    kfac = KFAC(module, batch[:3], loss="categorical")
    before = [p.detach().clone() for p in module.parameters()]
    scaler = torch.amp.GradScaler("cpu")
    module[0].weight.register_hook(lambda gradient: gradient * float("inf"))
    after, factor = scaled_step(module, batch, targets, kfac, scaler, scaler=scaler)
    assert factor == 0
    assert kfac.engine.counter == 0
    assert scaler.get_scale() < 65536
    for old, new in zip(before, after, strict=True):
        torch.testing.assert_close(old, new, rtol=0, atol=0)


@pytest.mark.quick
def test_unused_parameters_are_refused_by_name(tmp_path):
    module, batch, _ = create("mlp")
    module.register_parameter("unused", nn.Parameter(torch.ones(2)))
    with pytest.raises(ke.InputError, match="no parameter for 'unused'"):
        KFAC(module, batch[:3], loss="categorical")


class Texts(nn.Module):
    """A classifier of texts of any length."""

    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(20, 6), nn.Linear(6, 3)

    def forward(self, ids):
        return self.head(torch.tanh(self.table(ids)).mean(1))


@pytest.mark.quick
def test_another_length_of_texts_needs_dynamic_shapes():
    torch.manual_seed(0)
    module, sample = Texts(), torch.randint(0, 20, (4, 8))
    fixed = KFAC(module, sample, loss="categorical")
    longer = torch.randint(0, 20, (5, 11))
    backward(module, longer, torch.zeros(5, dtype=torch.long))
    with pytest.raises(ke.ShapeError, match=r"size 11 on axis 1, .* had 8; .* dynamic_shapes"):
        fixed.step(longer)
    free = {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC}
    kfac = KFAC(module, sample, loss="categorical", dynamic_shapes=(free,), kl_clip=None, seed=1)
    for length in (8, 11, 5):
        ids, targets = torch.randint(0, 20, (5, length)), torch.arange(5) % 3
        backward(module, ids, targets)
        kfac.step(ids)
        assert all(p.grad.isfinite().all() for p in module.parameters() if p.grad is not None)
    predicted = kfac.engine.predict(ids.numpy())
    np.testing.assert_allclose(predicted, module(ids).detach(), atol=1e-5)
    with pytest.raises(ke.InputError, match="leave model= or dynamic_shapes out"):
        KFAC(module, sample, loss="categorical", model="m.onnx", dynamic_shapes=(free,))
