"""Losses and gradients against ``torch.nn.functional``, for every option.

Those of an engine, and those of the file of ``differentiate``.
"""

from itertools import product

import numpy as np
import onnxruntime
import pytest
import torch
from onnx import numpy_helper, parser
from torch import nn
from torch.nn import functional as F

import kfac_engine as ke
from kfac_engine.torch import KFAC

N, D, C, T = 7, 5, 4, 3
RNG = np.random.default_rng(0)
W = RNG.standard_normal((D, C))
X = {(): RNG.standard_normal((N, D)), (T,): RNG.standard_normal((N, T, D))}
CLASS_WEIGHTS = [0.5, 2.0, 1.0, 0.0]


def model(positions):
    axes = "N,T" if positions else "N"
    parsed = parser.parse_model(f"""<ir_version: 8, opset_import: ["": 18]>
        g (double[{axes},{D}] x) => (double[{axes},{C}] y) {{ y = MatMul(x, W) }}""")
    parsed.graph.initializer.append(numpy_helper.from_array(W, "W"))
    return parsed


def torch_gradient(positions, loss):
    weight = torch.tensor(W, requires_grad=True)
    logits = torch.tensor(X[positions]) @ weight
    value = loss(logits.movedim(-1, 1) if positions else logits)
    value.backward()
    return float(value), weight.grad.numpy()


def assert_equal(positions, loss, targets, truth, **options):
    engine = ke.Engine.from_onnx(model(positions), loss=loss, threads=1, **options)
    result = engine.gradients({"x": X[positions]}, targets)
    value, gradient = torch_gradient(positions, truth)
    assert result.loss == pytest.approx(value, rel=1e-9)
    np.testing.assert_allclose(result.gradients["W"], gradient, atol=1e-10)
    found, slope = of_file(positions, loss, targets, **options)
    assert found == pytest.approx(value, rel=1e-9)
    np.testing.assert_allclose(slope, gradient, atol=1e-10)


def of_file(positions, loss, targets, **options):
    """Loss and gradient of the file of ``differentiate``."""
    weighted = isinstance(targets, ke.Weighted)
    feeds = {"targets": targets.targets if weighted else targets}
    if weighted:
        feeds["weights"] = targets.weights
        options["weights"] = "examples"
    classes = loss == "categorical" or isinstance(loss, ke.Categorical)
    options["probabilities"] = classes and feeds["targets"].dtype.kind == "f"
    file = ke.differentiate(model(positions), loss, **options)
    session = onnxruntime.InferenceSession(file.SerializeToString())
    return session.run(["loss", "gradient/W"], {"x": X[positions], **feeds})


OPTIONS = list(product([(), (T,)], ["mean", "sum"], [None, CLASS_WEIGHTS], [0.0, 0.2], [-100, 1]))


@pytest.mark.quick
@pytest.mark.parametrize(("positions", "reduction", "weights", "smoothing", "ignored"), OPTIONS)
def test_classes_are_those_of_cross_entropy(positions, reduction, weights, smoothing, ignored):
    targets = RNG.integers(0, C - 1, (N, *positions))
    targets.ravel()[::4] = ignored
    options = {"ignore_index": ignored, "label_smoothing": smoothing, "reduction": reduction}
    kind = ke.Categorical(ignore_index=ignored, class_weights=weights, label_smoothing=smoothing)
    tensor = None if weights is None else torch.tensor(weights, dtype=torch.double)
    assert_equal(
        positions, kind, targets,
        lambda z: F.cross_entropy(z, torch.tensor(targets), tensor, **options),
        reduction=reduction,
    )  # fmt: skip


@pytest.mark.quick
@pytest.mark.parametrize(
    ("positions", "weights", "smoothing"),
    list(product([(), (T,)], [None, CLASS_WEIGHTS], [0.0, 0.2])),
)
def test_probabilities_are_those_of_cross_entropy(positions, weights, smoothing):
    targets = RNG.dirichlet(np.ones(C), (N, *positions))
    kind = ke.Categorical(class_weights=weights, label_smoothing=smoothing)
    tensor = None if weights is None else torch.tensor(weights, dtype=torch.double)
    moved = torch.tensor(np.moveaxis(targets, -1, 1))
    assert_equal(
        positions, kind, targets,
        lambda z: F.cross_entropy(z, moved, tensor, label_smoothing=smoothing),
    )  # fmt: skip


@pytest.mark.quick
@pytest.mark.parametrize("positive", [None, CLASS_WEIGHTS])
def test_binary_targets_are_those_of_torch_times_the_features(positive):
    targets = RNG.random((N, C)).round()
    tensor = None if positive is None else torch.tensor(positive, dtype=torch.double)
    assert_equal(
        (), ke.MultiBernoulli(positive_weights=positive), targets,
        lambda z: C * F.binary_cross_entropy_with_logits(
            z, torch.tensor(targets), pos_weight=tensor),
    )  # fmt: skip


