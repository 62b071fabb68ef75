"""Optimizers over several ranks take the steps of one process on the whole batch."""

import numpy as np
import pytest

import kfac_engine as ke
from tests import models
from tests.comparing import assert_arrays_equal, assert_arrays_near
from tests.distributed.threads import rows_of, run
from tests.training import softmax_net as net, test_gauss_newton as gauss_newton

STEPS = 8
EXAMPLES = 24
# Rows of one batch by number of ranks.
CUTS = {1: [0, 24], 2: [0, 9, 24], 3: [0, 8, 12, 24], 4: [0, 1, 5, 23, 24]}
# Of the largest entry after eight steps, each of which multiplies roundings.
CLOSE = 1e-10

OPTIMIZERS = {
    "auto": lambda engine: ke.KfacOptimizer(engine, adapt_damping=True, l2=0.001),
    "given rate": lambda engine: ke.KfacOptimizer(engine, 0.05, statistics_part=1.0),
    "quadratic": lambda engine: ke.KfacOptimizer(engine, "quadratic", 1.0, "quadratic"),
    "predicted": lambda engine: ke.KfacOptimizer(
        engine, 0.05, adapt_damping=ke.DampingAdaptation(2), weight_decay=0.01
    ),
    "gauss-newton": ke.GaussNewton,
    "adam": lambda engine: ke.Adam(engine, 0.01),
    "muon": lambda engine: ke.Muon(engine, 0.01),
}


def engine_on(communicator=None, **options):
    """An engine of one rank, or of one process."""
    return ke.Engine.from_onnx(
        net.model(), loss="categorical", communicator=communicator, threads=1, **options
    )


def part_of(step, communicator=None):
    """The part of a rank of the batch of a step, or all of it."""
    x, y = net.batch(step, n=EXAMPLES)
    rows = rows_of(communicator, CUTS) if communicator else slice(None)
    return {"x": x[rows]}, y[rows]


def trained(make, communicator=None, **options):
    """The reports of some steps, the parameters after each step, and the optimizer."""
    engine = engine_on(communicator, **options)
    optimizer, reports, parameters = make(engine), [], []
    for step in range(STEPS):
        reports.append(optimizer.step(*part_of(step, communicator)))
        parameters.append({n: v.copy() for n, v in engine.parameters.items()})
    return reports, parameters, optimizer


@pytest.mark.parametrize("distribution", ["replicate", "shard"])
@pytest.mark.parametrize(("size", "reduction"), [(2, "mean"), (3, "sum")])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_equal_those_of_one_process(name, size, reduction, distribution):
    make, options = OPTIMIZERS[name], {"reduction": reduction}
    assert_equal(trained(make, **options), size, make, distribution=distribution, **options)


# Rows of the sets of an equation in each part of the batch, and in each process of "ranks".
DIVIDED = {
    "parts": {"inside x": [0, 4, 15, 20], "ends x": [0, 5, 7, 8]},
    "replicate": {"inside x": [0, 13, 20], "ends x": [0, 2, 8]},
    "shard": {"inside x": [0, 1, 9, 20], "ends x": [0, 3, 7, 8]},
}


@pytest.mark.parametrize("division", DIVIDED)
@pytest.mark.parametrize("name", ["given rate", "quadratic", "auto", "step of the engine"])
def test_sets_of_examples_have_the_random_targets_of_one_process(name, division):
    model, losses, (inputs, _), _ = gauss_newton.equation(20)
    cuts = DIVIDED[division]
    pairs = [{n: (c[i], c[i + 1]) for n, c in cuts.items()} for i in range(len(cuts["ends x"]) - 1)]
    parts = [{n: inputs[n][start:stop] for n, (start, stop) in each.items()} for each in pairs]

    def stepped(batch, communicator=None):
        options = {} if communicator is None else {"distribution": division}
        engine = ke.Engine.from_onnx(
            model, loss=losses, communicator=communicator, threads=1, **options
        )
        if name == "step of the engine":
            results = [engine.step(batch, gradients="all") for _ in range(3)]
            return results[-1].loss, results[-1].natural_gradients
        optimizer = OPTIMIZERS[name](engine)
        return [optimizer.step(batch).loss for _ in range(6)][-1], engine.parameters

    loss, expected = stepped([(inputs, None)])
    if division == "parts":
        found = [stepped([(part, None) for part in parts])]
    else:
        found = run(len(parts), lambda ranks: stepped([(parts[ranks.rank], None)], ranks))
    for its_loss, arrays in found:
        assert its_loss == pytest.approx(loss, rel=1e-8)
        assert_arrays_near(arrays, expected, 1e-8)


