"""The checkpoints of ``fit``: bounded size, whole files only, and refusals that change nothing."""

import json
import resource
import sys

import numpy as np
import pytest

import kfac_engine as ke
from kfac_engine.system.writing import FileLock
from kfac_engine.training.checkpoint import SavedState
from kfac_engine.training.run_checkpoint import CHECKPOINT, RecordFile, position_of, read_records
from tests.comparing import same
from tests.training import softmax_net as net
from tests.training.interruptions import InterruptionError, interrupt_at


def run(folder, engine=None, **changes):
    options = {"optimizer": "sgd", "epochs": 4, "batch_size": 16, "checkpoint_every": 2}
    return ke.fit(engine or net.engine(), net.batch(n=50), checkpoint=folder, **options | changes)


def interrupted(folder, step, **changes):
    with pytest.raises(InterruptionError):
        run(folder, callbacks=[interrupt_at(step)], **changes)


def records_in(folder):
    (path,) = folder.glob("records-*.jsonl")
    return path


def record_of(step, **changes):
    return {"step": step, "epoch": 0, "seconds": 0.5, "loss": 0.1 * step, **changes}


# -- size ------------------------------------------------------------------------------------------


def test_the_size_of_a_checkpoint_does_not_grow_with_the_run(tmp_path):
    sizes = []
    for epochs in (2, 40):
        run(tmp_path / str(epochs), epochs=epochs)
        sizes.append((tmp_path / str(epochs) / CHECKPOINT).stat().st_size)
        assert len(records_in(tmp_path / str(epochs)).read_text().splitlines()) == 3 * epochs
    # The header has positions of more digits; safetensors aligns it to 8 bytes.
    assert abs(sizes[1] - sizes[0]) <= 64


def test_a_checkpoint_appends_the_new_records_only(tmp_path):
    file = RecordFile(tmp_path)
    records = [record_of(step) for step in range(1, 4)]
    first = position_of(file.add(records[:2]))
    path = tmp_path / first.file
    path.write_bytes(path.read_bytes() + b'{"step": 3, "lo')  # as a killed process leaves it
    second = position_of(file.add(records))
    assert [json.loads(line) for line in path.read_text().splitlines()] == records
    assert read_records(tmp_path, first) == records[:2]
    assert read_records(tmp_path, second) == records


def test_records_with_nan_come_back(tmp_path):
    file = RecordFile(tmp_path)
    position = position_of(file.add([record_of(1, loss=float("nan"))]))
    (record,) = read_records(tmp_path, position)
    assert np.isnan(record["loss"])


# -- interruptions ---------------------------------------------------------------------------------


def test_a_resumed_run_cuts_off_records_after_the_checkpoint(tmp_path):
    whole = run(tmp_path / "whole")
    interrupted(tmp_path / "run", 7)
    path = records_in(tmp_path / "run")
    path.write_bytes(path.read_bytes() + b'{"step": 7, "loss": 1.0}\n{"step"')
    resumed = run(tmp_path / "run", resume=True)
    assert same(whole.engine.parameters, resumed.engine.parameters)
    assert [json.loads(line) for line in path.read_text().splitlines()] == resumed.records
    assert [record["step"] for record in resumed.records] == list(range(1, 13))


def test_an_older_checkpoint_stays_valid_until_a_new_run_writes_one(tmp_path):
    whole = run(tmp_path / "whole")
    interrupted(tmp_path / "run", 5)
    interrupted(tmp_path / "run", 1)  # a new run, which ends before its first checkpoint
    resumed = run(tmp_path / "run", resume=True)
    assert same(whole.engine.parameters, resumed.engine.parameters)
    interrupted(tmp_path / "run", 3, seed=1)  # a new run with a checkpoint
    assert len(run(tmp_path / "run", seed=1, resume=True).records) == 12
    assert len(list((tmp_path / "run").iterdir())) == 2


# -- failures of the disk --------------------------------------------------------------------------


