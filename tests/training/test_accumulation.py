"""Steps of several parts are those of the whole batch, for every optimizer."""

import functools
import itertools

import numpy as np
import pytest

import kfac_engine as ke
from kfac_engine.training.batches import run_data
from tests.comparing import assert_arrays_close, assert_arrays_equal
from tests.distributed.threads import run
from tests.training import softmax_net as net

STEPS, EXAMPLES, PARTS = 8, 24, [0, 7, 8, 24]
# Of the largest entry after eight steps, each of which multiplies roundings.
CLOSE = 1e-9

OPTIMIZERS = {
    "auto": lambda e: ke.KfacOptimizer(e, l2=0.001),
    "auto, adapted": lambda e: ke.KfacOptimizer(e, adapt_damping=True),
    "given rate": lambda e: ke.KfacOptimizer(e, 0.05, statistics_part=1.0),
    "quadratic": lambda e: ke.KfacOptimizer(e, "quadratic", 1.0, "quadratic", weight_decay=0.01),
    "predicted": lambda e: ke.KfacOptimizer(
        e, 0.05, adapt_damping=ke.DampingAdaptation(2), weight_decay=0.01
    ),
    "sgd": lambda e: ke.SGD(e, 0.05, nesterov=True, weight_decay=0.01),
    "adam": lambda e: ke.Adam(e, 0.01),
    "adamw": lambda e: ke.AdamW(e, 0.01),
    "muon": lambda e: ke.Muon(e, 0.01),
}