@pytest.mark.parametrize("distribution", ["replicate", "shard"])
def test_small_shards_have_statistics_of_all_examples(distribution):
    """Where a shard has no example of a part of the batch, all shards are measured whole."""
    rule = "quadratic", 1.0, "quadratic"
    expected = trained(lambda e: ke.KfacOptimizer(e, *rule, statistics_part=1.0))
    assert_equal(expected, 4, OPTIMIZERS["quadratic"], distribution=distribution)


def assert_equal(expected, size, make, **options):
    ranks = run(size, lambda communicator: trained(make, communicator, **options))
    for reports, parameters, _ in ranks:
        for report, wanted in zip(reports, expected[0], strict=True):
            assert report.loss == pytest.approx(wanted.loss, rel=CLOSE)
            assert report.learning_rate == pytest.approx(wanted.learning_rate, rel=1e-6)
            assert report.refreshed == wanted.refreshed
            assert (report.reduction_ratio is None) == (wanted.reduction_ratio is None)
        for now, then, first in zip(parameters, expected[1], ranks[0][1], strict=True):
            assert_arrays_near(now, then, CLOSE)
            assert_arrays_equal(now, first)


@pytest.mark.parametrize("distribution", ["replicate", "shard"])
def test_a_model_may_have_no_natural_gradients(distribution):
    """Adam updates shifts, so that no rank owns a product."""
    model = models.written("N,3", "b(3)", "output = Add(input, b)", "double")
    x, y = np.random.default_rng(0).standard_normal((EXAMPLES, 3)), np.arange(EXAMPLES) % 3

    def work(communicator):
        engine = ke.Engine.from_onnx(
            model, loss="categorical", communicator=communicator, distribution=distribution
        )
        optimizer, rows = ke.KfacOptimizer(engine), rows_of(communicator, CUTS)
        for _ in range(2):
            optimizer.step({"input": x[rows]}, y[rows])
        return engine.parameters

    (expected,) = run(1, work)
    for parameters in run(2, work):
        assert_arrays_near(parameters, expected, CLOSE)


def test_a_state_continues_on_another_number_of_ranks(tmp_path):
    make, file = OPTIMIZERS["auto"], tmp_path / "state.safetensors"
    _, expected, _ = trained(make)

    def work(communicator, steps):
        engine = engine_on(communicator)
        optimizer = make(engine)
        if file.exists():
            optimizer.load(file)
        for step in steps:
            optimizer.step(*part_of(step, communicator))
        optimizer.save(file)
        return engine.parameters, optimizer.steps

    run(3, lambda ranks: work(ranks, range(3)))
    run(1, lambda ranks: work(ranks, range(3, 5)))
    for parameters, steps in run(2, lambda ranks: work(ranks, range(5, STEPS))):
        assert steps == STEPS
        assert_arrays_near(parameters, expected[-1], CLOSE)


