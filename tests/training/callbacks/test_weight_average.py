"""``WeightAverage`` against sums over the weights of all steps, in float64."""

import numpy as np
import pytest

import kfac_engine as ke
from tests.comparing import same
from tests.training import norm_net as net
from tests.training.interruptions import InterruptionError, interrupt_at

EPOCHS, STEPS = 8, 3  # steps in an epoch
BUFFERS = ("mean", "variance")


def run(*callbacks, **changes):
    options = {"optimizer": "sgd", "batch_size": 16, "epochs": EPOCHS, "validation": net.batch(1)}
    return ke.fit(net.engine(), net.batch(), callbacks=callbacks, **options | changes)


def weights_of_steps():
    """The weights after each step of a run without averages."""
    seen = []
    run(lambda _, optimizer: seen.append(net.weights(optimizer.engine)))
    return seen


def weighted(seen, factors):
    """The definition: the weighted mean of the parameters in float64, and the last buffers."""
    pairs = list(zip(factors, seen, strict=True))
    means = {
        name: sum(f * w[name].astype(np.float64) for f, w in pairs) / sum(factors)
        for name in seen[0]
    }
    return means | {name: seen[-1][name] for name in BUFFERS}


def assert_close(weights, expected):
    for name, value in expected.items():
        # 24 steps in float32, each of which rounds once or twice.
        np.testing.assert_allclose(weights[name], value, rtol=1e-5, atol=1e-6, err_msg=name)


CASES = {
    "decay": ((0.8,), lambda t: 0.8 ** (24 - t)),
    "no memory": ((0.0,), lambda t: float(t == 24)),
    "tail": (("tail",), lambda t: float(t > 0.6 * 24)),
    "longer tail": (("tail", 0.25), lambda t: float(t > 6)),
    "decay from a start": ((0.9, 0.5), lambda t: 0.9 ** (24 - t) if t > 12 else 0.0),
}


@pytest.mark.parametrize(("arguments", "factor"), CASES.values(), ids=CASES)
def test_the_engine_has_the_average_after_the_run(arguments, factor):
    seen = weights_of_steps()
    average = ke.WeightAverage(*arguments)
    history = run(average)
    factors = [factor(step) for step in range(1, 25)]
    assert_close(net.weights(history.engine), weighted(seen, factors))
    if average._decay is None:
        assert average.count == sum(factors)


def test_validations_evaluate_the_average_and_steps_do_not():
    seen, (x, y) = weights_of_steps(), net.batch(1)
    plain, averaged = run(), run(ke.WeightAverage(0.8, start=0.3))
    # The optimizer takes the same steps.
    assert [r["loss"] for r in averaged.records] == [r["loss"] for r in plain.records]
    engine = net.engine()
    for step in range(STEPS, 25, STEPS):
        factors = [0.8 ** (step - t) if t > 0.3 * 24 else 0.0 for t in range(1, step + 1)]
        factors = factors if any(factors) else [*[0.0] * (step - 1), 1.0]
        mean = weighted(seen[:step], factors)
        engine.set_parameters({name: mean[name] for name in engine.parameters})
        engine.set_buffers({name: mean[name] for name in engine.buffers})
        expected = engine.evaluate(({"x": x}, y))["loss"]
        # The weights differ by roundings of float32.
        assert averaged.records[step - 1]["validation_loss"] == pytest.approx(expected, rel=1e-4)
    differs = [a["validation_loss"] != b["validation_loss"] for a, b in
               zip(plain.records[8::3], averaged.records[8::3], strict=True)]  # fmt: skip
    assert all(differs)


@pytest.mark.parametrize("arguments", [(0.8,), ("tail",)])
@pytest.mark.parametrize("step", [1, 5, 20])
def test_a_resumed_run_has_the_average_of_the_whole_run(arguments, step, tmp_path):
    def callbacks():
        return [ke.WeightAverage(*arguments), ke.BestWeights()]

    whole = run(*callbacks())
    store = {"checkpoint": tmp_path, "checkpoint_every": 1}
    with pytest.raises(InterruptionError):
        run(*callbacks(), interrupt_at(step), **store)
    resumed = run(*callbacks(), resume=True, **store)
    assert same(net.weights(resumed.engine), net.weights(whole.engine))
    for left, right in zip(resumed.records, whole.records, strict=True):
        assert {n: v for n, v in left.items() if not n.startswith("seconds")} == {
            n: v for n, v in right.items() if not n.startswith("seconds")
        }


