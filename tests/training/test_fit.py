"""``fit``: the loop against the same loop written out, bit-exact resumption, refusals."""

import json
import signal
import warnings
from itertools import pairwise

import numpy as np
import pytest

import kfac_engine as ke
from kfac_engine.training.budget import SCHEDULES, Budget, Position
from tests.comparing import assert_arrays_equal, same
from tests.models import parsed
from tests.training import softmax_net as net
from tests.training.interruptions import InterruptionError, interrupt_at

N = 50  # examples: three batches of 16 in an epoch, two examples left out


@pytest.fixture
def data():
    return net.batch(n=N)


def parameters(history):
    return history.engine.parameters


def options(**changes):
    return {"optimizer": "sgd", "epochs": 4, "batch_size": 16} | changes


# -- the loop --------------------------------------------------------------------------------------


def test_fit_is_the_loop_of_shuffled_batches(data):
    x, y = data
    history = ke.fit(net.engine(), data, **options(seed=3))
    by_hand = ke.SGD(net.engine(), 0.01)
    step = 0
    for epoch in range(4):
        order = np.random.default_rng([3, epoch]).permutation(N)
        for start in (0, 16, 32):
            chosen = order[start : start + 16]
            spent = step / 12
            scale = 1.0 if spent <= 0.6 else (1 - spent) / 0.4
            report = by_hand.step({"x": x[chosen]}, y[chosen], scale)
            record = history.records[step]
            assert record["loss"] == report.loss
            assert (record["step"], record["epoch"]) == (step + 1, epoch)
            assert record["learning_rate"] == pytest.approx(0.01 * scale)
            step += 1
    assert len(history.records) == 12
    assert same(parameters(history), by_hand.engine.parameters)
    assert all(a["seconds"] <= b["seconds"] for a, b in pairwise(history.records))


def test_another_seed_is_another_order(data):
    one, other = (ke.fit(net.engine(), data, **options(seed=seed)) for seed in (0, 1))
    assert not same(parameters(one), parameters(other))


def test_batches_come_in_the_order_of_an_iterable(data):
    x, y = data
    batches = [({"x": x[i : i + 7]}, y[i : i + 7]) for i in range(0, 49, 7)]
    history = ke.fit(net.engine(), batches, **options(epochs=2, schedule="constant"))
    by_hand = ke.SGD(net.engine(), 0.01)
    for inputs, targets in batches * 2:
        by_hand.step(inputs, targets)
    assert same(parameters(history), by_hand.engine.parameters)
    assert [record["epoch"] for record in history.records] == [0] * 7 + [1] * 7


class Endless:
    """Batches without a length."""

    def __iter__(self):
        step = 0
        while True:
            x, y = net.batch(step)
            yield x, y
            step += 1


def test_an_iterable_may_have_no_end():
    assert len(ke.fit(net.engine(), Endless(), optimizer="adam", steps=5).records) == 5


def test_the_budget_that_is_spent_first_ends_the_run(data):
    assert len(ke.fit(net.engine(), data, **options(steps=5)).records) == 5
    assert len(ke.fit(net.engine(), data, **options(steps=500)).records) == 12
    # A budget of seconds that is spent after the first step.
    assert len(ke.fit(net.engine(), data, **options(seconds=1e-9)).records) == 1


def test_fewer_examples_than_a_batch_are_one_batch(data):
    history = ke.fit(net.engine(), data, **options(batch_size=1000, epochs=3))
    assert len(history.records) == 3


