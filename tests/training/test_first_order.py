"""First-order optimizers against their published formulas, written again in float64."""

import numpy as np
import pytest

import kfac_engine as ke
from kfac_engine.training import rules, vectors
from kfac_engine.training.fit import OPTIMIZERS as BY_NAME
from tests import models
from tests.engine.test_buffers import normalised
from tests.graph.analysis.test_ties import BATCH, WIDTH, network
from tests.training import softmax_net as net
from tests.training.layout_pairs import by_svd

# Float64 sums of some ten products of size one; Newton–Schulz iterations multiply rounding errors.
EXACT = 1e-12
STEPS = 6


# -- the formulas again, one parameter at a time ---------------------------------------------------


def sgd(theta, grads, rates, *, momentum=0.9, nesterov=False, decay=0.0):
    velocity = np.zeros_like(theta)
    for gradient, rate in zip(grads, rates, strict=True):
        g = gradient(theta) + decay * theta
        velocity = momentum * velocity + g
        theta = theta - rate * (g + momentum * velocity if nesterov else velocity)
    return theta


# -- runs ------------------------------------------------------------------------------------------


def flat(arrays):
    return np.concatenate([arrays[name].ravel() for name in ("w1", "b1", "w2", "b2")])


def unflat(vector):
    arrays, start = {}, 0
    for name, value in net.weights().items():
        arrays[name] = vector[start : start + value.size].reshape(value.shape)
        start += value.size
    return arrays


def flat_gradients():
    """For each step, the gradient of its batch as a function of all parameters in one vector."""
    batches = [net.batch(step) for step in range(STEPS)]
    return [lambda v, b=b: flat(net.gradients(unflat(v), *b)) for b in batches]


def run(optimizer, scales=(1.0,) * STEPS):
    for step, scale in enumerate(scales):
        x, y = net.batch(step)
        before = net.loss(optimizer.engine.parameters, x, y)
        report = optimizer.step({"x": x}, y, scale)
        assert report.loss == pytest.approx(before, rel=1e-12)
    return flat(optimizer.engine.parameters)


def test_the_gradients_of_the_reference_are_those_of_its_loss():
    theta, (x, y), h = net.weights(), net.batch(), 1e-5
    for name, gradient in net.gradients(theta, x, y).items():
        for index in np.ndindex(gradient.shape):
            ends = []
            for moved in (h, -h):
                value = theta[name].copy()
                value[index] += moved
                ends.append(net.loss(theta | {name: value}, x, y))
            # A central difference has an error of h² times the third derivative.
            assert abs((ends[0] - ends[1]) / (2 * h) - gradient[index]) < 1e-8


@pytest.mark.parametrize("decay", [0.0, 0.3])
@pytest.mark.parametrize("nesterov", [True, False])
def test_muon_follows_its_formula(decay, nesterov):
    optimizer = ke.Muon(net.engine(), 0.1, nesterov=nesterov, weight_decay=decay, adam_rate=0.05)
    theta, velocity, first, second = net.weights(), {}, {}, {}
    for step in range(STEPS):
        x, y = net.batch(step)
        report = optimizer.step({"x": x}, y)
        grads = net.gradients(theta, x, y)
        for name, g in grads.items():
            if name.startswith("w"):
                velocity[name] = 0.95 * velocity.get(name, 0) + g
                lead = g + 0.95 * velocity[name] if nesterov else velocity[name]
                factor = np.sqrt(max(1, g.shape[0] / g.shape[1]))
                move = 0.1 * (factor * by_svd(lead) + decay * theta[name])
            else:
                first[name] = 0.9 * first.get(name, 0) + 0.1 * g
                second[name] = 0.999 * second.get(name, 0) + 0.001 * g * g
                root = np.sqrt(second[name] / (1 - 0.999 ** (step + 1))) + 1e-8
                move = 0.05 * (first[name] / (1 - 0.9 ** (step + 1)) / root + decay * theta[name])
            theta[name] = theta[name] - move
        assert report.learning_rate == 0.1
    # Iterations of the polynomial multiply rounding errors by up to 3.4445 each.
    assert np.abs(flat(optimizer.engine.parameters) - flat(theta)).max() < 1e-10


