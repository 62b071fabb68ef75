"""The hooks of ``fit``: their order, their effect on the run, and their release."""

import json
import os
import signal
from fractions import Fraction

import numpy as np
import pytest

import kfac_engine as ke
from kfac_engine.training.hooks import Callback
from tests.training import softmax_net as net


class Recorder(Callback):
    """Lists the calls of its hooks; ends the run where it is told."""

    def __init__(self, end=(None, None)):
        self.calls = []
        self._end = end

    def _answer(self, hook, record):
        self.calls.append((hook, record["step"]))
        return self._end == (hook, record["step"])

    def on_run_start(self, optimizer, records):
        self.calls.append(("start", optimizer.steps, len(records)))

    def on_step_end(self, record, optimizer):
        return self._answer("step", record)

    def on_epoch_end(self, record, optimizer):
        return self._answer("epoch", record)

    def on_run_end(self, optimizer, records):
        self.calls.append(("end", optimizer.steps, len(records)))

    def close(self):
        self.calls.append("close")


def run(callback, **more):
    options = {"optimizer": "sgd", "epochs": 2, "batch_size": 16} | more
    return ke.fit(net.engine(), net.batch(n=32), callbacks=[callback], **options)


STEPS = [("step", 1), ("step", 2), ("epoch", 2), ("step", 3), ("step", 4), ("epoch", 4)]


def test_hooks_follow_the_steps_and_epochs():
    recorder = Recorder()
    run(recorder)
    assert recorder.calls == [("start", 0, 0), *STEPS, ("end", 4, 4), "close"]


@pytest.mark.parametrize(("end", "calls"), [(("step", 3), 4), (("epoch", 2), 3)])
def test_a_hook_that_returns_true_ends_the_run(end, calls):
    recorder = Recorder(end)
    history = run(recorder, validation=net.batch(7))
    assert recorder.calls[1 : 1 + calls] == STEPS[:calls]
    assert recorder.calls[1 + calls :] == [("end", end[1], end[1]), "close"]
    assert "validation_loss" in history.records[-1]


def test_a_callback_may_end_the_run_before_its_first_step():
    class Ended(Recorder):
        def on_run_start(self, optimizer, records):
            super().on_run_start(optimizer, records)
            return True

    recorder = Ended()
    history = run(recorder)
    assert recorder.calls == [("start", 0, 0), ("end", 0, 0), "close"]
    assert history.records == []


def test_a_resumed_run_starts_with_its_records(tmp_path):
    store = {"checkpoint": tmp_path, "checkpoint_every": 1}
    run(Recorder(("step", 3)), **store)
    recorder = Recorder()
    run(recorder, resume=True, **store)
    assert recorder.calls == [("start", 3, 3), *STEPS[4:], ("end", 4, 4), "close"]


def test_callbacks_are_closed_after_an_error():
    class StepError(Exception):
        pass

    def fail(record, optimizer):
        raise StepError

    recorder = Recorder()
    with pytest.raises(StepError):
        ke.fit(net.engine(), net.batch(n=32), optimizer="sgd", epochs=1, callbacks=[recorder, fail])
    assert recorder.calls == [("start", 0, 0), ("step", 1), "close"]


def test_an_object_that_is_no_callback_is_refused():
    with pytest.raises(ke.InputError, match="a callback must be a Callback or a function"):
        run(3)


def test_ctrl_c_ends_a_run_with_a_checkpoint_and_it_resumes_with_equal_bits(tmp_path):
    def interrupt(record, optimizer):
        if record["step"] == 3:
            os.kill(os.getpid(), signal.SIGINT)

    older = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        whole = run(Recorder(), optimizer="kfac")
        options = {"optimizer": "kfac", "checkpoint": tmp_path, "checkpoint_every": 100}
        with pytest.raises(KeyboardInterrupt):
            run(interrupt, **options)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        recorder = Recorder()
        resumed = run(recorder, resume=True, **options)
        assert recorder.calls[0] == ("start", 3, 3)
        for name, value in whole.engine.parameters.items():
            assert np.array_equal(value, resumed.engine.parameters[name])
        # Without a checkpoint, the signal has its effect at once.
        with pytest.raises(KeyboardInterrupt):
            run(interrupt)
    finally:
        signal.signal(signal.SIGINT, older)


