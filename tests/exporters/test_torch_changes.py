"""``kfac_engine.torch.KFAC`` compares its module with the module that it exported."""

import pytest
import torch
from torch import nn

import kfac_engine as ke
from kfac_engine.torch import KFAC


def replace(module, name, part):
    setattr(module, name, part)
    return module


class Branches(nn.Module):
    """A module of every kind of part that can change: frozen, shared, normalized."""

    def __init__(self):
        super().__init__()
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.norm, self.act, self.drop = nn.BatchNorm1d(6), nn.Tanh(), nn.Dropout(0.1)
        self.first = nn.Linear(6, 6, bias=False)
        self.second = nn.Linear(6, 6, bias=False)
        self.second.weight = self.first.weight
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        x = self.drop(self.act(self.norm(self.frozen(x))))
        return self.head(torch.tanh(self.second(torch.tanh(self.first(x)))))


# What changes the function or the parameters of a module, and what the error names.
CHANGES = {
    "unfrozen": (lambda m: m.frozen.requires_grad_(True), r"'frozen\.bias', 'frozen\.weight'"),
    "added layer": (lambda m: m.add_module("late", nn.Linear(3, 3)), "'late' .* was absent"),
    "added parameter": (
        lambda m: m.head.register_parameter("scale", nn.Parameter(torch.ones(3))),
        r"'head\.scale'",
    ),
    "removed layer": (lambda m: replace(m, "act", nn.Identity()), "'act' .* Tanh.*Identity"),
    "other activation": (lambda m: replace(m, "act", nn.ReLU()), "'act' .* Tanh.*ReLU"),
    "removed bias": (lambda m: m.head.register_parameter("bias", None), "'head' .*bias=False"),
    "other size": (lambda m: replace(m, "head", nn.Linear(6, 4)), "'head' "),
    "no longer shared": (
        lambda m: replace(m.second, "weight", nn.Parameter(m.first.weight.detach().clone())),
        r"'first\.weight', 'second\.weight'",
    ),
    "mode of a normalization": (lambda m: m.norm.train(), "'norm' .* evaluation mode.* training"),
    "statistics of a normalization": (lambda m: m.norm.running_mean.add_(1), "'norm' .* stat"),
}
# What changes neither.
HARMLESS = {
    "nothing": lambda m: None,
    "mode of a dropout": lambda m: m.drop.train(),
    "rate of a dropout": lambda m: setattr(m.drop, "p", 0.0),
    "momentum of a normalization": lambda m: setattr(m.norm, "momentum", 0.5),
    "other object": lambda m: setattr(m.head, "weight", nn.Parameter(m.head.weight.detach() + 1)),
}


def branches():
    torch.manual_seed(0)
    module, batch, targets = Branches().eval(), torch.randn(7, 6), torch.randint(0, 3, (7,))
    return module, batch, targets, KFAC(module, batch[:3], loss="categorical")


@pytest.mark.quick
@pytest.mark.parametrize("change", CHANGES)
def test_a_module_that_changed_is_refused_by_name(change):
    apply, words = CHANGES[change]
    module, batch, targets, kfac = branches()
    apply(module)
    before = backward_of_trained(module, batch, targets)
    with pytest.raises(ke.InputError, match=words):
        kfac.step(batch)
    assert kfac.engine.counter == 0
    for name, gradient in before.items():
        torch.testing.assert_close(module.get_parameter(name).grad, gradient, rtol=0, atol=0)


@pytest.mark.quick
@pytest.mark.parametrize("change", HARMLESS)
def test_a_change_without_effect_gives_the_numbers_of_a_new_preconditioner(change):
    module, batch, targets, kfac = branches()
    HARMLESS[change](module)
    found = []
    for made in (kfac, KFAC(module, batch[:3], loss="categorical")):
        torch.manual_seed(1)
        backward_of_trained(module, batch, targets)
        made.step(batch)
        found.append({n: p.grad.clone() for n, p in module.named_parameters() if p.requires_grad})
    for name, gradient in found[0].items():
        torch.testing.assert_close(gradient, found[1][name], rtol=1e-5, atol=1e-6)


def backward_of_trained(module, batch, targets):
    module.zero_grad()
    nn.functional.cross_entropy(module(batch), targets).backward()
    return {n: p.grad.clone() for n, p in module.named_parameters() if p.grad is not None}