def test_a_validation_is_recorded_at_the_end_of_epochs_and_of_the_run(data):
    x, y = net.batch(7, n=20)
    engine = net.engine()
    history = ke.fit(
        engine, data, validation=(x, y), metrics=("loss", "accuracy"), **options(steps=5)
    )
    found = ["validation_loss" in record for record in history.records]
    assert found == [False, False, True, False, True]
    last = history.records[-1]
    theta = engine.parameters
    assert last["validation_loss"] == pytest.approx(net.loss(theta, x, y), rel=1e-12)
    assert last["accuracy"] == np.mean(net.forward(theta, x)[1].argmax(1) == y)


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("optimizer", ["kfac", "adam"])
def test_records_have_the_loss_of_each_output(optimizer, accumulate):
    rng = np.random.default_rng(0)
    weights = {"a": rng.standard_normal((3, 2)), "b": rng.standard_normal((3, 1))}
    signature = "n (double[n,3] x) => (double[n,2] y, double[n,1] z)"
    model = parsed(signature + " { y = MatMul (x, a) z = MatMul (x, b) }", weights)
    x = rng.standard_normal((12, 3))
    targets = {"y": rng.standard_normal((12, 2)), "z": (rng.random((12, 1)) > 0.5) * 1.0}
    losses = {"y": ke.Normal(weight=3), "z": "multi_bernoulli"}
    history = ke.fit(
        model, (x, targets), loss=losses, optimizer=optimizer, accumulate=accumulate,
        batch_size=12 // accumulate, steps=1,
    )  # fmt: skip
    record = history.records[0]
    # The negative log probability of normal targets of variance ½, and of binary ones.
    squares = ((x @ weights["a"] - targets["y"]) ** 2 + 0.5 * np.log(np.pi)).sum(axis=1)
    logits = x @ weights["b"]
    binary = (np.logaddexp(0, logits) - targets["z"] * logits).sum(axis=1)
    assert record["loss/y"] == pytest.approx(3 * squares.mean())
    assert record["loss/z"] == pytest.approx(binary.mean())
    assert record["loss"] == pytest.approx(record["loss/y"] + record["loss/z"])
    assert "loss/y" not in history.metrics