# -- entries of records ---------------------------------------------------------------------------

NUMBERS = {
    "float": (0.5, 0.5),
    "whole": (3, 3),
    "bool": (True, True),
    "float16": (np.float16(0.5), 0.5),
    "float32": (np.float32(0.5), 0.5),
    "float64": (np.float64(0.5), 0.5),
    "longdouble": (np.longdouble(0.5), 0.5),
    "int64": (np.int64(-3), -3),
    "uint8": (np.uint8(3), 3),
    "bool_": (np.bool_(True), True),
    "array without axes": (np.array(0.5, np.float32), 0.5),
    "fraction": (Fraction(1, 2), 0.5),
    "undefined": (None, None),
    "nan": (float("nan"), None),
    "infinite": (np.float32("inf"), None),
}
NO_NUMBERS = {
    "text": "x",
    "text of NumPy": np.str_("x"),
    "array": np.ones(2),
    "array of one entry": np.ones(1),
    "list": [1.0],
    "mapping": {},
    "complex": 1j,
    "huge": 10**400,
    "date": np.datetime64("2020-01-01"),
    "object": object(),
    "type": float,
}
HOOKS = ["on_step_end", "on_epoch_end", "on_validation_end", "on_record"]


def adding(hook, **entries):
    """A callback that adds entries to the records that a hook receives."""

    class Adding(Callback):
        pass

    setattr(Adding, hook, lambda self, record, optimizer: record.update(entries))
    return Adding()


@pytest.mark.parametrize("hook", HOOKS)
def test_numbers_of_any_kind_may_be_added(hook, tmp_path):
    entries = {name: number for name, (number, _) in NUMBERS.items()}
    history = ke.fit(
        net.engine(), net.batch(n=32), optimizer="sgd", epochs=2, batch_size=16, progress=True,
        callbacks=[adding(hook, **entries), ke.TensorBoard(tmp_path / "events")],
        validation=net.batch(7), log=tmp_path / "log.jsonl", checkpoint=tmp_path / "checkpoint",
    )  # fmt: skip
    logged = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    for record in (history.records[-1], logged[-2]):
        for name, (_, number) in NUMBERS.items():
            value = record[name]
            if number is not None:
                assert value == number
                assert type(value) is type(number)
            else:
                assert value is None or not np.isfinite(value)
    assert repr(history)
    ke.report(history, tmp_path / "run.html")
    ke.report(tmp_path / "log.jsonl", tmp_path / "run.html")


# Every entry in one hook, and one entry in the others.
ENTRIES = [(HOOKS[0], name) for name in NO_NUMBERS] + [(hook, "text") for hook in HOOKS[1:]]


@pytest.mark.parametrize(("hook", "name"), ENTRIES)
def test_other_entries_are_refused_by_name(hook, name, tmp_path):
    entry = NO_NUMBERS[name]
    with pytest.raises(ke.InputError, match=r"the callback Adding put 'note' = .* into a record"):
        run(adding(hook, note=entry), validation=net.batch(7), log=tmp_path / "log.jsonl")
    with pytest.raises(ke.InputError, match="the callback Adding put 'loss' = "):
        run(adding(hook, loss=entry), validation=net.batch(7))


@pytest.mark.parametrize("name", ["step", "epoch", "seconds", "loss", "learning_rate", "refreshed"])
def test_entries_of_a_step_cannot_be_removed(name):
    def remove(record, optimizer):
        del record[name]

    with pytest.raises(ke.InputError, match=f"the callback remove removed or changed '{name}'"):
        run(remove)
    if name in ("step", "epoch", "seconds"):
        with pytest.raises(ke.InputError, match=f"changed '{name}'"):
            run(lambda record, optimizer: record.update({name: -5}))


def test_a_name_that_is_no_text_is_refused():
    with pytest.raises(ke.InputError, match="the callback <lambda> put 3 = 1 into a record"):
        run(lambda record, optimizer: record.update({3: 1}))


def test_true_of_numpy_ends_the_run():
    assert len(run(lambda record, optimizer: np.float32(record["step"]) > 1).records) == 2
    assert len(run(lambda record, optimizer: 1).records) == 4
