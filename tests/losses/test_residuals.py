"""Residuals and spreads of targets: they see what the loss sees, and parts add up to the batch."""

import numpy as np
import pytest

import kfac_engine as ke
from kfac_engine.losses.base import RegisteredLoss, weights_of
from kfac_engine.losses.objective import BatchSize, Objective, Residuals

N, D = 12, 3
RNG = np.random.default_rng(0)
Z = RNG.standard_normal((N, D))
MEANS = 3 * RNG.standard_normal((N, D)) + [5.0, -1000.0, 0.1]
BITS, COUNTS = RNG.integers(0, 2, (N, D)).astype(float), RNG.integers(0, 9, (N, D)).astype(float)
IDS = RNG.integers(0, D, N)
LOSSES = {
    "normal": (ke.Normal(), MEANS),
    "other variance": (ke.Normal(var=7.0), MEANS),
    "ignored means": (ke.Normal(ignore_index=-1), np.where(BITS > 0, MEANS, -1.0)),
    "l1": (ke.L1(), MEANS),
    "huber": (ke.Huber(), MEANS),
    "poisson": (ke.Poisson(), COUNTS),
    "bits": (ke.MultiBernoulli(), BITS),
    "positive weights": (ke.MultiBernoulli(positive_weights=[1.0, 3.0, 0.5]), BITS),
    "classes": (ke.Categorical(), np.where(IDS > 1, IDS, -100)),
    "class weights": (ke.Categorical(class_weights=[1.0, 3.0, 0.5]), IDS),
}
# Weights of the examples, and of single targets.
OF_EXAMPLES = np.where(np.arange(N) % 4 == 0, 0.0, RNG.integers(1, 4, N))
OF_TARGETS = np.where(COUNTS > 5, 0.0, RNG.random((N, D)))
KINDS = {
    "none": lambda t: None,
    "examples": lambda t: OF_EXAMPLES,
    "mask": lambda t: OF_EXAMPLES > 0,
    "targets": lambda t: OF_TARGETS if t.ndim > 1 else OF_EXAMPLES,
}
HALF = np.arange(N) < N // 2
every_loss = pytest.mark.parametrize("loss", LOSSES)
every_kind = pytest.mark.parametrize("kind", KINDS)


def residuals_of(loss, *parts):
    """Residuals of parts of (predictions, targets, weights)."""
    term = loss.on("z", targets="t")
    objective, residuals = Objective((RegisteredLoss("loss", term),), "sum"), Residuals()
    for z, t, w in parts:
        values = {"z": z, "t": t} | ({} if w is None else {weights_of("t"): w})
        seen = objective.observe(values).within(BatchSize(1, (1.0,)))
        objective.value_and_cotangents(values, 1.0, seen, residuals)
    return residuals


def measured(loss, *parts):
    """Size, spread, and noise without the factor of unequal weights."""
    residuals = residuals_of(loss, *parts)
    noise = residuals.noise() / residuals.unevenness() if residuals.spreads() else 0.0
    return np.array([residuals.size(), residuals.spreads().get("z", 0.0), noise], float)


def case(loss, kind):
    loss, targets = LOSSES[loss]
    return loss, targets, KINDS[kind](targets)


def at(array, selection):
    return None if array is None else array[selection]


@every_kind
def test_kept_errors_have_the_squares_of_the_residuals(kind):
    """Closed form: errors by the variance and times the roots of their weights."""
    term, w = ke.Normal(var=0.5).on("z", targets="t"), KINDS[kind](MEANS)
    objective, residuals = Objective((RegisteredLoss("loss", term),), "sum"), Residuals(errors=[])
    values = {"z": Z, "t": MEANS} | ({} if w is None else {weights_of("t"): w})
    objective.value_and_cotangents(values, 1.0, objective.observe(values), residuals)
    full = 1.0 if w is None else np.sqrt(w.reshape(N, -1))
    np.testing.assert_allclose(residuals.errors, [full * (Z - MEANS) / 0.5], atol=1e-12)


@every_kind
def test_targets_of_an_example_are_those_that_count(kind):
    """Brute force: a class counts 1 − 1/3, whatever its weight; ignored ones are none."""
    ids = np.where(RNG.random((N, 7)) < 0.2, -100, RNG.integers(0, D, (N, 7)))
    z, w = RNG.standard_normal((N, 7, D)), KINDS[kind](IDS)
    residuals = residuals_of(ke.Categorical(), *((z[i], ids[i], at(w, i)) for i in (HALF, ~HALF)))
    counted = sum((ids[i] >= 0).sum() for i in range(N) if w is None or w[i] > 0)
    assert residuals.targets_of_example(N) == pytest.approx(counted * (1 - 1 / D) / N)
    assert residuals.targets_of_example(1000 * N) == 1