def cut(batch, edges, rank=0, size=1):
    """The parts of a batch; of several ranks, the examples of one in each part."""
    x, y = batch
    parts = []
    for low, high in itertools.pairwise(edges):
        count = high - low
        rows = slice(low + rank * count // size, low + (rank + 1) * count // size)
        weighted = isinstance(y, ke.Weighted)
        targets = ke.Weighted(y.targets[rows], y.weights[rows]) if weighted else y[rows]
        parts.append(({"x": x[rows]}, targets))
    return parts


def trained(make, parts, model=None, loss="categorical", batch=net.batch, **options):
    """The reports of some steps, the parameters at the end, and the generator."""
    engine = ke.Engine.from_onnx(model or net.model(), loss=loss, threads=1, **options)
    optimizer = make(engine)
    reports = [optimizer.step(parts(batch(step, n=EXAMPLES))) for step in range(STEPS)]
    state = engine.estimator.rng.bit_generator.state
    return reports, {n: v.copy() for n, v in engine.parameters.items()}, state


def assert_equal(found, expected):
    for report, wanted in zip(found[0], expected[0], strict=True):
        assert report.loss == pytest.approx(wanted.loss, rel=1e-10)
        assert report.learning_rate == pytest.approx(wanted.learning_rate, rel=1e-6)
        assert report.refreshed == wanted.refreshed
        assert (report.damping or 0) == pytest.approx(wanted.damping or 0, rel=1e-6)
        assert (report.reduction_ratio is None) == (wanted.reduction_ratio is None)
    for name, array in expected[1].items():
        close = CLOSE * abs(array).max()
        np.testing.assert_allclose(found[1][name], array, rtol=0, atol=close)
    assert found[2] == expected[2]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_of_parts_are_those_of_the_whole_batch(name):
    expected = trained(OPTIMIZERS[name], lambda batch: cut(batch, [0, EXAMPLES]))
    assert_equal(trained(OPTIMIZERS[name], lambda batch: cut(batch, PARTS)), expected)
    # The parts matter: without one of them, the step is another one.
    other = trained(OPTIMIZERS[name], lambda batch: cut(batch, PARTS[:-1]))
    assert abs(other[1]["w1"] - expected[1]["w1"]).max() > 1e-4


@pytest.mark.parametrize("name", ["auto", "auto, adapted", "quadratic", "adamw"])
def test_steps_of_a_file_with_one_example_are_those_of_the_whole_batch(name):
    """Such a file computes a batch as parts of one example."""
    expected = trained(OPTIMIZERS[name], lambda batch: cut(batch, [0, EXAMPLES]))
    ones = range(EXAMPLES + 1)
    found = trained(OPTIMIZERS[name], lambda batch: cut(batch, ones), net.model(examples=1))
    assert_equal(found, expected)


@pytest.mark.parametrize(
    ("size", "reduction", "distribution"), [(2, "mean", "replicate"), (3, "sum", "shard")]
)
@pytest.mark.parametrize("name", ["auto, adapted", "given rate", "quadratic", "muon"])
def test_steps_of_several_processes_are_those_of_one(name, size, reduction, distribution):
    """Each process passes its examples of every part."""
    # Each process has at least four examples of each part, of which one is in a quarter.
    edges, make = {2: [0, 8, 24], 3: [0, 12, 24]}[size], OPTIMIZERS[name]
    expected = trained(make, lambda batch: cut(batch, [0, EXAMPLES]), reduction=reduction)

    def work(communicator):
        options = {"communicator": communicator, "distribution": distribution}
        rank = communicator.rank, communicator.size
        return trained(make, lambda b: cut(b, edges, *rank), reduction=reduction, **options)

    for found in run(size, work):
        assert_equal(found, expected)


def means(step, n, value=0.0, weights=None):
    """Targets of means in an order, so that each part has means of its own."""
    x, rng = net.batch(step, n=n)[0], np.random.default_rng(step)
    y = 1000 + 100 * np.sort(rng.standard_normal((n, 3)), axis=0)
    if weights is None:
        return x, y
    w = weights(rng.integers(0, 3, n if step % 2 else (n, 3)))
    y[w == 0] = value
    return x, ke.Weighted(y, w)


WEIGHTS = {"none": None, "numbers": lambda w: w, "mask": lambda w: w > 0}


@pytest.mark.parametrize("weights", WEIGHTS)
def test_steps_with_squared_errors_have_the_spread_of_the_targets_that_count(weights):
    """The lengths of updates depend on the spread over the whole batch."""
    weigh = WEIGHTS[weights]

    def after(edges, value=0.0, rank=0, size=1, **options):
        draw = functools.partial(means, value=value, weights=weigh)
        parts = functools.partial(cut, edges=edges, rank=rank, size=size)
        return trained(ke.KfacOptimizer, parts, None, "normal", draw, **options)

    expected = after([0, EXAMPLES])
    for edges in (PARTS, range(EXAMPLES + 1)):
        assert_equal(after(edges), expected)
    for value in () if weigh is None else (1e6, np.nan):
        assert_equal(after([0, EXAMPLES], value), expected)
    for found in run(2, lambda c: after([0, 8, EXAMPLES], rank=c.rank, size=2, communicator=c)):
        assert_equal(found, expected)


def test_float32_steps_are_those_of_the_whole_batch():
    whole, parts = net.engine("float32"), net.engine("float32")
    x, y = net.batch(dtype="float32", n=EXAMPLES)
    ke.SGD(whole, 0.1).step({"x": x}, y)
    ke.SGD(parts, 0.1).step(cut((x, y), PARTS))
    assert_arrays_close(parts.parameters, whole.parameters, rtol=1e-6, atol=1e-7)


# -- runs ------------------------------------------------------------------------------------------


def fitted(examples="batch", **options):
    model = net.model(examples=examples)
    engine = ke.Engine.from_onnx(model, loss="categorical", threads=1)
    data = net.batch(n=50)
    options = {"validation": 0.2, **options}
    history = ke.fit(engine, data, optimizer="kfac", epochs=3, **options)
    return [record["loss"] for record in history.records], engine.parameters, history


@pytest.mark.parametrize(("size", "parts"), [(4, 3), (3, 4), (12, 2), (100, 3)])
def test_a_run_is_that_of_the_larger_batch_size(size, parts):
    """Order, number of steps and results; 40 examples are one batch where they fill none."""
    losses, expected, _ = fitted(batch_size=size * parts)
    found, parameters, history = fitted(batch_size=size, accumulate=parts)
    assert len(losses) == 3 * max(1, 40 // (size * parts))
    np.testing.assert_allclose(found, losses, rtol=1e-9)
    assert_arrays_close(parameters, expected, rtol=0, atol=1e-8)
    assert history.description["settings"]["accumulate"] == parts


@pytest.mark.parametrize(
    ("fixed", "parts", "part"), [(1, 8, 0.25), (1, 100, 0.25), (4, 3, 1.0), (4, 9, 1.0)]
)
def test_a_run_of_a_file_with_a_fixed_batch_is_that_of_the_larger_batch_size(fixed, parts, part):
    """A fixed batch of several examples cannot be cut, so that all of them are measured."""
    options = {"statistics_part": part, "validation": 0.24}  # 12 examples: full batches
    losses, expected, _ = fitted(batch_size=fixed * parts, **options)
    found, parameters, _ = fitted(fixed, batch_size=fixed, accumulate=parts, **options)
    np.testing.assert_allclose(found, losses, rtol=1e-9)
    assert_arrays_close(parameters, expected, rtol=0, atol=1e-8)


def test_arrays_are_cut_for_a_fixed_batch_size_only():
    with pytest.raises(ke.InputError, match=r"1 example in 'x'.*set batch_size=1 \(accumulate"):
        fitted(1, batch_size=2, accumulate=4)
    with pytest.raises(ke.InputError, match="cannot be cut into batches"):
        fitted(48, batch_size=48)  # 40 examples remain beside the validation


def test_parts_have_equal_sizes_and_the_order_of_the_larger_batch():
    axes, data = net.engine().example_axes, net.batch(n=50)
    (batch,) = list(run_data(data, None, axes, 40, 0).train.steps(1))
    (parts,) = list(run_data(data, None, axes, 10, 0, accumulate=4).train.steps(1))
    assert [len(y) for _, y in parts] == [10, 10, 10, 10]
    np.testing.assert_array_equal(np.concatenate([y for _, y in parts]), batch[0][1])
    # Fewer examples than a batch: as few parts as their size allows, which differ by one at most.
    (parts,) = list(run_data(data, None, axes, 20, 0, accumulate=4).train.steps(0))
    assert sorted(len(y) for _, y in parts) == [16, 17, 17]


def test_batches_of_the_caller_are_parts_in_their_order():
    x, y = net.batch(n=50)
    batches = [({"x": x[i : i + 10]}, y[i : i + 10]) for i in range(0, 50, 10)]
    engine = ke.Engine.from_onnx(net.model(), loss="categorical", threads=1)
    history = ke.fit(engine, batches, optimizer="sgd", epochs=2, accumulate=2)
    other = ke.Engine.from_onnx(net.model(), loss="categorical", threads=1)
    joined = [({"x": x[i : i + 20]}, y[i : i + 20]) for i in (0, 20, 40)]
    expected = ke.fit(other, joined, optimizer="sgd", epochs=2)
    assert len(history.records) == len(expected.records) == 6
    np.testing.assert_allclose(engine.parameters["w1"], other.parameters["w1"], rtol=1e-10)


def test_a_resumed_run_continues_with_its_parts(tmp_path):
    _, expected, _ = fitted(batch_size=4, accumulate=3)
    fitted(batch_size=4, accumulate=3, checkpoint=tmp_path, checkpoint_every=2, callbacks=[_stop])
    with pytest.raises(ke.InputError, match="accumulate=3, and this run has accumulate=2"):
        fitted(batch_size=4, accumulate=2, checkpoint=tmp_path, resume=True)
    _, parameters, _ = fitted(batch_size=4, accumulate=3, checkpoint=tmp_path, resume=True)
    assert_arrays_equal(parameters, expected)


def _stop(record, optimizer):
    return record["step"] == 5


def test_errors_name_the_example_of_the_data():
    x, y = net.batch(n=24)
    y[17] = 9
    engine = ke.Engine.from_onnx(net.model(), loss="categorical", threads=1)
    with pytest.raises(ke.InputError, match=r"is example 17 of the data.*of the 4 parts"):
        ke.fit(engine, (x, y), batch_size=6, accumulate=4, epochs=1)
    for wrong in (0, 1.5, "2", True):
        with pytest.raises(ke.InputError, match="accumulate"):
            ke.fit(engine, (x, y), accumulate=wrong, epochs=1)
