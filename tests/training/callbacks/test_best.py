"""``EarlyStop`` and ``BestWeights`` on validations of chosen values, and on real ones."""

import numpy as np
import pytest

import kfac_engine as ke
from tests.comparing import same
from tests.training import norm_net as net
from tests.training.interruptions import InterruptionError, interrupt_at

EPOCHS, STEPS = 12, 3  # steps in an epoch
PLAN = [5.0, 3.0, 3.0, 2.9, 4.0, 1.0, 1.5, 1.2, 1.1, 0.9, 2.0, 2.0]


class Planned:
    """A validation metric with a chosen value for each validation: the one of its epoch."""

    __name__ = "planned"

    def __init__(self, values):
        self.values, self.calls = values, 0

    def __call__(self, outputs, targets):
        self.calls += 1
        return np.full(len(targets), self.values[self.calls - 1])


class Weights(ke.Callback):
    """The weights after each epoch, by step."""

    def __init__(self):
        self.after = {}

    def on_epoch_end(self, record, optimizer):
        self.after[record["step"]] = net.weights(optimizer.engine)


def run(*callbacks, plan=PLAN, **changes):
    options = {
        "optimizer": "sgd", "batch_size": 16, "epochs": EPOCHS, "schedule": "constant",
        "metrics": [Planned(plan)], "validation": net.batch(1, n=16),  # one batch
    }  # fmt: skip
    return ke.fit(net.engine(), net.batch(), callbacks=callbacks, **options | changes)


# -- early stop ------------------------------------------------------------------------------------


def epochs_until_stop(values, patience, least_change, sign):
    """The definition: the first epoch after ``patience`` epochs without an improvement."""
    best, last = None, 0
    for epoch, value in enumerate(values, 1):
        if best is None or sign * (best - value) > least_change:
            best, last = value, epoch
        if epoch - last >= patience:
            return epoch
    return len(values)


@pytest.mark.parametrize("seed", range(8))
def test_early_stop_ends_the_run_after_validations_without_improvement(seed):
    rng = np.random.default_rng(seed)
    plan = list(rng.integers(0, 8, EPOCHS) / 4 + np.linspace(1, 0, EPOCHS))
    patience, least_change = int(rng.integers(1, 5)), float(rng.choice([0.0, 0.3]))
    better = ["lower", "higher"][seed % 2]
    stop = ke.EarlyStop("planned", patience, least_change, better)
    history = run(stop, plan=plan)
    expected = epochs_until_stop(plan, patience, least_change, 1 if better == "lower" else -1)
    assert len(history.records) == STEPS * expected
    assert stop.ended == (stop.waits == patience)


def test_early_stop_returns_the_best_value_and_its_step():
    stop = ke.EarlyStop("planned", patience=3, better="lower")
    assert stop.best is None
    run(stop)
    assert (stop.best, stop.best_step) == (1.0, 18)
    stop = ke.EarlyStop("planned", patience=3, better="higher")
    run(stop)
    assert (stop.best, stop.best_step, stop.ended) == (5.0, 3, True)


