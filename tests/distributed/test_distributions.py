"""Engines over several ranks give the results of one process on the whole batch."""

from threading import get_ident

import numpy as np
import pytest
from onnx import ModelProto

import kfac_engine as ke
from kfac_engine.curvature import fisher as fisher_module
from kfac_engine.curvature.factors.refresh import Division
from kfac_engine.sessions.session import Session
from tests import models
from tests.comparing import assert_arrays_equal, assert_arrays_near
from tests.distributed.threads import rows_of, run

# Of the largest entry. ONNX Runtime has no convolution in float64.
TOLERANCES = {"float64": 1e-12, "float32": 3e-5}
DTYPES = {"mlp": "float64", "token_mlp": "float64", "cnn": "float32", "layer_norm": "float32"}
CUTS = {1: [0, 12], 2: [0, 5, 12], 3: [0, 2, 7, 12], 4: [0, 1, 5, 6, 12], 8: [*range(8), 12]}


def model_of(source):
    """A model, or that of a name."""
    return source if isinstance(source, ModelProto) else models.MODELS[source](dtype=DTYPES[source])


def batches(source, count, rows=12):
    """Inputs and targets of some batches."""
    model = model_of(source)
    engine = ke.Engine.from_onnx(model, loss="categorical")
    for seed in range(count):
        inputs = models.random_inputs(model, batch=rows, seed=seed)
        shape = engine.trace(inputs)["output"].shape
        yield inputs, np.random.default_rng(seed).integers(0, shape[-1], shape[:-1])


def follow(source, size, steps=4, ignored=(), **options):
    """Take steps in one process, and on ranks with the same parameters; return both results.

    ``ignored`` are the examples of the first batch whose targets do not count.
    """
    # A large damping: small ones magnify the rounding of float32.
    options = {"damping": 0.1, "schedule": ke.Schedule(refresh_every=2), **options}
    options["loss"] = "categorical"
    alone = ke.Engine.from_onnx(model_of(source), **options)
    data, parameters, expected = list(batches(source, steps)), [], []
    data[0][1][list(ignored)] = -100
    for inputs, targets in data:
        parameters.append({name: value.copy() for name, value in alone.parameters.items()})
        result = alone.step(inputs, targets)
        expected.append(result)
        alone.set_parameters(
            {n: v - 0.05 * result.natural_gradients[n] for n, v in alone.parameters.items()}
        )

    def work(communicator):
        engine = ke.Engine.from_onnx(model_of(source), communicator=communicator, **options)
        rows = rows_of(communicator, CUTS)
        results = []
        for (inputs, targets), values in zip(data, parameters, strict=True):
            engine.set_parameters(values)
            part = {key: array[rows] for key, array in inputs.items()}
            results.append(engine.step(part, targets[rows]))
        engine.synchronize()
        averages = [factor.cov for factor in engine.estimator.factors]
        return results, averages, engine.estimator.rng.bit_generator.state

    return alone, expected, run(size, work)


DISTRIBUTIONS = ["replicate", "shard"]


def assert_equal_to_one_process(source, size, divided=(), **options):
    """Compare ranks with one process, and return its engine.

    ``divided`` names the parameters that several ranks own.
    """
    alone, expected, ranks = follow(source, size, **options)
    close = TOLERANCES[str(next(iter(alone.parameters.values())).dtype)]
    shared = options.get("distribution") == "shard"
    for results, averages, generator in ranks:
        assert generator == alone.estimator.rng.bit_generator.state
        for result, wanted, first in zip(results, expected, ranks[0][0], strict=True):
            assert result.loss == pytest.approx(wanted.loss, rel=close)
            assert_arrays_near(result.natural_gradients, wanted.natural_gradients, close)
            assert_arrays_equal(result.natural_gradients, first.natural_gradients)
            assert_arrays_near(
                result.gradients, {k: wanted.gradients[k] for k in result.gradients}, close
            )
        for average, factor in zip(averages, alone.estimator.factors, strict=True):
            assert_arrays_near({"": average}, {"": factor.cov}, close)
    owned = [set(results[-1].gradients) - set(divided) for results, _, _ in ranks]
    names = set(expected[-1].gradients) - set(divided)
    assert set().union(*owned) == names
    assert not shared or sum(map(len, owned)) == len(names)
    return alone


@pytest.mark.rounding
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
def test_steps_equal_those_of_one_process_for_any_number_of_ranks(size, distribution):
    assert_equal_to_one_process("mlp", size, distribution=distribution)


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
@pytest.mark.parametrize("mode", ["gradients", "empirical", "exact", "curvature_prop"])
@pytest.mark.parametrize("name", ["mlp", "cnn", "layer_norm", "token_mlp"])
def test_steps_equal_those_of_one_process_in_every_mode(name, mode, distribution):
    assert_equal_to_one_process(name, 3, estimation_mode=mode, distribution=distribution)