@pytest.fixture
def limited():
    """Sets the largest size of a file, which makes a write fail as a full disk does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

    def limit(size):
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))

    yield limit
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.skipif(sys.platform == "win32", reason="limits the size of files as POSIX does")
@pytest.mark.parametrize("part", ["state", "records"])
def test_a_full_disk_is_one_error_and_leaves_the_checkpoint(tmp_path, limited, part):
    whole = run(tmp_path / "whole")
    folder = tmp_path / "run"
    size = (tmp_path / "whole" / CHECKPOINT).stat().st_size

    def fill(record, optimizer):
        if record["step"] == 5:
            limited(size - 8 if part == "state" else records_in(folder).stat().st_size)

    named = CHECKPOINT if part == "state" else "records-.*jsonl"
    with pytest.raises(ke.InputError, match=f"cannot write '.*{named}': File too large"):
        run(folder, callbacks=[fill])
    limited(resource.RLIM_INFINITY)
    assert len(list(folder.iterdir())) == 2  # no temporary file is left
    resumed = run(folder, resume=True)
    assert same(whole.engine.parameters, resumed.engine.parameters)
    assert len(resumed.records) == 12


def test_a_folder_that_cannot_be_written_is_an_error_before_the_first_step(tmp_path):
    (tmp_path / "file").write_text("")
    steps = []
    with pytest.raises(ke.InputError, match=r"cannot create the folder .*: Not a directory"):
        run(tmp_path / "file" / "run", callbacks=[lambda record, _: steps.append(record)])
    assert not steps


# -- refusals --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.write_bytes(path.read_bytes()[:-9]),
        lambda path: path.write_bytes(path.read_bytes().replace(b"loss", b"lost", 1)),
        lambda path: path.unlink(),
    ],
    ids=["short", "changed", "missing"],
)
def test_damaged_records_are_refused_and_change_nothing(tmp_path, damage):
    interrupted(tmp_path, 5)
    damage(records_in(tmp_path))
    engine = net.engine()
    with pytest.raises(ke.InputError, match=r"does not have the records|no such file"):
        run(tmp_path, engine, resume=True)
    assert same(engine.parameters, net.weights())


@pytest.mark.parametrize(
    "values",
    [
        {"file": "../records-00000000.jsonl", "length": 0, "count": 0, "checksum": 0},
        {"file": "records-00000000.jsonl", "length": -1, "count": 0, "checksum": 0},
        {"file": "records-00000000.jsonl", "length": 1e300, "count": 0, "checksum": 0},
        {"file": 3, "length": 0, "count": 0, "checksum": 0},
        {},
    ],
)
def test_a_forged_position_is_refused(values):
    with pytest.raises(ke.InputError, match="no position in a file of records"):
        position_of(values)


class Counter(ke.Callback):
    """Counts steps; the total is part of the checkpoint."""

    def __init__(self):
        self.total, self.weight = 0, np.zeros(2)

    def on_step_end(self, record, optimizer):
        self.total += 1
        self.weight += record["loss"]

    def state(self, optimizer):
        return SavedState({"total": self.total}, {"sums": {"loss": self.weight}})

    def restore(self, state):
        self.total = state.numbers["total"]
        self.weight[...] = state.arrays["sums"]["loss"]


def test_the_state_of_callbacks_is_restored(tmp_path):
    first, second = Counter(), Counter()
    whole = run(tmp_path / "whole", callbacks=[first, second])
    with pytest.raises(InterruptionError):
        run(tmp_path / "run", callbacks=[Counter(), interrupt_at(6), Counter()])
    first, second = Counter(), Counter()
    run(tmp_path / "run", callbacks=[first, second], resume=True)
    losses = [record["loss"] for record in whole.records]
    for callback in (first, second):
        assert callback.total == 12
        np.testing.assert_array_equal(callback.weight, np.add.accumulate(losses)[-1])


def test_every_difference_to_a_checkpoint_is_listed_in_one_error(tmp_path):
    interrupted(tmp_path, 5)
    engine = net.engine("float32")
    with pytest.raises(ke.InputError) as caught:
        run(tmp_path, engine, callbacks=[Counter()], resume=True)
    message = str(caught.value)
    for name, shape in (("w1", "(4, 5)"), ("b1", "(4,)"), ("w2", "(3, 4)"), ("b2", "(3,)")):
        forms = f"float32 {shape} here and float64 {shape} there"
        assert f"parameter '{name}' is {forms}" in message
        assert f"the momentum of '{name}' (optimizer) is {forms}" in message
    assert "the state of 'Counter' is here only" in message
    assert same(engine.parameters, net.weights("float32"))


def test_weights_of_a_checkpoint_load_into_an_engine(tmp_path):
    history = run(tmp_path)
    engine = net.engine()
    engine.load(tmp_path / CHECKPOINT)
    assert same(engine.parameters, history.engine.parameters)
    engine.save(tmp_path / "state")
    with pytest.raises(ke.InputError, match="it is the state of an engine"):
        ke.SGD(engine, 0.1).load(tmp_path / "state")


# -- two runs --------------------------------------------------------------------------------------


@pytest.mark.skipif(sys.platform == "win32", reason="locks files as POSIX does")
@pytest.mark.parametrize("resume", [False, True])
def test_a_second_run_in_the_folder_of_a_live_run_is_refused(tmp_path, resume):
    whole = run(tmp_path / "whole")
    folder, refused = tmp_path / "run", []
    if resume:
        interrupted(folder, 3)

    def start_another(record, optimizer):
        if record["step"] in {4, 8}:
            before = {path.name: path.read_bytes() for path in folder.iterdir()}
            for again in (False, True):
                with pytest.raises(ke.InputError, match=r"another run .*run' \(process \d+ on"):
                    run(folder, resume=again)
                refused.append(record["step"])
            assert {path.name: path.read_bytes() for path in folder.iterdir()} == before

    history = run(folder, resume=resume, callbacks=[start_another])
    assert refused == [4, 4, 8, 8]
    assert same(whole.engine.parameters, history.engine.parameters)
    assert {path.name for path in folder.iterdir()} == {CHECKPOINT, records_in(folder).name}
    assert len(run(folder, resume=True).records) == 12  # the lock is released


@pytest.mark.skipif(sys.platform == "win32", reason="locks files as POSIX does")
def test_a_lock_that_a_killed_process_left_does_not_hold(tmp_path):
    (tmp_path / "run.lock").write_text("process 1 on another machine")
    assert len(run(tmp_path).records) == 12


@pytest.mark.skipif(sys.platform == "win32", reason="locks files as POSIX does")
def test_a_lock_is_free_after_its_file_was_removed(tmp_path):
    one, other = FileLock(tmp_path / "lock"), FileLock(tmp_path / "lock")
    assert one.acquire() is None
    assert other.acquire() is not None
    one.release()
    assert other.acquire() is None
    other.release()
    assert not list(tmp_path.iterdir())
