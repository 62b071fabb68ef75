"""The files of a run: outputs never replace what it reads; a resumed run is made of the same."""

from pathlib import Path

import numpy as np
import onnx
import pytest

import kfac_engine as ke
from kfac_engine.training.run_checkpoint import CHECKPOINT
from tests.training import softmax_net as net
from tests.unprivileged import unprivileged

N = 40


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """A model with external weights, and data in each form."""
    monkeypatch.chdir(tmp_path)
    onnx.save_model(
        net.model(), "m.onnx", save_as_external_data=True, location="m.bin", size_threshold=0
    )
    x, y = net.batch(n=N)
    np.savez("d.npz", x=x, targets=y)
    Path("shards").mkdir()
    for i in range(2):
        np.savez(f"shards/{i}.npz", x=x[i::2], targets=y[i::2])
    np.save("x.npy", x)
    np.save("y.npy", y)
    Path("link").symlink_to("shards/1.npz")
    return tmp_path


def state_of(folder):
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def fit(model="m.onnx", data="d.npz", **options):
    return ke.fit(model, data, optimizer="sgd", **{"batch_size": 16, "epochs": 2} | options)


def mapped():
    return np.load("x.npy", mmap_mode="r")[:, :], np.load("y.npy")


def lone_engine():
    return ke.Engine.from_onnx("m.onnx", loss="categorical", gradient_dtype="float32")


# -- outputs that are inputs -----------------------------------------------------------------------

# The log, what the run reads, and its name in the message.
READ = {
    "data": ("d.npz", {"data": "d.npz"}, "data"),
    "shard": ("shards/0.npz", {"data": "shards"}, "data"),
    "link to a shard": ("link", {"data": "shards"}, "data"),
    "files of a pair": ("y.npy", {"data": ("x.npy", "y.npy")}, "data"),
    "file by name": ("x.npy", {"data": {"x": "x.npy", "targets": net.batch(n=N)[1]}}, "data"),
    "mapped array": ("x.npy", {"data": mapped}, "data"),
    "validation": ("d.npz", {"data": "shards", "validation": "d.npz"}, "validation"),
    "shard of the validation": ("shards/1.npz", {"validation": "shards"}, "validation"),
    "mapped batches of the validation": ("x.npy", {"validation": lambda: [mapped()]}, "validation"),
    "model": ("m.onnx", {}, "the model"),
    "weights": ("m.bin", {}, "the model"),
    "model of an engine": ("m.onnx", {"model": lone_engine}, "the model"),
    "weights of an engine": ("m.bin", {"model": lone_engine}, "the model"),
    "state": (f"run/{CHECKPOINT}", {"checkpoint": "run", "resume": True}, "the state of the check"),
    "records": (None, {"checkpoint": "run", "resume": True}, "the records of the checkpoint"),
}


@pytest.mark.parametrize("case", READ.values(), ids=READ)
def test_a_log_in_the_place_of_a_file_that_the_run_reads_is_refused(case, folder):
    log, read, name = case
    fit(checkpoint="run", epochs=1)
    log = log or next(Path("run").glob("records-*"))
    before = state_of(folder)
    read = {key: value() if callable(value) else value for key, value in read.items()}
    with pytest.raises(ke.InputError, match=f"would overwrite the file of ({name}|log)"):
        fit(**read, log=log)
    del read
    assert state_of(folder) == before
    fit(log="shards/log.jsonl", data="shards")  # a new file beside the shards is none of them


def test_a_checkpoint_in_the_place_of_weights_is_refused(folder):
    onnx.save_model(
        net.model(), "n.onnx", save_as_external_data=True, location=CHECKPOINT, size_threshold=0
    )
    before = state_of(folder)
    with pytest.raises(ke.InputError, match=r"the state of the checkpoint .* the file of the mod"):
        fit("n.onnx", checkpoint=folder)
    assert state_of(folder) == before


def test_a_page_in_the_place_of_its_log_is_refused(folder):
    fit(log="run.jsonl")
    before = state_of(folder)
    for path in ("run.jsonl", Path("shards/../run.jsonl")):
        with pytest.raises(ke.InputError, match="would overwrite the file of the log"):
            ke.report("run.jsonl", path)
    assert state_of(folder) == before
    ke.report("run.jsonl", "run.html")


# -- resumed runs ----------------------------------------------------------------------------------


def normal(**changes):
    return ke.NormalMeanNegativeLogProbLoss("z", **changes)


class Scaled(ke.NormalMeanNegativeLogProbLoss):
    def __init__(self, *names):
        super().__init__(*names)
        self.helper = object()