def test_the_average_of_a_finished_run_is_not_trained_on(tmp_path):
    store = {"checkpoint": tmp_path, "resume": True, "schedule": "constant"}
    run(ke.WeightAverage(0.9), epochs=4, **store)
    longer = run(ke.WeightAverage(0.9), **store)
    whole = run(ke.WeightAverage(0.9), schedule="constant")
    assert same(net.weights(longer.engine), net.weights(whole.engine))


@pytest.mark.parametrize("order", [1, -1])
def test_best_weights_are_the_average_that_was_evaluated(order):
    seen = weights_of_steps()
    best = ke.BestWeights("accuracy")
    history = run(*[ke.WeightAverage(0.8), best][::order], metrics=["accuracy"])
    factors = [0.8 ** (best.best_step - t) for t in range(1, best.best_step + 1)]
    assert_close(net.weights(history.engine), weighted(seen[: best.best_step], factors))


def test_skipped_batches_are_not_averaged():
    x, y = net.batch()
    bad = x[:16].copy()
    bad[0] = np.nan
    batches = [(x[:16], y[:16]), (bad, y[:16]), (x[16:32], y[16:32])]
    engine, average, seen = net.engine(), ke.WeightAverage("tail", start=0), []
    optimizer = ke.SGD(engine, 0.1, non_finite="skip")
    record = [lambda _, o: seen.append(net.weights(o.engine)), average]
    ke.fit(engine, batches, optimizer=optimizer, epochs=1, callbacks=record)
    assert average.count == 2
    assert_close(net.weights(engine), weighted(seen, [1, 0, 1]))


def test_the_average_starts_anew_after_a_roll_back():
    optimizer, average, (x, y) = ke.SGD(net.engine(), 0.1), ke.WeightAverage(0.5), net.batch()
    average.on_run_start(optimizer, [])
    for rolled_back in (False, True, False):
        optimizer.step({"x": x}, y)
        average.on_step_end({"spent": 0.5, "rolled_back": rolled_back}, optimizer)
    assert average.count == 1
    weights = average.evaluated_weights({"spent": 0.5, "rolled_back": False}, optimizer)
    assert same({**weights.parameters, **weights.buffers}, net.weights(optimizer.engine))


def test_an_error_in_a_validation_leaves_the_weights_of_the_optimizer():
    seen, engine = [], net.engine()

    def fail(outputs, targets):
        seen.append(net.weights(engine))
        raise InterruptionError

    steps = [lambda _, o: steps.append(net.weights(o.engine))]
    with pytest.raises(InterruptionError):
        ke.fit(
            engine, net.batch(), optimizer="sgd", batch_size=16, epochs=1, validation=net.batch(1),
            metrics=[fail], callbacks=[ke.WeightAverage(0.8), *steps],
        )  # fmt: skip
    plain = weights_of_steps()[2]
    assert not same(seen[0], plain)
    by_hand = ke.SGD(net.engine(), 0.01)
    x, y = net.batch()
    order = np.random.default_rng([0, 0]).permutation(48)
    for step in range(3):
        chosen = order[16 * step : 16 * step + 16]
        by_hand.step({"x": x[chosen]}, y[chosen], 1.0 if step < 2 else (1 - 2 / 3) / 0.4)
    assert same(net.weights(engine), net.weights(by_hand.engine))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((1.0,), r"decay must lie in \[0, 1\)"),
        ((-0.1,), r"decay must lie in \[0, 1\)"),
        (("mean",), r"decay must lie in \[0, 1\), or be 'tail', got 'mean'"),
        ((None,), "decay"),
        (([0.9],), "decay"),
        (("tail", 1.0), r"start must lie in \[0, 1\)"),
        (("tail", "0"), "start"),
    ],
)
def test_a_wrong_argument_is_refused(arguments, message):
    with pytest.raises(ke.InputError, match=message):
        ke.WeightAverage(*arguments)
