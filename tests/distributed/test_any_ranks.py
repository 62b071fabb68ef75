"""Any number of ranks with any shards takes the steps of one process, and refuses batches as one.

The collectives of the threads check that all ranks have entered the same one.
"""

import pytest
from hypothesis import given, settings, strategies as st

import kfac_engine as ke
from kfac_engine.curvature.schedule import POLICIES
from kfac_engine.engine.options import DISTRIBUTIONS
from tests.comparing import assert_arrays_equal, assert_arrays_near
from tests.distributed.test_distributions import TOLERANCES, batches, model_of
from tests.distributed.test_failures import assert_same_state, state
from tests.distributed.threads import run
from tests.nightly import SEED

EXAMPLES = 10 if SEED is None else 50
MODES = ("gradients", "empirical", "exact", "curvature_prop")
MODELS = ("mlp", "token_mlp")  # in float64
APPROXIMATIONS = ("kron", "diagonal")
# The other one refreshes factors in calls that depend on the number of ranks.
EQUAL_POLICIES = tuple(name for name in POLICIES if name != "balanced_ranks")


@st.composite
def cases(draw):
    """Shards of some batches, and the options of an engine."""
    size, count = draw(st.integers(1, 8)), draw(st.integers(2, 4))
    rows = draw(st.integers(max(size, 2), 14))
    inner = st.lists(st.integers(1, rows - 1), min_size=size - 1, max_size=size - 1, unique=True)
    cuts = [[0, *sorted(draw(inner)), rows] for _ in range(count)]
    options = {
        "estimation_mode": draw(st.sampled_from(MODES)),
        "distribution": draw(st.sampled_from(DISTRIBUTIONS)),
        "approximations": {"fully_connected": draw(st.sampled_from(APPROXIMATIONS))},
        "schedule": ke.Schedule(
            covariance_every=draw(st.integers(1, 2)),
            refresh_every=draw(st.integers(1, 3)),
            policy=draw(st.sampled_from(EQUAL_POLICIES)),
            overlap=draw(st.booleans()),
        ),
    }
    return draw(st.sampled_from(MODELS)), rows, cuts, options


def engine_of(name, communicator=None, **options):
    options = {"loss": "categorical", "damping": 0.1, "threads": 1, **options}
    return ke.Engine.from_onnx(model_of(name), communicator=communicator, **options)


def shard(batch, cuts, rank):
    """The examples of a rank."""
    inputs, targets = batch
    rows = slice(*cuts[rank:][:2])
    return {key: array[rows].copy() for key, array in inputs.items()}, targets[rows]


def moved(engine, result):
    """Parameters after a step along the natural gradient."""
    return {n: v - 0.05 * result.natural_gradients[n] for n, v in engine.parameters.items()}


@settings(max_examples=EXAMPLES)
@given(cases())
def test_steps_equal_those_of_one_process(case):
    name, rows, cuts, options = case
    data = list(batches(name, len(cuts), rows))
    alone, parameters, expected = engine_of(name, **options), [], []
    for batch in data:
        parameters.append({key: value.copy() for key, value in alone.parameters.items()})
        expected.append(alone.step(*batch))
        alone.set_parameters(moved(alone, expected[-1]))

    def work(communicator):
        engine, results = engine_of(name, communicator, **options), []
        for batch, edges, values in zip(data, cuts, parameters, strict=True):
            engine.set_parameters(values)
            results.append(engine.step(*shard(batch, edges, communicator.rank), gradients="all"))
        engine.synchronize()
        return results, [factor.cov for factor in engine.estimator.factors], engine.estimator.rng

    ranks = run(len(cuts[0]) - 1, work)
    for results, averages, generator in ranks:
        assert generator.bit_generator.state == alone.estimator.rng.bit_generator.state
        for result, wanted, first in zip(results, expected, ranks[0][0], strict=True):
            assert result.loss == pytest.approx(wanted.loss, rel=TOLERANCES["float64"])
            assert_arrays_near(
                result.natural_gradients, wanted.natural_gradients, TOLERANCES["float64"]
            )
            assert_arrays_near(result.gradients, wanted.gradients, TOLERANCES["float64"])
            assert_arrays_equal(result.natural_gradients, first.natural_gradients)
        for average, factor in zip(averages, alone.estimator.factors, strict=True):
            assert_arrays_near({"": average}, {"": factor.cov}, TOLERANCES["float64"])


# Place of a failure to the object and the function that fail before an average moves.
PHASES = {
    "forward": (lambda engine: engine.passes, "trace"),
    "backward": (lambda engine: engine.passes.arrays, "for_backend"),
    "statistics": (lambda engine: engine.fisher, "measure"),
}


@settings(max_examples=EXAMPLES)
@given(cases(), st.data())
def test_a_failure_of_any_rank_in_any_phase_is_refused_by_all(case, data):
    name, rows, cuts, options = case
    size = len(cuts[0]) - 1
    failing = data.draw(st.integers(0, size - 1), "failing rank")
    phase = data.draw(st.sampled_from(sorted(PHASES)), "phase")
    steps = [*batches(name, 3, rows)]

    def fail(*_, **__):
        raise MemoryError("no memory left")

    def work(communicator, *, fails):
        engine = engine_of(name, communicator, **options)
        engine.step(*shard(steps[0], cuts[0], communicator.rank))
        before = state(engine)
        is_due = engine.schedule.covariance_every == 1
        if fails and (phase != "statistics" or is_due):
            find, method = PHASES[phase]
            if communicator.rank == failing:
                object.__setattr__(find(engine), method, fail)
            with pytest.raises((ke.RankError, MemoryError)) as refused:
                engine.step(*shard(steps[1], cuts[1], communicator.rank))
            if communicator.rank == failing:
                object.__delattr__(find(engine), method)
            assert "no memory left" in str(refused.value)
            assert_same_state(before, state(engine))
        return engine.step(*shard(steps[2], cuts[0], communicator.rank)).natural_gradients

    expected = run(size, lambda communicator: work(communicator, fails=False))
    for natural, wanted in zip(
        run(size, lambda communicator: work(communicator, fails=True)), expected, strict=True
    ):
        assert_arrays_equal(natural, wanted)
