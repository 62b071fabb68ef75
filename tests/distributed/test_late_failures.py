"""Failures after the averages have moved, and numbers of one rank that need float64."""

import numpy as np
import pytest

import kfac_engine as ke
from kfac_engine.engine.options import DISTRIBUTIONS
from tests.comparing import assert_arrays_near
from tests.distributed.test_distributions import batches
from tests.distributed.test_failures import SIZE, assert_same_state, engine_of, part_of, state
from tests.distributed.threads import run
from tests.models import Net

# Losses of batches with huge numbers explode.
pytestmark = pytest.mark.filterwarnings("ignore:the run diverges")

ROWS = 12
# The natural gradient of this multiple of a batch overflows with a damping of 1e-4.
USUAL, HUGE = np.float32(0.01), np.float32(1e37)


def linear(communicator, **options):
    """An engine of one dense layer without bias, in float32."""
    net = Net("float32")
    net.op("MatMul", "input", net.weight("w", 4, 3), to="output")
    model = net.model({"input": ["batch", 4]}, {"output": ["batch", 3]})
    options = {"loss": "categorical", "damping": 1e-4, "threads": 1, **options}
    return ke.Engine.from_onnx(model, communicator=communicator, **options)


def batch(seed, scale=USUAL):
    rng = np.random.default_rng(seed)
    inputs = scale * np.clip(rng.standard_normal((ROWS, 4), np.float32), -1, 1)
    return {"input": inputs}, rng.integers(0, 3, ROWS)


def refused(step, *arguments, **options):
    """The error of a step."""
    with pytest.raises(ke.KfacError) as error:
        step(*arguments, **options)
    return str(error.value)


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
@pytest.mark.parametrize("whole", [False, True], ids=["divided", "whole"])
def test_a_step_whose_natural_gradient_overflows_changes_nothing(whole, distribution):
    """Averages were divided among the ranks before the step, or whole after ``synchronize``."""

    def work(communicator, *, fails):
        engine = linear(communicator, distribution=distribution)
        engine.step(*part_of(communicator, batch(0)))
        if whole:
            engine.synchronize()
        if fails:
            text = refused(engine.step, *part_of(communicator, batch(1, HUGE)))
            assert text.startswith("rank 0 of 3 refused: the gradient of 'w' times the Fisher")
        engine.step(*part_of(communicator, batch(2)))
        return state(engine)

    expected = run(SIZE, lambda communicator: work(communicator, fails=False))
    for before, after in zip(
        expected, run(SIZE, lambda communicator: work(communicator, fails=True)), strict=True
    ):
        assert_same_state(before, after)


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_a_step_that_one_rank_ends_by_another_error_is_rolled_back_on_all(distribution):
    """The power −2 may overflow for any gradient, so that averages are copied before a step."""
    data = list(batches("mlp", 3))

    def fail(*_, **__):
        raise MemoryError("no memory left")

    def work(communicator):
        engine = engine_of(communicator, distribution=distribution, exps=(-2,))
        engine.step(*part_of(communicator, data[0]))
        before = state(engine)
        with pytest.MonkeyPatch.context() as patch:
            if communicator.rank == 1:
                patch.setattr(engine.fisher.division, "owned", fail)
            assert "MemoryError" in refused(engine.step, *part_of(communicator, data[1]))
        assert_same_state(before, state(engine))

    run(SIZE, work)


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
@pytest.mark.parametrize("gathering", ["owned", "all"])
@pytest.mark.parametrize("every", [1, 10])
def test_a_sum_of_gradients_that_overflows_is_refused_by_all(every, gathering, distribution):
    """The gradients of all shards are finite; with ``"shard"``, their owner alone has the sum."""

    def work(communicator):
        engine = linear(
            communicator, reduction="sum", damping=0.1, distribution=distribution,
            schedule=ke.Schedule(refresh_every=every, covariance_every=every),
        )  # fmt: skip
        engine.set_parameters({"w": np.zeros((4, 3), np.float32)})
        engine.step(*part_of(communicator, batch(0)))
        equal = {"input": np.full((ROWS, 4), 9e37, np.float32)}, np.zeros(ROWS, int)
        text = refused(engine.step, *part_of(communicator, equal), gradients=gathering)
        engine.step(*part_of(communicator, batch(1)))
        return text

    assert len(set(run(SIZE, work))) == 1


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
@pytest.mark.parametrize("call", ["precondition", "multiply_cholesky", "multiply_cholesky_inverse"])
def test_products_of_one_rank_that_fail_are_errors_of_all(call, distribution):
    data = list(batches("mlp", 2))

    def work(communicator):
        engine = engine_of(
            communicator, distribution=distribution, compute_cholesky=True,
            compute_cholesky_inverse=True,
        )  # fmt: skip
        engine.step(*part_of(communicator, data[0]))
        vectors = {name: array.copy() for name, array in engine.parameters.items()}
        if communicator.rank == 2:
            vectors["fc0.weight"][0, 0] = np.nan
        assert refused(getattr(engine, call), vectors).startswith("rank 2 of 3 refused: ")
        return engine.step(*part_of(communicator, data[1])).loss

    assert len(set(run(SIZE, work))) == 1


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_an_optimizer_skips_a_step_on_all_ranks(distribution):
    def work(communicator):
        engine = linear(communicator, distribution=distribution)
        optimizer = ke.KfacOptimizer(
            engine, 0.01, damping=1e-4, non_finite="skip", statistics_part=1.0
        )
        data = [batch(seed, HUGE if seed == 4 else USUAL) for seed in range(6)]
        return [optimizer.step(*part_of(communicator, b)).skipped for b in data]

    assert run(SIZE, work) == [[False, False, False, False, True, False]] * SIZE


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_an_error_in_a_vote_keeps_its_mark_when_losses_are_added_to_it(distribution):
    """A vote on the bases of EKFAC fails after the parameters have moved."""
    data = list(batches("mlp", 2))

    def work(communicator):
        engine = engine_of(
            communicator, distribution=distribution, approximations={"fully_connected": "ekfac"}
        )
        engine.gradients(*part_of(communicator, data[0]))
        engine.set_parameters({n: 0.9 * v for n, v in engine.parameters.items()})
        inputs, targets = part_of(communicator, data[1])
        if communicator.rank == 1:
            inputs["input"][0, 0] = 1e160
        return refused(engine.step, inputs, targets)

    texts = run(SIZE, work)
    assert len(set(texts)) == 1
    assert texts[0].startswith("rank 1 of 3 refused: 'input' holds numbers up to 1e+160")