def test_targets_of_several_losses_are_those_of_the_loss_with_most():
    """Two texts an example, of five and three characters: a class counts 1 − 1/3."""
    names = {"five": 5, "three": 3}
    losses = [RegisteredLoss(k, ke.Categorical().on(k, targets=f"{k} targets")) for k in names]
    objective, residuals = Objective(tuple(losses), "mean"), Residuals()
    values = {k: RNG.standard_normal((N, length, D)) for k, length in names.items()}
    values |= {f"{k} targets": RNG.integers(0, D, (N, n)) for k, n in names.items()}
    objective.value_and_cotangents(values, 1.0, objective.observe(values), residuals)
    assert residuals.targets_of_example(N) == pytest.approx(5 * (1 - 1 / D))


@every_kind
@pytest.mark.parametrize("var", [0.5, 7.0])
def test_residuals_of_means_are_relative_to_the_deviations_that_count(var, kind):
    """Closed form: squared errors and squared deviations from the mean of each feature."""
    w = KINDS[kind](MEANS)
    full = np.ones((N, D)) if w is None else np.broadcast_to(w.reshape(N, -1), (N, D)) * 1.0
    mean = (full * MEANS).sum(axis=0) / full.sum(axis=0)
    squares, deviations = ((full * (MEANS - p) ** 2).sum() for p in (Z, mean))
    found = measured(ke.Normal(var=var), (Z, MEANS, w))
    spread = np.sqrt(max(squares, deviations) / full.sum())
    noise = min(squares, deviations) / full.sum() / var
    np.testing.assert_allclose(found, [np.sqrt(squares / deviations), spread, noise], rtol=1e-9)


@pytest.mark.parametrize("value", [0.1, -1e6])
@pytest.mark.parametrize("parts", [1, 3, N])
def test_equal_targets_have_no_spread(value, parts):
    """Their mean may be off by rounding. The Fisher information of the predictions takes over."""
    pieces = [(z, np.full_like(z, value), None) for z in np.split(Z, parts)]
    size = np.sqrt((((Z - value) / 0.5) ** 2).sum() / (N * D / 0.5))
    assert measured(ke.Normal(), *pieces)[0] == pytest.approx(size, rel=1e-9)


@every_kind
@every_loss
@pytest.mark.parametrize("order", ["random", "sorted"])
def test_parts_add_up_to_the_batch(loss, kind, order):
    loss, t, w = case(loss, kind)
    rows = np.argsort(t.reshape(N, -1)[:, 0]) if order == "sorted" else np.arange(N)
    whole = measured(loss, (Z, t, w))
    for parts in (2, 3, N):
        pieces = [(Z[i], t[i], at(w, i)) for i in np.split(rows, parts)]
        np.testing.assert_allclose(measured(loss, *pieces), whole, rtol=1e-9)
        factors = [residuals_of(loss, *p).unevenness() for p in ([(Z, t, w)], pieces)]
        assert factors[1] == pytest.approx(factors[0], rel=1e-9)


FEW = np.where(np.arange(N) < 2, 5.0, 1.0)


@pytest.mark.parametrize(
    ("weights", "squares", "factor"),
    [
        pytest.param(np.full(N, 7.0), 1.0, 1.0, id="equal"),
        pytest.param(OF_EXAMPLES > 0, 1.0, 1.0, id="mask"),
        pytest.param(0.3 * (OF_EXAMPLES > 0), 1.0, 1.0, id="mask of numbers"),
        pytest.param(FEW, 1.0, (60 / 20) * (12 / 20), id="few examples with weight"),
        pytest.param(FEW, 1 / FEW, 1.0, id="inverse variances"),
        pytest.param(FEW, FEW == 1, 12 / 20, id="errors of little weight"),
    ],
)
def test_unequal_weights_raise_the_noise(weights, squares, factor):
    """Closed form: two examples of twelve have the weight 5."""
    errors = np.sqrt(squares * np.ones(N))[:, None]
    residuals = residuals_of(ke.Normal(), (MEANS + errors, MEANS, weights))
    assert residuals.unevenness() == pytest.approx(factor, rel=1e-9)
    mean = (weights * squares).sum() / weights.sum()
    assert residuals.noise() == pytest.approx(factor * mean / 0.5, rel=1e-9)


@every_kind
@every_loss
def test_what_does_not_count_is_not_read(loss, kind):
    loss, t, w = case(loss, kind)
    if w is None:
        return
    left_out = (w if w.ndim == t.ndim else w.reshape(N, *[1] * (t.ndim - 1))) == 0
    expected = measured(loss, (Z, t, w))
    possible = [1, 0] if t is not MEANS else [5.0, 1e3, -1e6, np.nan]
    for value in possible:
        changed = np.where(left_out, value, t).astype(t.dtype)
        np.testing.assert_array_equal(measured(loss, (Z, changed, w)), expected)