X, Y = net.batch(n=N)
ROWS = np.eye(3)[Y]
CHANGED = X.copy()
CHANGED[-1, -1] += 1
BASE = {"model": net.model, "data": (X, Y)}
# What a run is made of, what the resumed run is made of, and the word for the difference or None.
RESUMED = {
    "nothing": (BASE, {}, None),
    "same data in a file": (BASE, {"data": "d.npz"}, None),
    "same validation": (BASE | {"validation": (X[:9], Y[:9])}, {}, None),
    "batches": (BASE | {"data": [(X, Y)]}, {}, None),
    "more epochs": (BASE, {"epochs": 3}, None),
    "a loss with an object": (
        BASE | {"data": (X, ROWS), "loss": Scaled("z", 0.5, "targets")},
        {"loss": Scaled("z", 0.5, "targets")}, None),
    "loss": (BASE | {"data": (X, ROWS), "loss": "normal"}, {"loss": normal(var=2.0)}, "loss"),
    "other loss": (BASE, {"data": (X, ROWS), "loss": "normal"}, "loss"),
    "another number of one example": (BASE, {"data": (CHANGED, Y)}, "data"),
    "other targets": (BASE, {"data": (X, np.roll(Y, 1))}, "data"),
    "other order": (BASE, {"data": (X[::-1], Y[::-1])}, "data"),
    "other shards": (BASE, {"data": "shards"}, "data"),
    "fraction": (BASE | {"validation": 0.2}, {"validation": 0.5}, "validation"),
    "no fraction": (BASE | {"validation": 0.2}, {"validation": None}, "validation"),
    "other validation": (
        BASE | {"validation": (X[:9], Y[:9])}, {"validation": (X[1:10], Y[1:10])}, "validation"),
    "validation added": (BASE, {"validation": (X[:9], Y[:9])}, "validation"),
}  # fmt: skip


@pytest.mark.parametrize("case", RESUMED.values(), ids=RESUMED)
def test_a_run_of_other_data_or_another_loss_is_not_resumed(case, folder):
    first, changes, word = case
    fit(**first | {"model": net.model(), "epochs": 1}, checkpoint="run")
    before = state_of(folder)
    second = {**first, "model": net.model(), **changes}
    if word is None:
        records = fit(**second, checkpoint="run", resume=True).records
        assert len(records) > len(fit(**second | {"epochs": 1}).records)
    else:
        with pytest.raises(ke.InputError, match=f"resume with the same {word}"):
            fit(**second, checkpoint="run", resume=True)
        assert state_of(folder) == before


def test_a_checkpoint_without_contents_is_resumed(monkeypatch):
    with monkeypatch.context() as older_version:
        older_version.setattr("kfac_engine.training.fit.contents", lambda *_: {})
        first = fit(net.model(), (X, Y), checkpoint="run", epochs=1)
    resumed = fit(net.model(), (X, Y), checkpoint="run", resume=True)
    assert resumed.records[: N // 16] == first.records
    assert len(resumed.records) == 2 * (N // 16)


def test_data_without_numbers_are_one_error_with_a_checkpoint(folder):
    with pytest.raises(ke.InputError):
        fit(net.model(), (X, Y.astype(object)), checkpoint="run", epochs=1)


def test_the_checksum_of_large_data_reads_a_bounded_part(monkeypatch):
    from kfac_engine.datasets import shards
    from kfac_engine.training.batches import run_data

    row = X[0].nbytes + Y[0].nbytes
    monkeypatch.setattr(shards, "_CHECKED_BYTES", 4 * row)
    monkeypatch.setattr(shards, "_CHECKED_SHARDS", 2)
    axes, read = net.engine().example_axes, []
    source = run_data((X, Y), None, axes, 16, 0).source
    batch = source.batch
    monkeypatch.setattr(
        source, "batch", lambda parts: read.extend(n for _, n in parts) or batch(parts)
    )
    assert source.contents().startswith(f"{N} examples")
    assert max(map(len, read)) == 4
    assert {0, N - 1} <= set(np.concatenate(read))


# -- folders without permission --------------------------------------------------------------------


@pytest.mark.parametrize("mode", [0o000, 0o400])
def test_an_unreadable_folder_is_one_error(mode):
    engine = lone_engine()
    with unprivileged() as home:
        closed = home / "closed"
        closed.mkdir()
        (closed / "inner").mkdir()
        closed.chmod(mode)
        reads = {
            "data": lambda: ke.fit(engine, closed),
            "data below": lambda: ke.fit(engine, closed / "inner"),
            "validation": lambda: ke.fit(engine, (X, Y), validation=closed / "inner"),
            "checkpoint": lambda: ke.fit(engine, (X, Y), checkpoint=closed),
            "checkpoint below": lambda: ke.fit(engine, (X, Y), checkpoint=closed / "inner"),
            "resumed": lambda: ke.fit(engine, (X, Y), checkpoint=closed / "inner", resume=True),
            "log": lambda: ke.fit(engine, (X, Y), log=closed / "run.jsonl"),
            "model": lambda: ke.fit(closed / "m.onnx", (X, Y)),
            "state": lambda: engine.load(closed / "state"),
            "page": lambda: ke.report(closed / "run.jsonl", home / "run.html"),
        }
        for name, read in reads.items():
            with pytest.raises(ke.KfacError) as caught:
                read()
            assert "closed" in str(caught.value), name