def test_directions_of_muon_have_singular_values_near_one():
    rng = np.random.default_rng(0)
    for shape in ((6, 6), (4, 9), (9, 4)):
        values = np.linalg.svd(rules.orthogonalize(rng.standard_normal(shape)), compute_uv=False)
        assert 0.5 < values.min() <= values.max() < 1.3


def test_a_learning_rate_may_depend_on_the_step_and_scale_multiplies_it():
    scales = [1.0, 0.5, 0.25, 1.0, 0.0, 2.0]
    optimizer = ke.SGD(net.engine(), lambda step: 0.1 / (1 + step))
    rates = [scale * 0.1 / (1 + step) for step, scale in enumerate(scales)]
    expected = sgd(flat(net.weights()), flat_gradients(), rates)
    assert np.abs(run(optimizer, scales) - expected).max() < EXACT


OPTIMIZERS = {
    "SGD": lambda e, **o: ke.SGD(e, 0.1, **o),
    "Adam": ke.Adam,
    "AdamW": ke.AdamW,
    "Muon": ke.Muon,
}


def bad_batch():
    x, y = net.batch(1)
    x[0, 0] = np.nan
    return {"x": x}, y


def state(optimizer, path):
    optimizer.save(path)
    return path.read_bytes()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_batch_with_nan_is_skipped_and_counted(name):
    skipping = OPTIMIZERS[name](net.engine(), non_finite="skip")
    clean = OPTIMIZERS[name](net.engine())
    for optimizer in (skipping, clean):
        for step in range(3):
            x, y = net.batch(step)
            optimizer.step({"x": x}, y)
            if optimizer is skipping:
                report = optimizer.step(*bad_batch())
                assert report.skipped
                assert np.isnan(report.loss)
    assert (skipping.skipped, clean.skipped, skipping.steps) == (3, 0, 3)
    for key, value in clean.engine.parameters.items():
        assert np.array_equal(value, skipping.engine.parameters[key])


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_that_cannot_fail_keeps_one_state(name, monkeypatch):
    one, two = (OPTIMIZERS[name](net.engine("float32")) for _ in range(2))
    monkeypatch.setattr(type(two), "_cannot_fail", lambda self, *arguments: self is one)
    addresses = set()
    for step in range(3):
        x, y = net.batch(step, "float32")
        for optimizer in (one, two):
            optimizer.step({"x": x}, y)
        slots = one.state().arrays
        addresses.add(tuple(a.ctypes.data for slot in slots.values() for a in slot.values()))
        for slot, arrays in two.state().arrays.items():
            for key, array in arrays.items():
                assert np.array_equal(array, slots[slot][key])
                assert array is not slots[slot][key]
    assert len(addresses) == 1
    for key, value in one.engine.parameters.items():
        assert np.array_equal(value, two.engine.parameters[key])


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("scale", [1e30, 1e300])
def test_a_huge_step_changes_all_or_nothing(name, scale, tmp_path):
    optimizer = OPTIMIZERS[name](net.engine("float32"))
    x, y = net.batch(dtype="float32")
    optimizer.step({"x": x}, y)
    before = state(optimizer, tmp_path / "state")
    try:
        optimizer.step({"x": x}, y, scale=scale)
    except ke.NonFiniteError:
        assert state(optimizer, tmp_path / "state") == before
    else:
        slots = optimizer.state().arrays.values()
        assert all(np.isfinite(array).all() for slot in slots for array in slot.values())


def test_parts_of_an_array_are_updated_as_the_whole():
    rule = rules.AdaptiveMoments(0.9, 0.999, 1e-8)
    rng = np.random.default_rng(0)
    size = 2 * vectors._PART + 5
    gradient, mean, square = rng.random((3, size))
    whole = rule(
        gradient.copy(),
        {"momentum": mean, "second_moment": square},
        {"momentum": np.empty(size), "second_moment": np.empty(size)},
        3,
    )
    direction, count = gradient.copy(), 0
    for g, m, v in vectors.parts(direction, mean, square):
        g[...] = rule(
            g, {"momentum": m, "second_moment": v}, {"momentum": m, "second_moment": v}, 3
        )
        count += 1
    assert count == 3
    assert np.allclose(direction, whole, rtol=1e-14)
    strided = np.zeros((size, 2))[:, 0]
    assert len(list(vectors.parts(strided, mean))) == 1