def test_averages_are_divided_on_a_rank_that_owns_nothing():
    def work(communicator):
        engine = linear(communicator, distribution="shard")
        engine.step(*part_of(communicator, batch(0)))
        for factor in engine.estimator.factors:
            with pytest.raises(ke.NotReadyError, match="is divided among several processes"):
                factor.cov  # noqa: B018

    run(SIZE, work)


# -- numbers that need float64 ---------------------------------------------------------------------


def two_inputs():
    """Two dense layers of two inputs, whose results are added, and a third."""
    net = Net("float32")
    parts = [net.op("Tanh", net.dense(f"of {n}", n, 4, 5), to=f"f{n}") for n in "ab"]
    net.dense("output", net.op("Add", *parts, to="sum"), 5, 3)
    return net.model({"a": ["batch", 4], "b": ["batch", 4]}, {"output": ["batch", 3]})


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
@pytest.mark.parametrize("approximation", ["kron", "ekfac", "diagonal"])
@pytest.mark.parametrize("places", [[(1, "a")], [(0, "a"), (1, "b")]])
def test_numbers_of_a_rank_whose_squares_overflow_are_averaged(places, approximation, distribution):
    """The squares of the numbers overflow float32: the averages of all ranks are float64."""
    rng = np.random.default_rng(0)
    inputs = {n: rng.standard_normal((ROWS, 4), np.float32) for n in "ab"}
    for rank, name in places:
        inputs[name][4 * rank, 0] = 1e25
    later = {n: rng.standard_normal((ROWS, 4), np.float32) for n in "ab"}
    targets = rng.integers(0, 3, ROWS)

    def work(communicator):
        engine = ke.Engine.from_onnx(
            two_inputs(), loss="categorical", damping=0.1, communicator=communicator,
            distribution=distribution, approximations={"fully_connected": approximation},
            schedule=ke.Schedule(refresh_every=2),
        )  # fmt: skip
        for values in (inputs, later, later):
            engine.step(*part_of(communicator, (values, targets)))
        engine.synchronize()
        return {factor.name: factor.cov for factor in engine.estimator.factors}

    results = run(SIZE, work)
    if approximation != "ekfac":  # its averages depend on a basis with equal eigenvalues
        expected = averages_of_one([inputs, later, later], targets, approximation)
        for averages in results:
            assert_arrays_near(averages, expected, 3e-5)
    for averages in results:
        for name, average in averages.items():
            assert np.isfinite(average).all()
            np.testing.assert_array_equal(average, results[0][name])


def averages_of_one(data, targets, approximation):
    """The averages of one process."""
    engine = ke.Engine.from_onnx(
        two_inputs(), loss="categorical", damping=0.1,
        approximations={"fully_connected": approximation}, schedule=ke.Schedule(refresh_every=2),
    )  # fmt: skip
    for values in data:
        engine.step(values, targets)
    return {factor.name: factor.cov for factor in engine.estimator.factors}