@pytest.mark.parametrize(
    ("losses", "callbacks", "warns"),
    [
        ([2, 1, 1.1, 1.2, 1.2, 1.3, 1.6], [], True),
        ([2, 1, 1.1, 1.6, 1.2, 1.3, 1.4], [], False),  # too little
        ([2, 3, 1, 1.2, 1.2, 1.3, 1.6], [], False),  # too short
        ([-3, -4, -3, -3, -3, -3, -1], [], True),
        ([2, 1, 1.1, 1.2, 1.2, 1.3, 1.6], [ke.BestWeights()], False),
    ],
)
def test_a_validation_loss_that_has_risen_for_long_is_said(
    data, losses, callbacks, warns, monkeypatch
):
    values = iter(losses)
    monkeypatch.setattr(
        ke.Engine, "evaluate", lambda *_, **__: {"loss": float(next(values)), "accuracy": 0.5}
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ke.fit(net.engine(), data, validation=data, callbacks=callbacks, **options(epochs=7))
    said = [str(w.message) for w in caught if w.category is ke.OverfittingWarning]
    assert len(said) == warns
    assert not said or ("in step 6" in said[0] and "in step 21" in said[0])


@pytest.mark.parametrize("optimizer", ["kfac", "adam", "muon", "sgd"])
def test_numbers_of_records_are_those_of_python(data, optimizer):
    history = ke.fit(net.engine(), data, **options(optimizer=optimizer, steps=2, epochs=None))
    values = [value for record in history.records for value in record.values()]
    assert {type(value) for value in values} <= {int, float, bool, type(None), list, tuple, str}


def test_a_callback_that_ends_the_run_with_an_epoch_costs_no_second_validation(data, monkeypatch):
    evaluated = []
    evaluate = ke.Engine.evaluate
    monkeypatch.setattr(
        ke.Engine, "evaluate", lambda *args, **more: evaluated.append(1) or evaluate(*args, **more)
    )

    def at_the_end_of_an_epoch(record, optimizer):
        return "validation_loss" in record

    history = ke.fit(
        net.engine(), data, callbacks=[at_the_end_of_an_epoch], validation=data, **options()
    )
    assert len(evaluated) == 1
    assert [record["epoch"] for record in history.records] == [0] * len(history.records)


def lines_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_log_has_a_line_of_json_for_each_record(data, tmp_path):
    path = tmp_path / "run.jsonl"
    x, y = net.batch(7)
    history = ke.fit(net.engine(), data, log=path, validation=(x, y), **options())
    first, *records, last = lines_of(path)
    assert records == history.records
    assert first == {"run": history.description}
    assert last.keys() == {"spectra"}


def test_a_skipped_batch_has_no_loss_in_the_log(data, tmp_path):
    x, y = net.batch()
    bad = x.copy()
    bad[0] = np.nan
    optimizer = ke.SGD(net.engine(), 0.1, non_finite="skip")
    batches = [(x, y), (bad, y), (x, y)]
    path = tmp_path / "run.jsonl"
    history = ke.fit(optimizer.engine, batches, optimizer=optimizer, epochs=1, log=path)
    losses = [line["loss"] for line in lines_of(path) if "loss" in line]
    assert losses[1] is None
    assert losses[0] == history.records[0]["loss"]
    assert optimizer.skipped == 1


# -- resumption ------------------------------------------------------------------------------------


def without_times(record):
    return {name: value for name, value in record.items() if not name.startswith("seconds")}


@pytest.mark.parametrize("optimizer", ["kfac", "adam"])
@pytest.mark.parametrize("given", ["arrays", "batches"])
def test_a_run_resumes_with_equal_bits(data, optimizer, given, tmp_path):
    x, y = data
    if given == "batches":
        data = [(x[i : i + 10], y[i : i + 10]) for i in range(0, 50, 10)]

    def run(**more):
        log = tmp_path / "run.jsonl"
        changes = {"optimizer": optimizer, "log": log, "validation": net.batch(7)}
        return ke.fit(net.engine(), data, **options(**changes, **more))

    whole = run()
    store = {"checkpoint": tmp_path / "run", "checkpoint_every": 2}
    with pytest.raises(InterruptionError):
        run(**store, callbacks=[interrupt_at(6)])
    # The last checkpoint is that of step 4: step 6 is lost and done again.
    resumed = run(**store, resume=True)
    assert same(parameters(whole), parameters(resumed))
    assert len(whole.records) == len(resumed.records)
    for left, right in zip(whole.records, resumed.records, strict=True):
        assert without_times(left) == without_times(right)
    assert lines_of(tmp_path / "run.jsonl")[1:-1] == resumed.records


def send_signal(record, optimizer):
    if record["step"] == 4:
        signal.raise_signal(signal.SIGINT)


def stop(record, optimizer):
    return record["step"] == 4


# Each ends a run whose epochs have three steps, the last one after an epoch.
ENDS = {
    "callback": {"callbacks": [stop]},
    "signal": {"callbacks": [send_signal]},
    "steps": {"steps": 4},
    "seconds": {"seconds": 1e-9},
    "callback at the end of an epoch": {"callbacks": [lambda record, _: record["step"] == 6]},
}


@pytest.mark.parametrize("end", ENDS)
def test_a_run_that_ends_inside_an_epoch_resumes_as_if_it_had_not_ended(data, end, tmp_path):
    x, y = net.batch(7)
    falling = x, (y + 1) % 3  # the validation loss rises, so that each validation counts

    def run(callbacks=(), **more):
        stops, best = ke.EarlyStop(patience=4), ke.BestWeights()
        given = {"schedule": "constant", "validation": falling, "epochs": 8, "learning_rate": 0.3}
        every = [stops, best, ke.WeightAverage(0.9), *callbacks]
        history = ke.fit(net.engine(), data, **options(callbacks=every, **given | more))
        return history, stops, best

    whole, stops, best = run()
    store = {"checkpoint": tmp_path, "log": tmp_path / "run.jsonl"}
    if end == "signal":
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        with pytest.raises(KeyboardInterrupt):
            run(**store, **ENDS[end])
        signal.signal(signal.SIGINT, before)
    else:
        first = run(**store, **ENDS[end])[0]
        assert "validation_loss" in first.records[-1]
        again = run(**store, resume=True, steps=len(first.records))[0]
        assert same(parameters(first), parameters(again))
        assert again.records == first.records
        assert lines_of(tmp_path / "run.jsonl")[1:] == again.records
    resumed, later_stops, later_best = run(**store, resume=True)
    assert same(parameters(whole), parameters(resumed))
    assert (stops.waits, best.best_step) == (later_stops.waits, later_best.best_step)
    for left, right in zip(whole.records, resumed.records, strict=True):
        # The part of the budget that is spent depends on the budget.
        assert without_times(left) | {"spent": 0} == without_times(right) | {"spent": 0}


def test_a_finished_run_is_not_continued_and_a_longer_one_is(data, tmp_path):
    store = {"checkpoint": tmp_path, "resume": True, "schedule": "constant"}
    first = ke.fit(net.engine(), data, **options(epochs=2, **store))
    again = ke.fit(net.engine(), data, **options(epochs=2, **store))
    assert again.records == first.records
    assert same(parameters(first), parameters(again))
    longer = ke.fit(net.engine(), data, **options(epochs=4, **store))
    whole = ke.fit(net.engine(), data, **options(epochs=4, schedule="constant"))
    assert len(longer.records) == 12
    assert same(parameters(longer), parameters(whole))


def test_a_checkpoint_is_written_after_each_epoch(data, tmp_path):
    with pytest.raises(InterruptionError):
        ke.fit(net.engine(), data, checkpoint=tmp_path, callbacks=[interrupt_at(5)], **options())
    resumed = ke.fit(net.engine(), data, checkpoint=tmp_path, resume=True, **options())
    assert len(resumed.records) == 12


@pytest.mark.parametrize("change", [{"seed": 1}, {"batch_size": 8}])
def test_a_run_of_other_options_is_not_resumed(data, change, tmp_path):
    ke.fit(net.engine(), data, checkpoint=tmp_path, **options())
    engine = net.engine()
    with pytest.raises(ke.InputError, match=rf"and this run has {next(iter(change))}="):
        ke.fit(engine, data, checkpoint=tmp_path, resume=True, **options(**change))
    assert same(engine.parameters, net.weights())


def test_the_state_of_an_optimizer_alone_is_not_resumed(data, tmp_path):
    ke.SGD(net.engine(), 0.01).save(tmp_path / "training.safetensors")
    with pytest.raises(ke.InputError, match="is the state of an optimizer, not of fit"):
        ke.fit(net.engine(), data, checkpoint=tmp_path, resume=True, **options())


# -- schedules, budgets and refusals ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("constant", [1, 1, 1, 1, 1]),
        ("cosine", [1, 0.5 + 0.5**1.5, 0.5, 0.5 - 0.5**1.5, 0]),
        ("tail", [1, 1, 1, 0.625, 0]),
    ],
)
def test_a_schedule_is_a_function_of_the_part_spent(name, values):
    factors = [SCHEDULES[name](spent) for spent in (0, 0.25, 0.5, 0.75, 1)]
    assert factors == pytest.approx(values, abs=1e-15)