def test_equal_states_are_equal_files(tmp_path):
    optimizers = [ke.Adam(net.engine()) for _ in range(2)]
    files = []
    for optimizer in optimizers:
        x, y = net.batch()
        optimizer.step({"x": x}, y)
        files.append(state(optimizer, tmp_path / "state"))
    assert files[0] == files[1]


def test_a_state_of_another_optimizer_is_refused(tmp_path):
    ke.Adam(net.engine()).save(tmp_path / "state")
    with pytest.raises(ke.InputError, match="is a state of Adam, and this optimizer is SGD"):
        ke.SGD(net.engine(), 0.1).load(tmp_path / "state")


def test_a_function_that_returns_no_rate_is_refused():
    optimizer = ke.SGD(net.engine(), lambda step: float("nan"))
    with pytest.raises(ke.InputError, match="the learning rate of step 0 must be a finite number"):
        optimizer.step({"x": net.batch()[0]}, net.batch()[1])


def test_an_unknown_attribute_is_refused():
    optimizer = ke.SGD(net.engine(), 0.1)
    with pytest.raises(ke.UnknownAttributeError, match="did you mean 'learning_rate'"):
        optimizer.lerning_rate = 1.0


@pytest.mark.parametrize("make", [lambda e: ke.SGD(e, 0.1), ke.KfacOptimizer])
def test_a_step_updates_the_running_statistics_of_normalizations(make):
    data = {"input": np.random.default_rng(0).standard_normal((7, 4)).astype(np.float32)}
    targets = np.arange(7) % 3
    stepped, other = (ke.Engine.from_onnx(normalised(), loss="categorical") for _ in range(2))
    stepped.step(data, targets)
    make(other).step(data, targets)
    for name, value in stepped.buffers.items():
        assert np.array_equal(other.buffers[name], value)


# Name of an optimizer, or of a rule of K-FAC, to its options.
RULES = {name: {} for name in BY_NAME} | {
    "averaged gradients": {"learning_rate": 0.1},
    "quadratic": {"learning_rate": "quadratic", "momentum": "quadratic", "damping": 1.0},
}


@pytest.mark.parametrize("rule", RULES)
def test_tied_weights_are_trained_as_one_weight(rule):
    def make(engine):
        return BY_NAME.get(rule, ke.KfacOptimizer)(engine, **RULES[rule])

    def run(copies):
        engine = ke.Engine.from_onnx(
            network(copies), loss="normal", estimation_mode="exact", tie_weights=copies
        )
        optimizer = make(engine)
        rng = np.random.default_rng(0)
        for _ in range(4):
            optimizer.step(
                {"input": rng.standard_normal((BATCH, WIDTH)).astype(np.float32)},
                np.zeros((BATCH, WIDTH), np.float32),
            )
        return engine.parameters

    alone, tied = run(copies=False), run(copies=True)
    assert np.array_equal(tied["copy"], tied["w"].T)
    # float32 gradients, summed in another order; Adam divides them by their size.
    np.testing.assert_allclose(tied["w"], alone["w"], rtol=1e-3, atol=1e-4)


def test_parameters_in_half_precision_are_refused():
    model = models.mlp(dtype="float16")
    with pytest.raises(ke.InputError, match="make the engine with gradient_dtype='float32'"):
        ke.SGD(ke.Engine.from_onnx(model, loss="categorical"), 0.1)
    engine = ke.Engine.from_onnx(model, loss="categorical", gradient_dtype="float32")
    inputs = models.random_inputs(model, batch=4)
    optimizer = ke.SGD(engine, 1e-5)
    before = engine.parameters["fc0.weight"].copy()
    optimizer.step(inputs, np.arange(4) % 2)
    change = np.abs(engine.parameters["fc0.weight"] - before)
    # Smaller than the rounding of float16 next to one.
    assert 0 < change.max() < 1e-3