@every_loss
def test_a_weight_is_a_number_of_copies(loss):
    loss, t, w = case(loss, "examples")
    copies = np.repeat(np.arange(N), OF_EXAMPLES.astype(int))
    copied = measured(loss, (Z[copies], t[copies], None))
    np.testing.assert_allclose(measured(loss, (Z, t, w)), copied, rtol=1e-9)


def test_ids_that_do_not_count_are_absent():
    ids = np.where(IDS > 1, IDS, -100)
    kept = ids >= 0
    absent = measured(ke.Categorical(), (Z[kept], ids[kept], None))
    np.testing.assert_allclose(measured(ke.Categorical(), (Z, ids, None)), absent, rtol=1e-12)


@every_loss
def test_a_part_in_which_nothing_counts_adds_nothing(loss):
    loss, t, _ = case(loss, "none")
    nothing = (Z[:5], t[:5], np.zeros(5))
    whole = measured(loss, (Z, t, None))
    for parts in ([(Z, t, None), nothing], [nothing, (Z, t, None)]):
        np.testing.assert_allclose(measured(loss, *parts), whole, rtol=1e-12)


def test_parts_may_differ_in_the_number_of_features():
    """Sequences of several lengths: positions that a part lacks count as features of others."""
    short, long = Z[:5, :2], Z[5:]
    parts = [(short, MEANS[:5, :2], None), (long, MEANS[5:], None)]
    w = np.ones((N, D))
    w[:5, 2] = 0
    np.testing.assert_allclose(
        measured(ke.Normal(), *parts), measured(ke.Normal(), (Z, MEANS, w)), rtol=1e-9
    )


@every_kind
def test_an_output_of_one_number_is_one_feature(kind):
    w = at(KINDS[kind](IDS), slice(None))
    z, t = Z[:, 0], MEANS[:, 0]
    column = measured(ke.Normal(), (z[:, None], t[:, None], w))
    np.testing.assert_allclose(measured(ke.Normal(), (z, t, w)), column, rtol=1e-12)


def test_two_losses_on_one_output_have_sums_of_their_own():
    """Closed form: the squares of all losses together."""
    kinds = (ke.Normal(), ke.MultiBernoulli(), ke.Normal(var=7.0))
    terms = [loss.on("z", targets="t") for loss in kinds]
    losses = tuple(RegisteredLoss(str(i), term) for i, term in enumerate(terms))
    residuals = Residuals()
    Objective(losses, "sum").value_and_cotangents({"z": Z, "t": BITS}, residuals=residuals)
    errors, deviations = ((BITS - p) ** 2 for p in (Z, BITS.mean(axis=0)))
    both, of_bits = 1 / 0.5**2 + 1 / 7.0**2, ((1 / (1 + np.exp(-Z)) - BITS) ** 2).sum()
    ratio = (both * errors.sum() + of_bits) / (both * deviations.sum() + N * D / 4)
    assert residuals.size() == pytest.approx(ratio**0.5, rel=1e-9)


@every_kind
@pytest.mark.parametrize("outlier", [0.0, 1e6])
@pytest.mark.parametrize("delta", [None, 1.0, 0.3])
def test_other_errors_have_the_unit_of_the_targets(delta, outlier, kind):
    """Closed form: squared errors, and products with gradients; outliers leave the unit at 1."""
    targets, w = MEANS.copy(), KINDS[kind](MEANS)
    targets[np.argmax((OF_EXAMPLES > 0) & (OF_TARGETS[:, 1] > 0)), 1] += outlier
    full = np.ones((N, D)) if w is None else np.broadcast_to(w.reshape(N, -1), (N, D)) * 1.0
    errors, total = Z - targets, full.sum()
    means = (full * targets).sum(axis=0) / full.sum(axis=0)
    squares, deviations = ((full * e**2).sum() for e in (errors, targets - means))
    loss = ke.L1() if delta is None else ke.Huber(delta=delta)
    gradients = np.sign(errors) if delta is None else np.clip(errors, -delta, delta)
    size = np.sqrt(squares / deviations)
    if outlier:
        expected = [size, 1.0, 1.0]
    else:
        noise = (full * errors * gradients).sum() / total * min(1.0, 1 / size)
        expected = [size, np.sqrt(max(squares, deviations) / total), noise]
    np.testing.assert_allclose(measured(loss, (Z, targets, w)), expected, rtol=1e-9)