OPTIONS = [
    {"reduction": "batch_mean"},
    {"reduction": "sum"},
    {"schedule": ke.Schedule(refresh_every=2, policy="round_robin")},
    {"schedule": ke.Schedule(refresh_every=2, policy="balanced")},
    {"exps": (-0.5,)},
    {"exps": (-0.5, -1)},
    {"damping": ke.RelativeDamping(0.1)},
]


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_steps_equal_those_of_one_process_with_every_option(options, distribution):
    assert_equal_to_one_process("mlp", 3, distribution=distribution, **options)


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
@pytest.mark.parametrize("mode", ["gradients", "empirical", "exact", "curvature_prop"])
@pytest.mark.parametrize("ignored", [[3], [0, 1], [0, 3, 8]], ids=str)
def test_targets_of_some_ranks_may_not_count(ignored, mode, distribution):
    """The ranks have 2, 5 and 5 examples."""
    options = {"estimation_mode": mode, "distribution": distribution}
    assert_equal_to_one_process("mlp", 3, ignored=ignored, **options)


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_a_rank_without_targets_that_count_has_no_rows_of_experts(distribution):
    source = models.written(
        "N,3 -> N,4",
        "stack=-1,2,2 W(2,2,2) flat=-1,4 V(3,4)",
        """h = MatMul(input, V)  k = Reshape(h, stack)  x = Transpose <perm = [1, 0, 2]>(k)
        y = MatMul(x, W)  z = Transpose <perm = [1, 0, 2]>(y)  output = Reshape(z, flat)""",
        "double",
    )
    assert_equal_to_one_process(source, 3, ignored=[0, 1], distribution=distribution)


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_steps_equal_those_of_one_process_that_refreshes_in_the_same_calls(
    distribution, monkeypatch
):
    """The policy balances the ranks, so that the calls depend on their number and owners."""
    schedule = ke.Schedule(refresh_every=3, policy="balanced_ranks")
    options = {"distribution": distribution, "schedule": schedule}

    def plan(communicator):
        engine = ke.Engine.from_onnx(
            model_of("mlp"), loss="categorical", communicator=communicator, **options
        )
        calls = [engine.planner.refreshes(counter) for counter in range(1, 4)]
        return {work.key: work.owner for work in engine.fisher.works}, calls

    (owned, calls), *others = run(3, plan)
    assert all(other == (owned, calls) for other in others)
    assert sorted(key for call in calls for key in call) == sorted(owned)  # once in a period
    assert calls != plan(None)[1]
    fixed = {key: owner for key, owner in owned.items() if owner is not None}

    class Fixed(Division):
        ranks = 3
        owners = staticmethod(lambda factors: fixed)

    monkeypatch.setattr(fisher_module, "UNDIVIDED", Fixed())
    assert_equal_to_one_process("mlp", 3, **options)


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_a_rank_runs_the_sessions_of_one_process(distribution, monkeypatch):
    runs, run_session = [], Session.run_into

    def counted(session, *arguments, **options):
        runs.append(get_ident())
        return run_session(session, *arguments, **options)

    monkeypatch.setattr(Session, "run_into", counted)
    inputs, targets = next(batches("mlp", 1))

    def work(communicator):
        options = {"communicator": communicator, "distribution": distribution}
        engine = ke.Engine.from_onnx(model_of("mlp"), loss="categorical", **options)
        built = runs.count(get_ident())
        engine.step(inputs, targets)
        return runs.count(get_ident()) - built

    assert set(run(3, work)) == set(run(1, work))


@pytest.mark.parametrize("name", ["mlp", "cnn"])
def test_a_step_with_all_gradients_has_those_of_one_process(name):
    (inputs, targets), *_ = batches(name, 1)
    options = {"loss": "categorical", "damping": 0.1, "distribution": "shard"}

    def work(communicator):
        engine = ke.Engine.from_onnx(model_of(name), communicator=communicator, **options)
        rows = rows_of(communicator, CUTS)
        part = {key: array[rows] for key, array in inputs.items()}
        owned = engine.step(part, targets[rows])
        size = sum(array.nbytes for array in engine.parameters.values())
        calls = communicator.log
        assert calls.count(("allgather", size)) == 1  # the natural gradients
        result = engine.step(part, targets[rows], gradients="all")
        assert calls.count(("allgather", size)) == 3
        with pytest.raises(ke.InputError, match='gradients="all"'):
            owned.clipped_rate()
        with pytest.raises(ke.InputError, match="gradients must be one of owned, all; got 'own'"):
            engine.step(part, targets[rows], gradients="own")
        return result

    alone, ranks = ke.Engine.from_onnx(model_of(name), **options), run(3, work)
    alone.step(inputs, targets)
    expected = alone.step(inputs, targets, gradients="all")
    close = TOLERANCES[DTYPES[name]]
    for result in ranks:
        assert_arrays_near(result.gradients, expected.gradients, close)
        assert result.clipped_rate(1e9) == pytest.approx(expected.clipped_rate(1e9), rel=10 * close)
        assert_arrays_equal(result.gradients, ranks[0].gradients)
