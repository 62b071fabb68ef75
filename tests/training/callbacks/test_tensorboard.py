"""``TensorBoard``: its event files, read by an independent reader of the format."""

import struct
import sys

import numpy as np
import pytest

import kfac_engine as ke
from tests.training import norm_net as net
from tests.training.interruptions import InterruptionError, interrupt_at

STEPS = 12


def run(*callbacks, **changes):
    options = {"optimizer": "sgd", "batch_size": 16, "epochs": 4, "validation": net.batch(1)}
    return ke.fit(net.engine(), net.batch(), callbacks=callbacks, **options | changes)


def crc32c(data):
    """The checksum of Castagnoli, bit by bit (RFC 3720, appendix B.4)."""
    remainder = 0xFFFFFFFF
    for byte in data:
        remainder ^= byte
        for _ in range(8):
            remainder = remainder >> 1 ^ (0x82F63B78 if remainder & 1 else 0)
    return remainder ^ 0xFFFFFFFF


def masked(data):
    """The checksum of a record of TensorFlow."""
    value = crc32c(data)
    return ((value >> 15 | value << 17) + 0xA282EAD8) & 0xFFFFFFFF


def events_in(folder):
    """The events of all files of a folder, in the order in which TensorBoard reads them."""
    event = pytest.importorskip("tensorboardX.proto.event_pb2").Event
    for path in sorted(folder.glob("*tfevents*")):
        content = path.read_bytes()
        while content:
            (length,) = struct.unpack("<Q", content[:8])
            assert struct.unpack("<I", content[8:12]) == (masked(content[:8]),)
            data, content = content[12 : 12 + length], content[12 + length :]
            assert struct.unpack("<I", content[:4]) == (masked(data),)
            content = content[4:]
            yield event.FromString(data)


def scalars(events):
    """The numbers by step and tag; the start of a session hides events from its step on."""
    shown = []
    for event in events:
        if event.HasField("session_log"):
            assert event.session_log.status == event.session_log.START
            shown = [entry for entry in shown if entry[0] < event.step]
        shown += [(event.step, value.tag, value.simple_value) for value in event.summary.value]
    return shown


def expected(records):
    """The numbers of records by step and tag, in float32; the lengths of lists."""
    return {
        (record["step"], name, np.float32(len(value) if isinstance(value, list) else value))
        for record in records
        for name, value in record.items()
        if name != "step"
    }


@pytest.fixture
def board(tmp_path):
    pytest.importorskip("tensorboardX")
    return lambda: ke.TensorBoard(tmp_path / "events" / "run")


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "events" / "run"


def test_the_events_are_the_numbers_of_the_records(board, folder):
    history = run(board())
    shown = scalars(events_in(folder))
    assert len(shown) == len(set(shown))
    assert set(shown) == expected(history.records)
    assert {tag for _, tag, _ in shown} >= {"loss", "validation_loss", "seconds/gradients"}


@pytest.mark.parametrize("step", [1, 5, 9])
def test_a_resumed_run_continues_the_curves_without_doubled_steps(board, folder, tmp_path, step):
    store = {"checkpoint": tmp_path / "state", "checkpoint_every": 2}
    with pytest.raises(InterruptionError):
        run(board(), interrupt_at(step), **store)
    history = run(board(), resume=True, **store)
    events = list(events_in(folder))
    steps = [event.step for event in events if event.summary.value]
    # The step after the checkpoint is in both files.
    assert len(steps) == STEPS + 1
    shown = scalars(events)
    assert len(shown) == len(set(shown))
    assert set(shown) == expected(history.records)


def test_a_new_run_hides_an_older_run_and_keeps_its_file(board, folder):
    run(board())
    (old,) = folder.iterdir()
    content = old.read_bytes()
    history = run(board(), epochs=2)
    assert old.read_bytes() == content
    assert len(list(folder.iterdir())) == 2
    assert set(scalars(events_in(folder))) == expected(history.records)


def test_the_validation_at_the_end_within_an_epoch_is_written(board, folder):
    history = run(board(), lambda record, _: record["step"] == 5)
    assert len(history.records) == 5
    assert "validation_loss" in history.records[-1]
    assert set(scalars(events_in(folder))) == expected(history.records)


def test_a_folder_that_cannot_be_written_is_an_error_before_the_first_step(tmp_path):
    pytest.importorskip("tensorboardX")
    (tmp_path / "file").write_text("")
    steps = []
    with pytest.raises(ke.InputError, match=r"cannot write events into .*file"):
        run(ke.TensorBoard(tmp_path / "file"), lambda record, _: steps.append(record))
    assert not steps


def test_the_file_is_closed_after_an_error(board, monkeypatch):
    callback, closed = board(), []
    with pytest.raises(InterruptionError):
        run(callback, lambda *_: closed.append(callback._writer._writer), interrupt_at(2))
    assert closed[0].closed


@pytest.mark.parametrize("folder_", ["", 3, None])
def test_a_wrong_folder_is_refused(folder_):
    with pytest.raises(ke.InputError, match="is not a path"):
        ke.TensorBoard(folder_)


def test_a_missing_library_is_one_error(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    with pytest.raises(ke.BackendError, match=r"pip install 'kfac-engine\[tensorboard\]'"):
        ke.TensorBoard(tmp_path)