@pytest.mark.quick
def test_weights_of_examples_are_a_weighted_mean():
    targets, weights = RNG.integers(0, C, N), RNG.random(N)

    def truth(z):
        terms = F.cross_entropy(z, torch.tensor(targets), reduction="none")
        return (terms * torch.tensor(weights)).sum() / weights.sum()

    assert_equal((), "categorical", ke.Weighted(targets, weights), truth)


@pytest.mark.quick
@pytest.mark.parametrize("positions", [(), (T,)])
def test_other_losses_are_those_of_torch_times_the_features(positions):
    targets = RNG.integers(0, 6, (N, *positions, C)).astype(float)
    t = torch.tensor(np.moveaxis(targets, -1, 1) if positions else targets)
    factorials = torch.lgamma(t + 1).mean()
    huber = ke.losses.HuberNegativeLogProbLoss("y", 1.5).log_normalizer
    cases = [
        (ke.L1(), lambda z: F.l1_loss(z, t) + np.log(2)),
        (ke.L1(scale=2), lambda z: F.l1_loss(z, t) / 2 + np.log(4)),
        (ke.Huber(delta=1.5), lambda z: F.huber_loss(z, t, delta=1.5) + huber),
        (ke.Normal(), lambda z: F.mse_loss(z, t) + 0.5 * np.log(np.pi)),
        (ke.Poisson(), lambda z: F.poisson_nll_loss(z, t) + factorials),
    ]
    for loss, truth in cases:
        assert_equal(positions, loss, targets, lambda z, of=truth: C * of(z))


CRITERIA = {
    "ignored": nn.CrossEntropyLoss(ignore_index=1),
    "weights": nn.CrossEntropyLoss(weight=torch.tensor([0.5, 2.0, 1.0])),
    "smoothing": nn.CrossEntropyLoss(label_smoothing=0.1, reduction="sum"),
    "binary": nn.BCEWithLogitsLoss(pos_weight=torch.tensor([1.0, 2.0, 3.0])),
    "squares": nn.MSELoss(),
}


@pytest.mark.quick
@pytest.mark.parametrize("criterion", CRITERIA.values(), ids=CRITERIA)
def test_a_criterion_is_taken_as_it_is(criterion):
    torch.manual_seed(0)
    module, batch = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3)), torch.randn(8, 5)
    classes = isinstance(criterion, nn.CrossEntropyLoss)
    targets = torch.randint(0, 3, (8,)) if classes else torch.rand(8, 3).round()
    kfac = KFAC(module, batch, loss=criterion, kl_clip=None)
    loss = criterion(module(batch), targets)
    loss.backward()
    names = kfac.engine.parameters
    kfac.engine.set_parameters(kfac.matches.to_engine(dict(module.named_parameters())))
    (name,) = kfac._inputs
    result = kfac.engine.gradients({name: batch}, targets)
    expected = kfac.matches.to_engine({n: p.grad for n, p in module.named_parameters()})
    constant = 0.5 * np.log(np.pi) if isinstance(criterion, nn.MSELoss) else 0
    assert result.loss == pytest.approx(float(loss) + constant, rel=1e-5)
    for key in names:
        np.testing.assert_allclose(result.gradients[key], expected[key], atol=1e-5)
    kfac.step(batch, targets)


@pytest.mark.quick
@pytest.mark.parametrize(
    "criterion",
    [nn.CTCLoss(), nn.CrossEntropyLoss(reduction="none"),
     nn.BCEWithLogitsLoss(weight=torch.ones(3))],
)  # fmt: skip
def test_other_criteria_are_refused_by_name(criterion):
    module = nn.Linear(5, 3)
    with pytest.raises(ke.UnsupportedError, match=type(criterion).__name__ + "|reduction='none'"):
        KFAC(module, torch.randn(8, 5), loss=criterion)


@pytest.mark.quick
def test_weights_of_binary_targets_are_those_of_weighted_targets():
    """What the refusal of `BCEWithLogitsLoss(weight=…)` recommends is its loss and gradient."""
    torch.manual_seed(0)
    module, batch, targets = nn.Linear(5, 3), torch.randn(8, 5), torch.rand(8, 3).round()
    weight = torch.rand(8, 3)
    loss = nn.BCEWithLogitsLoss(weight=weight)(module(batch), targets)
    loss.backward()
    kfac = KFAC(module, batch, loss=ke.MultiBernoulli(weight=1 / 3), reduction="batch_mean")
    (name,) = kfac._inputs
    found = kfac.engine.gradients({name: batch}, ke.Weighted(targets, weight))
    expected = kfac.matches.to_engine({n: p.grad for n, p in module.named_parameters()})
    assert found.loss == pytest.approx(loss.item(), rel=1e-5)
    for key, gradient in found.gradients.items():
        np.testing.assert_allclose(gradient, expected[key], atol=1e-6)
    kfac.step(batch, ke.Weighted(targets, weight))