@pytest.mark.parametrize(
    ("name", "distribution"),
    [
        ("auto", "replicate"),
        ("auto", "shard"),
        ("quadratic", "shard"),
        ("gauss-newton", "replicate"),
        ("adam", "replicate"),
    ],
)
@pytest.mark.parametrize("failure", ["input", "rate", "memory"])
def test_an_error_of_one_rank_is_that_of_all(name, distribution, failure):
    """No rank takes the step, and all of them take the next one."""
    make = OPTIMIZERS[name]
    _, expected, _ = trained(make)

    def work(communicator):
        engine = engine_on(communicator, distribution=distribution)
        optimizer = make(engine)
        for step in range(STEPS):
            if step == 4:
                before = {n: v.copy() for n, v in engine.parameters.items()}
                fails = communicator.rank == 1
                (inputs, targets), rate = part_of(step, communicator), optimizer.learning_rate
                if fails and failure == "input":
                    inputs["x"][0] = np.nan
                elif fails and failure == "rate":
                    optimizer.learning_rate = lambda step: "none"
                elif fails:
                    object.__setattr__(optimizer, "_check_slots", _no_memory)
                with pytest.raises(ke.KfacError, match="rank 1 of 2 refused") as caught:
                    optimizer.step(inputs, targets)
                assert (failure == "input") == isinstance(caught.value, ke.NonFiniteError)
                assert_arrays_equal(before, engine.parameters)
                assert optimizer.steps == 4
                optimizer.learning_rate = rate
                optimizer.__dict__.pop("_check_slots", None)
            optimizer.step(*part_of(step, communicator))
        return engine.parameters

    for parameters in run(2, work):
        assert_arrays_near(parameters, expected[-1], CLOSE)


def _no_memory(*_):
    raise MemoryError("no memory left")


@pytest.mark.parametrize("distribution", ["replicate", "shard"])
def test_a_rank_that_fails_before_a_refresh_is_an_error_of_all(distribution):
    """Some steps refresh without statistics, others measure without a refresh."""

    def work(communicator):
        engine = engine_on(communicator, distribution=distribution)
        optimizer = ke.KfacOptimizer(engine, 0.01, statistics_every=2, refresh_every=3)
        batch, refreshed = part_of(0, communicator), []
        for step in range(9):
            due = optimizer._curvature.due(step, 2 * len(batch[1]))
            with pytest.MonkeyPatch.context() as patch:
                if communicator.rank == 1:
                    patch.setattr(engine.estimator.factors[0], "wait", _no_memory)
                if due.statistics or due.refreshes:
                    with pytest.raises(ke.RankError, match="rank 1 of 2 refused: MemoryError"):
                        optimizer.step(*batch)
            refreshed.append(bool(optimizer.step(*batch).refreshed))
        return refreshed

    first, second = run(2, work)
    assert first == second
    assert first[5]  # statistics are due in even steps


def test_all_ranks_skip_a_batch_that_one_of_them_cannot_use():
    def work(communicator):
        optimizer = ke.KfacOptimizer(engine_on(communicator), non_finite="skip")
        inputs, targets = part_of(0, communicator)
        optimizer.step(inputs, targets)
        if communicator.rank == 0:
            inputs["x"][0] = np.inf
        report = optimizer.step(inputs, targets)
        return report.skipped, optimizer.skipped, optimizer.steps

    assert run(2, work) == [(True, 1, 1)] * 2


@pytest.mark.parametrize(("distribution", "gathered"), [("replicate", 0), ("shard", 1)])
def test_a_step_without_statistics_sends_gradients_and_products(distribution, gathered):
    def work(communicator):
        engine = engine_on(communicator, distribution=distribution)
        optimizer = ke.KfacOptimizer(engine)
        for _ in range(5):
            before = len(communicator.log)
            optimizer.step(*part_of(0, communicator))
        powers = optimizer.state().arrays["feature_powers"].values()
        sizes = [v.nbytes for v in engine.parameters.values()]
        of_weights = sum(v.nbytes for v in engine.parameters.values() if v.ndim > 1)
        of_features = sum(v.nbytes for v in powers)
        return communicator.log[before:], sum(sizes), of_features, of_weights

    for log, size, features, weights in run(2, work):
        # Votes of two ranks have a mark, a place and eight numbers of each.
        votes = [entry for entry in log if entry == ("allreduce", 2 * 10 * 8)]
        assert len(votes) == 4  # one of them sums the loss, the squared residuals and the weights
        messages = [entry for entry in log if entry not in votes]
        fingerprints = ("allgather", 8 * EXAMPLES)
        # Inputs and errors, which tell whether few rows of classes have noise.
        rows = ("allgather", 8 * EXAMPLES * (net.D + net.K))
        gathers = [("allgather", weights)] * gathered
        assert messages == [("allreduce", size + features), fingerprints, rows, *gathers]
