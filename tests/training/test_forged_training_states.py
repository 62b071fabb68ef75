"""States of training with a right checksum and impossible numbers: refused, and nothing moves."""

import json
import zlib

import numpy as np
import pytest

import kfac_engine as ke
from kfac_engine.training.run_checkpoint import CHECKPOINT
from tests.engine.test_forged_states import forged
from tests.training import softmax_net as net

HUGE = 10**400
OPTIMIZERS = {
    "adam": ke.Adam,
    "kfac": ke.KfacOptimizer,
    "l2": lambda engine: ke.KfacOptimizer(engine, 0.1, damping=0.01, l2=0.01),
}


def stepped(name):
    optimizer = OPTIMIZERS[name](net.engine())
    for seed in range(2):
        x, y = net.batch(seed)
        optimizer.step({"x": x}, y)
    return optimizer


def changed(*path, value):
    """A change of the number at a path in the extras of a state."""

    def change(header, tensors):
        extras = json.loads(header["extras"])
        place = extras
        for key in path[:-1]:
            place = place[key]
        assert path[-1] in place
        place[path[-1]] = value
        header["extras"] = json.dumps(extras)

    return change


def header_is(key, value):
    return lambda header, tensors: header.update({key: json.dumps(value)})


COUNTS = (-1, 0.5, 2**60, HUGE, "1", None, [], True)
AMOUNTS = (-1.0, float("inf"), float("nan"), HUGE, "1", None)
FORGED = [
    *((name, "steps", value) for name in OPTIMIZERS for value in COUNTS),
    *((name, "skipped", value) for name in OPTIMIZERS for value in COUNTS),
    *((name, "restraint", value) for name in OPTIMIZERS for value in (0.0, 2.0, *AMOUNTS)),
    *(("kfac", "damping", value) for value in (0.0, 1e-320, *AMOUNTS)),
    ("l2", "damping", 1e-3),
    *(("kfac", n, v) for n in ("statistics", "start") for v in (-2, HUGE, 1.5, None)),
]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_forged_number_of_an_optimizer_is_refused_and_nothing_moves(name, tmp_path):
    optimizer, path, state = stepped(name), tmp_path / "s", tmp_path / "before"
    optimizer.save(path)
    x, y = net.batch(5)
    optimizer.step({"x": x}, y)
    optimizer.save(state)
    before = state.read_bytes()
    changes = {
        f"{number} {value!r:.20}": changed("parts", "optimizer", number, value=value)
        for kind, number, value in FORGED
        if kind == name
    }
    for key in ("counter", "damping"):
        changes |= {f"{key} {v!r:.9}": header_is(key, v) for v in (-1, HUGE, "1")}
    for label, change in changes.items():
        with pytest.raises(ke.InputError):
            optimizer.load(forged(path, tmp_path / "f", change))
        optimizer.save(state)
        assert state.read_bytes() == before, label
    optimizer.load(forged(path, tmp_path / "f", lambda header, tensors: None))
    optimizer.step({"x": x}, y)


def fit(folder, engine=None, **options):
    # Callbacks that store their state, with a validation that they read.
    callbacks = [ke.EarlyStop(), ke.BestWeights(), ke.WeightAverage(0.9)]
    return ke.fit(
        engine or net.engine(), net.batch(n=50), validation=net.batch(1), checkpoint=folder,
        batch_size=16, callbacks=callbacks, optimizer="adam", **{"epochs": 1} | options,
    )  # fmt: skip


PLACES = [
    ("run", "epoch"), ("run", "batch"), ("run", "steps"),
    ("run", "records", "length"), ("run", "records", "count"), ("run", "records", "checksum"),
    ("parts", "EarlyStop", "waits"), ("parts", "EarlyStop", "best_step"),
    ("parts", "BestWeights", "best_step"), ("parts", "WeightAverage", "count"),
    ("parts", "rollback", "count"), ("parts", "rollback", "attempts"), ("parts", "rollback", "age"),
    ("parts", "rollback", "optimizer/steps"),
]  # fmt: skip
REALS = [("run", "seconds"), ("parts", "rollback", "optimizer/restraint")]


def test_a_forged_number_of_a_run_is_refused_and_nothing_moves(tmp_path):
    fit(tmp_path)
    state = tmp_path / CHECKPOINT
    whole = state.read_bytes()
    (tmp_path / "whole").write_bytes(whole)
    forgeries = [(p, v) for p in PLACES for v in (-1, HUGE, "1")]
    forgeries += [(p, v) for p in REALS for v in (-1.0, float("inf"), HUGE)]
    forgeries += [(("parts", "rollback", "latest"), v) for v in ([HUGE], [None], ["1"], [[1]], 3)]
    forgeries += [(("parts", "rollback", "reference"), v) for v in (HUGE, float("nan"), "1", None)]
    forgeries += [(("run", "options", "seed"), v) for v in (HUGE, None, "0", [])]
    engine = net.engine()
    for place, value in forgeries:
        forged(tmp_path / "whole", state, changed(*place, value=value))
        with pytest.raises(ke.InputError):
            fit(tmp_path, engine, resume=True)
        same = all(np.array_equal(engine.parameters[n], v) for n, v in net.weights().items())
        assert same, place
    state.write_bytes(whole)
    assert len(fit(tmp_path, resume=True, epochs=2).records) == 6


RECORD = {"step": 1, "epoch": 0, "seconds": 0.5, "loss": 1.0, "refreshed": ["a"]}
LINES = {
    "no JSON": b"{",
    "deep": b"[" * 100_000,
    "no text": b"\xff\xfe",
    "no dictionary": b"3",
    "null": b"null",
    "no step": json.dumps({n: v for n, v in RECORD.items() if n != "step"}).encode(),
    "no loss": json.dumps({n: v for n, v in RECORD.items() if n != "loss"}).encode(),
    "a dictionary in it": json.dumps(RECORD | {"accuracy": {"a": 1}}).encode(),
    **{
        f"{name} {value!r:.9}": json.dumps(RECORD | {name: value}).encode()
        for name, values in {
            "step": COUNTS, "epoch": COUNTS, "seconds": ("1", None, HUGE, []),
            "loss": ("1", None, HUGE, [], {}), "refreshed": (3, None, [1], "a"),
            "accuracy": (HUGE, -HUGE), "damping": ("1", HUGE),
        }.items()
        for value in values
    },
}  # fmt: skip


def test_forged_records_are_refused_and_nothing_moves(tmp_path):
    fit(tmp_path)
    state, (records,) = tmp_path / CHECKPOINT, tmp_path.glob("records-*")
    whole = tmp_path / "whole"
    whole.write_bytes(state.read_bytes())
    engine = net.engine()

    def resume(line, **options):
        records.write_bytes(line + b"\n")
        position = {"file": records.name, "length": len(line) + 1, "count": 1}
        position["checksum"] = zlib.crc32(line + b"\n")
        forged(whole, state, changed("run", "records", value=position))
        return fit(tmp_path, engine, resume=True, **options)

    for name, line in LINES.items():
        with pytest.raises(ke.InputError, match="does not have the records"):
            resume(line)
        same = all(np.array_equal(engine.parameters[n], v) for n, v in net.weights().items())
        assert same, name
    line = json.dumps(RECORD | {"loss": float("nan"), "accuracy": 0.5}).encode()
    assert len(resume(line, epochs=2).records) == 4
