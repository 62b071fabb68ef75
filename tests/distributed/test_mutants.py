"""Faults in the product that the checks of several ranks must notice."""

from contextlib import contextmanager

import numpy as np
import pytest

import kfac_engine as ke
from kfac_engine.curvature.factors.base import FisherFactor
from kfac_engine.curvature.factors.statistics import Statistic
from kfac_engine.curvature.fisher import Fisher
from kfac_engine.distributed.agreement import Agreement
from kfac_engine.distributed.shards import RowGenerator
from kfac_engine.engine import build
from kfac_engine.engine.distribution import Distribution
from tests import models
from tests.distributed import test_distributions, test_late_failures
from tests.distributed.test_distributions import assert_equal_to_one_process, batches
from tests.distributed.test_divided_layers import DIVIDED, table
from tests.distributed.test_failures import SIZE, assert_same_state, engine_of, part_of, state
from tests.distributed.threads import DesynchronizedError, run


@contextmanager
def nothing(*_, **__):
    """Replaces a context."""
    yield


def angles(dtype):
    """A dense layer of products with the sines of a parameter, which has no layer."""
    net = models.Net(dtype)
    net.op("Mul", "input", net.op("Sin", net.weight("angle", 5), to="sine"), to="product")
    net.dense("output", "product", 5, 3)
    return net.model({"input": ["batch", 5]}, {"output": ["batch", 3]})


@pytest.fixture
def squares_of_batches(monkeypatch):
    """Blocks of parameters without a layer read the square of the gradient of the batch."""
    monkeypatch.setattr(build, "ExampleGradients", lambda *_: None)
    monkeypatch.setattr(models, "MODELS", {**models.MODELS, "angles": angles})
    monkeypatch.setitem(test_distributions.DTYPES, "angles", "float64")


def draw_alike(generator, size):
    return generator._rng.random(size)


def measure_separately(factor, values, sizes=None, *, joined=False, before=None):
    return measure(factor, values, sizes, before=before)


measure = FisherFactor.measure


def test_equal_draws_on_all_ranks_are_noticed(monkeypatch):
    monkeypatch.setattr(RowGenerator, "random", draw_alike)
    # The statistics are wrong, and the generators of the ranks end in different states.
    with pytest.raises((AssertionError, ke.RankError)):
        assert_equal_to_one_process("mlp", 3)


@pytest.mark.parametrize("approximation", ["kron", "diagonal"])
def test_equal_weights_of_unequal_shards_are_noticed(approximation, monkeypatch):
    monkeypatch.setattr(Statistic, "share", lambda *_: 1 / 3)
    chosen = {"fully_connected": approximation}
    with pytest.raises(AssertionError):
        assert_equal_to_one_process("mlp", 3, estimation_mode="empirical", approximations=chosen)


@pytest.mark.usefixtures("squares_of_batches")
def test_squares_of_sums_over_shards_are_noticed(monkeypatch):
    assert_equal_to_one_process("angles", 3, estimation_mode="empirical")
    monkeypatch.setattr(FisherFactor, "measure", measure_separately)
    with pytest.raises(AssertionError):
        assert_equal_to_one_process("angles", 3, estimation_mode="empirical")


def test_covariances_of_shards_are_noticed(monkeypatch):
    monkeypatch.setattr(FisherFactor, "measure", measure_separately)
    options = {"estimation_mode": "empirical", "approximations": {"conv2d": "kron_sua"}}
    with pytest.raises(AssertionError):
        assert_equal_to_one_process("cnn", 3, **options)


def fail_on_one_rank(*, caught=ke.RankError):
    """One rank fails while it measures; then all take the next step."""
    data = list(batches("mlp", 3))

    def fail(*_, **__):
        raise MemoryError("no memory left")

    def work(communicator):
        engine = engine_of(communicator)
        engine.step(*part_of(communicator, data[0]))
        before = state(engine)
        with pytest.MonkeyPatch.context() as patch:
            if communicator.rank == 1:
                patch.setattr(engine.fisher.sources, "of_batch", fail)
            with pytest.raises(caught):
                engine.step(*part_of(communicator, data[1]))
        assert_same_state(before, state(engine))
        engine.step(*part_of(communicator, data[2]))

    run(SIZE, work)


def test_without_a_fault_all_ranks_refuse_and_go_on():
    fail_on_one_rank()


def test_errors_without_a_vote_are_noticed(monkeypatch):
    monkeypatch.setattr(Agreement, "operation", nothing)
    # The ranks meet in different collectives, or read numbers of another vote.
    with pytest.raises((DesynchronizedError, ke.KfacError)):
        fail_on_one_rank(caught=MemoryError)


def test_ranks_that_go_on_after_an_error_of_another_are_noticed(monkeypatch):
    def vote(agreement, numbers=(), error=None, **_):
        table = np.zeros((SIZE, 7))
        table[agreement.rank, 0] = error is not None
        table[agreement.rank, 2 : 2 + len(numbers)] = numbers
        agreement.communicator.allreduce(table.reshape(-1))
        if error is not None:
            raise agreement._error_of(agreement.rank, error)
        return table[:, 2:]

    monkeypatch.setattr(Agreement, "_vote", vote)
    with pytest.raises(DesynchronizedError):
        fail_on_one_rank()


def test_a_generator_that_is_not_restored_is_noticed(monkeypatch):
    monkeypatch.setattr(Fisher, "snapshot", lambda _: lambda: None)
    with pytest.raises(AssertionError):
        fail_on_one_rank()


def forget_copies(distribution):
    distribution._copied = []


def test_copies_of_averages_that_are_counted_twice_are_noticed(monkeypatch):
    monkeypatch.setattr(Distribution, "_empty_copies", forget_copies)
    with pytest.raises(AssertionError):
        assert_equal_to_one_process(table(), SIZE, ["table"], **DIVIDED)


@pytest.mark.filterwarnings("ignore:the run diverges")
def test_a_roll_back_that_does_not_restore_the_division_is_noticed(monkeypatch):
    """Averages that were whole before the step are whole again, and count as divided."""
    monkeypatch.setattr(Distribution, "snapshot", lambda _: lambda: None)
    with pytest.raises(AssertionError, match="Arrays are not equal"):
        test_late_failures.test_a_step_whose_natural_gradient_overflows_changes_nothing(
            True, "replicate"
        )
