"""``kfac_engine.torch.KFAC`` and ``match_parameters`` against torch's autograd."""

import copy
from pathlib import Path

import numpy as np
import pytest
import torch
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
    with pytest.raises(ke.InputError, match="1 inputs in the file, got 2"):
        kfac.step((batch, batch))
    module[0].weight.grad[0, 0] = float("nan")
    with pytest.raises(ke.NonFiniteError, match=r"0\.weight"):
        kfac.step(batch)
    torch.testing.assert_close(module[2].weight.grad, before["2.weight"], rtol=0, atol=0)


@pytest.mark.quick
def test_unused_parameters_are_refused_by_name(tmp_path: Path):
    module, batch, _ = create("mlp")
    module.register_parameter("unused", nn.Parameter(torch.ones(2)))
    with pytest.raises(ke.InputError, match="no parameter for 'unused'"):
        KFAC(module, batch[:3], loss="categorical")
