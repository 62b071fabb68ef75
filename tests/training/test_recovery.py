"""A run whose loss explodes returns to its snapshot, with smaller steps."""

import warnings
from statistics import median

import numpy as np
import pytest

import kfac_engine as ke
from kfac_engine.data import demo_model, digits
from kfac_engine.distributed.agreement import Agreement
from kfac_engine.distributed.protocol import Alone
from kfac_engine.training.optimizer import StepReport
from kfac_engine.training.recovery import Recovery

IMAGES, LABELS = digits()
DATA = {"image": IMAGES[:512]}, LABELS[:512]


def engine():
    return ke.Engine.from_onnx(
        demo_model("mlp"), loss="categorical", threads=1, gradient_dtype="float32"
    )


def run(optimizer, steps=60, **options):
    options = {"batch_size": 64, "schedule": "constant", **options}
    return ke.fit(optimizer.engine, DATA, optimizer=optimizer, steps=steps, **options)


def run_quietly(optimizer, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ke.DivergenceWarning)
        return run(optimizer, **options)


def rolled_back(history):
    return [record["step"] for record in history.records if record["rolled_back"]]


# After the roll-backs these runs are stable: rounding does not decide how they end.
EXPLODING = {"sgd": lambda e: ke.SGD(e, 30.0), "kfac": lambda e: ke.KfacOptimizer(e, 5.0)}


@pytest.mark.rounding
@pytest.mark.parametrize("name", EXPLODING)
def test_an_exploding_run_returns_to_its_snapshot_and_trains(name):
    optimizer = EXPLODING[name](engine())
    with warnings.catch_warnings(record=True) as messages:
        warnings.simplefilter("always")
        history = run(optimizer)
    assert any("steps are smaller (roll-back 1 of 3)" in str(m.message) for m in messages)
    first = rolled_back(history)[0]
    losses = [record["loss"] for record in history.records]
    assert losses[first - 1] > 100
    assert losses[first] == pytest.approx(losses[0], rel=0.2)  # another batch, the same weights
    assert max(losses[-5:]) < losses[0]
    assert optimizer.steps < len(losses)


def test_a_roll_back_makes_steps_smaller():
    sgd = run_quietly(ke.SGD(engine(), 30.0)).records
    before, after = sgd[0], sgd[-1]
    count = sum(record["rolled_back"] for record in sgd)
    assert before["learning_rate"] == 30
    assert after["learning_rate"] == pytest.approx(30 * 0.1**count)
    kfac = run_quietly(ke.KfacOptimizer(engine(), 30.0)).records
    assert kfac[-1]["damping"] == pytest.approx(
        0.01 * 10 ** sum(record["rolled_back"] for record in kfac)
    )


@pytest.mark.rounding
def test_a_roll_back_keeps_a_rate_that_was_set_after_the_snapshot():
    optimizer = ke.SGD(engine(), 30.0)

    def lower(record, _):
        if record["step"] == 2:
            optimizer.learning_rate = 25.0

    history = run_quietly(optimizer, callbacks=[lower])
    assert rolled_back(history)
    assert optimizer.learning_rate == 25.0


def test_auto_takes_shorter_updates_after_an_explosion():
    optimizer = ke.KfacOptimizer(engine(), update_length=0.1)
    optimizer.restrain()
    report = optimizer.step({"image": IMAGES[:64]}, LABELS[:64])
    assert report.learning_rate == pytest.approx(0.03)
    assert report.damping == pytest.approx(1.0)


def test_a_run_gives_up_after_its_roll_backs_with_the_weights_of_the_snapshot():
    optimizer = ke.SGD(engine(), 1e12)
    initial = optimizer.engine.parameters
    with pytest.raises(
        ke.DivergenceError, match=r"rose from .* after 2 roll-backs; the parameters"
    ):
        run_quietly(optimizer, rollbacks=2)
    assert optimizer.steps == 0
    assert all(np.array_equal(v, initial[n]) for n, v in optimizer.engine.parameters.items())


def test_a_run_without_an_explosion_has_the_bits_of_a_run_without_snapshots():
    with_snapshots, without = (
        run(ke.KfacOptimizer(engine()), rollbacks=number, steps=60) for number in (3, 0)
    )
    assert not rolled_back(with_snapshots)
    assert same(with_snapshots.engine, without.engine)


def same(one, other):
    values = other.parameters
    return all(np.array_equal(value, values[n]) for n, value in one.parameters.items())