def test_a_schedule_may_be_a_function(data):
    parts = []

    def schedule(spent):
        parts.append(spent)
        return 0.0

    history = ke.fit(net.engine(), data, **options(epochs=2, schedule=schedule))
    assert parts == pytest.approx([i / 6 for i in range(6)])
    assert same(parameters(history), net.weights())


def test_the_largest_part_of_a_budget_counts():
    budget = Budget(epochs=4, steps=100, seconds=10.0)
    position = Position(epoch=1, batch=5, steps=15, seconds=2.0)
    assert budget.spent(position, per_epoch=10) == 0.375
    assert budget.spent(position, per_epoch=None) == 0.25
    assert Budget(None, 100, 10.0).spent(position, 10) == 0.2
    assert Budget(None, 10, None).spent(position, 10) == 1.0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"epochs": 0}, "epochs must be a whole number of at least 1"),
        ({"steps": 1.5}, "steps must be a whole number"),
        ({"seconds": -1}, "seconds must be a positive number"),
        ({"batch_size": 0}, "batch_size must be a whole number"),
        ({"seed": -1}, "seed must be a whole number"),
        ({"schedule": 1}, "schedule must be one of constant, cosine, tail, or a function"),
        ({"optimizer": 3}, "optimizer must be one of kfac, gauss_newton"),
        ({"resume": True}, "to resume a run, give its folder"),
        ({"checkpoint_every": 0}, "checkpoint_every must be a whole number"),
        ({"metrics": "loss"}, "metrics must be a list"),
        ({"log": "missing/folder/run.jsonl"}, "cannot be written: name a file in an exist"),
        ({"callbacks": [ke.BestWeights]}, r"give BestWeights\(…\), not the class itself"),
        ({"loss": np.arange(3)}, r"inputs and targets are one argument: fit\(model, \(inputs"),
    ],
)
def test_a_wrong_option_is_refused(data, changes, message):
    with pytest.raises(ke.InputError, match=message):
        ke.fit(net.engine(), data, **options(**changes))