@pytest.mark.parametrize("step", [1, 9, 16, 20])
def test_a_resumed_run_continues_the_count_of_early_stop(step, tmp_path):
    def stop():
        return ke.EarlyStop("planned", patience=4, least_change=0.5, better="lower")

    whole = run(stop())
    assert len(whole.records) == 10 * STEPS
    store = {"checkpoint": tmp_path, "checkpoint_every": 1}
    with pytest.raises(InterruptionError):
        run(stop(), interrupt_at(step), **store)
    # The interrupted run has evaluated after the epochs before the checkpoint.
    rest = PLAN[(step - 1) // STEPS :]
    resumed = run(stop(), plan=rest, resume=True, **store)
    assert [r["loss"] for r in resumed.records] == [r["loss"] for r in whole.records]
    assert same(net.weights(resumed.engine), net.weights(whole.engine))


def test_a_run_that_has_stopped_early_continues_with_more_patience_only(tmp_path):
    store = {"checkpoint": tmp_path, "resume": True}

    def stop(patience):
        return ke.EarlyStop("planned", patience, least_change=0.5, better="lower")

    first = run(stop(4), **store)
    again = run(stop(4), plan=PLAN[10:], **store)
    assert again.records == first.records
    assert len(first.records) == 10 * STEPS
    assert len(run(stop(5), plan=PLAN[10:], **store).records) == 11 * STEPS


# -- best weights ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("better", "step"), [("lower", 30), ("higher", 3)])
def test_best_weights_are_those_of_the_best_validation(better, step):
    seen, best = Weights(), ke.BestWeights("planned", better)
    history = run(best, seen)
    assert same(net.weights(history.engine), seen.after[step])
    # Neither the parameters nor the running statistics are those of the last step.
    last = seen.after[EPOCHS * STEPS]
    assert not any(np.array_equal(last[n], v) for n, v in seen.after[step].items())
    assert best.best_step == step
    values = PLAN if better == "higher" else [-value for value in PLAN]
    running = [int(np.argmax(values[: epoch + 1])) for epoch in range(EPOCHS)]
    steps = [r["best_step"] for r in history.records if "planned" in r]
    assert steps == [STEPS * (epoch + 1) for epoch in running]
    assert history.metrics == {"planned": PLAN[step // STEPS - 1]}


def test_the_metrics_of_the_history_are_those_of_the_best_weights():
    history = run(ke.BestWeights("accuracy"), metrics=["loss", "accuracy"])
    x, y = net.batch(1, n=16)
    values = history.engine.evaluate(({"x": x}, y), metrics=["loss", "accuracy"])
    # The same batch with the same weights.
    assert history.metrics == {
        "validation_loss": values["loss"], "accuracy": values["accuracy"]
    }  # fmt: skip
    accuracies = [record["accuracy"] for record in history.records if "accuracy" in record]
    assert history.metrics["accuracy"] == max(accuracies)


@pytest.mark.parametrize("step", [1, 9, 16, 32])
def test_a_resumed_run_has_the_best_weights_of_the_whole_run(step, tmp_path):
    whole = run(ke.BestWeights("planned", "lower"))
    store = {"checkpoint": tmp_path, "checkpoint_every": 1}
    with pytest.raises(InterruptionError):
        run(ke.BestWeights("planned", "lower"), interrupt_at(step), **store)
    rest = PLAN[(step - 1) // STEPS :]
    resumed = run(ke.BestWeights("planned", "lower"), plan=rest, resume=True, **store)
    assert same(net.weights(resumed.engine), net.weights(whole.engine))
    assert [r.get("best_step") for r in resumed.records] == [
        r.get("best_step") for r in whole.records
    ]


def test_a_validation_at_the_end_within_an_epoch_counts():
    def end(record, optimizer):
        return record["step"] == 5

    seen = []
    best = ke.BestWeights("planned", "lower")
    history = run(best, end, lambda _, optimizer: seen.append(net.weights(optimizer.engine)))
    assert best.best_step == 5
    assert same(net.weights(history.engine), seen[4])


# -- refusals --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ke.EarlyStop("f1"), "cannot know which values of 'f1' are better"),
        (lambda: ke.BestWeights("f1"), "cannot know which values of 'f1' are better"),
        (lambda: ke.EarlyStop("loss"), "'loss' is the loss of a batch"),
        (lambda: ke.EarlyStop(3), "metric must be the name"),
        (lambda: ke.EarlyStop("top3", better="lower"), "higher values of 'top3' are better"),
        (lambda: ke.BestWeights("accuracy", ["lower"]), "better must be 'higher' or 'lower'"),
        (lambda: ke.BestWeights(better="higher"), "lower values of 'validation_loss' are better"),
        (lambda: ke.EarlyStop(patience=0), "patience must be a whole number of at least 1"),
        (lambda: ke.EarlyStop(patience=2.5), "patience must be a whole number"),
        (lambda: ke.EarlyStop(least_change=-1), "least_change must be at least 0"),
    ],
)
def test_a_wrong_argument_is_refused(make, message):
    with pytest.raises(ke.InputError, match=message):
        make()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"validation": None}, "EarlyStop reads .* has no validation; give validation="),
        ({"metrics": ["accuracy"]}, "'validation_loss', and the run has 'accuracy'; give"),
    ],
)
def test_a_metric_that_is_not_measured_is_refused_before_the_first_step(changes, message):
    steps = []
    with pytest.raises(ke.InputError, match=message):
        run(ke.EarlyStop(), lambda record, _: steps.append(record), **changes)
    assert not steps


def test_two_callbacks_that_choose_the_final_weights_are_refused():
    with pytest.raises(ke.InputError, match="BestWeights and BestWeights replace the same"):
        run(ke.BestWeights(), ke.BestWeights("accuracy"), metrics=None)


@pytest.mark.parametrize("name", ["validation_loss", "mean_squared_error", "top4", "accuracy"])
def test_the_metrics_of_the_library_have_a_direction(name):
    higher = name in {"top4", "accuracy"}
    record = {"step": 1, name: 0.5}
    best = ke.BestWeights(name)
    best.on_validation_end(record, optimizer := ke.SGD(net.engine(), 0.1))
    best.on_validation_end({"step": 2, name: 0.6}, optimizer)
    best.on_validation_end({"step": 3, name: 0.4}, optimizer)
    assert best.best_step == (2 if higher else 3)