@pytest.mark.parametrize("stop", [3, 30, 58])
@pytest.mark.parametrize("make", [EXPLODING["sgd"], EXPLODING["kfac"]], ids=["sgd", "kfac"])
def test_a_resumed_run_has_equal_bits_before_and_after_a_roll_back(make, stop, tmp_path):
    whole = run_quietly(make(engine()), steps=70)
    assert 3 < rolled_back(whole)[0] < 30
    options = {"checkpoint": tmp_path / "state", "steps": 70}
    callback = lambda record, _: record["step"] == stop  # noqa: E731 (an argument)
    run_quietly(make(engine()), callbacks=[callback], **options)
    resumed = run_quietly(make(engine()), resume=True, **options)
    assert same(whole.engine, resumed.engine)
    assert [r["loss"] for r in whole.records] == [r["loss"] for r in resumed.records]
    assert rolled_back(whole) == rolled_back(resumed)


def test_batches_with_nan_do_not_roll_back():
    images = IMAGES[:512].copy()
    images[300] = np.nan
    data = {"image": images}, LABELS[:512]
    options = {"batch_size": 64, "epochs": 2}
    optimizer = ke.Adam(engine(), non_finite="skip")
    history = ke.fit(optimizer.engine, data, optimizer=optimizer, **options)
    assert sum(record["skipped"] for record in history.records) == 2
    assert not rolled_back(history)
    optimizer = ke.Adam(engine())
    with pytest.raises(ke.NonFiniteError):
        ke.fit(optimizer.engine, data, optimizer=optimizer, **options)


class Scripted:
    """An engine and an optimizer whose losses are numbers of a list."""

    def __init__(self, losses, at_snapshot):
        self.losses, self.at_snapshot = losses, at_snapshot
        self.engine, self.passes, self.steps, self.skipped = self, self, 0, 0
        self.parameters, self.buffers, self.layers = {}, {}, ()
        self.restored, self.agreement = 0, Agreement(Alone())

    def step(self, *_):
        self.steps += 1
        return StepReport(self.losses[self.steps - 1], 0.1)

    def loss(self, *_):
        return self.at_snapshot

    def state(self):
        return ke.SavedState({"steps": self.steps})

    def restore(self, _):
        self.restored += 1

    def restrain(self):
        pass

    def set_parameters(self, _):
        pass

    set_buffers = set_parameters


NOISE = list(np.random.default_rng(0).uniform(1, 3, 60))
FELL = NOISE[:5] + [0.01] * 60
CASES = {
    "start": ([2, 3, 30, 300, 3000, 3e4, 3e5], 2.0),
    "late, above the start": ([*FELL, *[5.0] * 8], 0.01),
    "late, below the start": ([*FELL, *[0.9] * 8], 0.01),
    "memorized": ([*FELL, *[1e-6, 0.5] * 30], 1e-6),
    "hard data": ([*NOISE, *[100.0] * 8], 90.0),
    "hard data, exploded as well": ([*NOISE, *[100.0] * 8], 9.0),
    "two outliers": ([*NOISE, 1e6, 1e6, *NOISE], 2.0),
    "negative": ([-2, -1.9, -2.1, -2, -2.2, *[-2.5] * 60, *[12.0] * 8], -2.5),
    "negative, exploded": ([-2, -1.9, -2.1, -2, -2.2, *[-2.5] * 60, *[21.0] * 8], -2.5),
}
EXPLODES = {
    "start", "late, above the start", "hard data, exploded as well", "negative, exploded"
}  # fmt: skip


def expected_step(losses, at_snapshot):
    """Return the first step of a roll-back, from the rule of the documentation; None for none."""
    start = sorted(losses[:5])[1]
    reference, age = start, 0
    for step in range(5, len(losses) + 1):
        level = median(losses[step - 5 : step])
        high = level > start and level > reference + 9 * abs(reference)
        if high and losses[step - 1] > at_snapshot + 9 * abs(at_snapshot):
            return step
        age = step if step == 5 else age + 1
        if age >= 50 and not high:
            reference, age = min(reference, level), 0
    return None


@pytest.mark.filterwarnings("ignore::kfac_engine.DivergenceWarning")
@pytest.mark.parametrize("case", CASES)
def test_the_rule_of_an_explosion(case):
    losses, at_snapshot = CASES[case]
    optimizer = Scripted(losses, at_snapshot)
    recovery = Recovery(optimizer, 1)
    step = None
    for number in range(1, len(losses) + 1):
        if recovery.step(({}, None), 1.0).rolled_back:
            step = number
            break
    assert step == expected_step(losses, at_snapshot)
    assert (step is not None) == (case in EXPLODES)
    assert optimizer.restored == (step is not None)


@pytest.mark.parametrize("number", [-1, 1.5, None])
def test_a_wrong_number_of_roll_backs_is_refused(number):
    with pytest.raises(ke.InputError, match="rollbacks must be a whole number of at least 0"):
        run(ke.SGD(engine(), 0.1), rollbacks=number)