@pytest.mark.parametrize(
    "change", [{"optimizer": "lbfgs"}, {"schedule": "step"}, {"metrics": ["f1"]}]
)
def test_an_unknown_name_lists_the_known_ones(data, change):
    with pytest.raises(ke.UnknownNameError, match="choose one of"):
        ke.fit(net.engine(), data, **options(**change))


@pytest.mark.parametrize(
    ("change", "advice"),
    [
        ({"lr": 0.1}, "has no option 'lr'; the options of 'sgd' are: learning_rate, momentum"),
        ({"epoch": 3}, r"did you mean 'epochs'\?"),
        ({"learning_rat": 0.1}, r"did you mean 'learning_rate'\?"),
        (
            {"trainable": "w1"},
            "it is an option of Engine.from_onnx: pass an engine in place of the m",
        ),
    ],
)
def test_an_unknown_option_of_an_optimizer_is_refused(data, change, advice):
    with pytest.raises(ke.UnknownNameError, match=advice):
        ke.fit(net.model("float32"), data, **options(optimizer="sgd", **change))


@pytest.mark.parametrize("source", [lambda: net.engine("float32"), lambda: net.model("float32")])
def test_options_are_those_of_the_optimizer_by_name(source):
    x, y = net.batch(dtype="float32")
    chosen = {"learning_rate": 0.3, "momentum": 0.5, "weight_decay": 0.1}
    found = ke.fit(source(), (x, y), optimizer="sgd", steps=2, **chosen)
    engine = net.engine("float32")
    expected = ke.fit(engine, (x, y), optimizer=ke.SGD(engine, **chosen), steps=2)
    assert_arrays_equal(found.engine.parameters, expected.engine.parameters)
    assert found.description["settings"]["learning_rate"] == 0.3
    with pytest.raises(ke.InputError, match="has its options already; leave out: momentum"):
        ke.fit(engine, (x, y), optimizer=ke.SGD(engine), steps=1, momentum=0.5)


def test_an_optimizer_of_another_engine_is_refused(data):
    optimizer = ke.SGD(net.engine(), 0.1)
    with pytest.raises(ke.InputError, match="belongs to another engine"):
        ke.fit(net.engine(), data, optimizer=optimizer)


def test_wrong_data_are_refused(data):
    x, y = data
    cases = {
        "must be a pair": 3,
        "is an iterator": iter([(x, y)]),
        "each batch must be a pair": [x],
        "as an array, not as a list": (x.tolist(), y.tolist()),
        "no batch in this epoch": [],
        "the targets have shape": (x, y[:-1]),
        "have no examples": (x[:0], y[:0]),
    }
    for message, wrong in cases.items():
        with pytest.raises(ke.InputError, match=message):
            ke.fit(net.engine(), wrong, **options())
