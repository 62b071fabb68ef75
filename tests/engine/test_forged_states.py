"""States with a right checksum that no engine wrote: refused whole, and nothing has moved."""

import json
import warnings

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file

import kfac_engine as ke
from kfac_engine.__main__ import main
from kfac_engine.data import demo_model
from kfac_engine.system.state_files import checksum
from tests.comparing import assert_arrays_equal
from tests.engine.test_engine_safety import X, Y, assert_same, engine_of, state_of

WEIGHTED = "factor/0/average"


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    engine = engine_of()
    engine.step(X, Y)
    path = tmp_path_factory.mktemp("states") / "s.safetensors"
    engine.save(path)
    return path


def forged(saved, path, change):
    """A copy of a state whose header and tensors were changed, with a right checksum."""
    with safe_open(str(saved), framework="numpy") as file:
        header, tensors = file.metadata(), {}
        for key in file.keys():  # noqa: SIM118 (no mapping)
            tensors[key] = file.get_tensor(key)
    header.pop("checksum")
    change(header, tensors)
    save_file(tensors, path, header | {"checksum": checksum(header, tensors)})
    return path


def header_is(key, value):
    def change(header, tensors):
        if value is None:
            del header[key]
        else:
            header[key] = value

    return change


def factor_is(key, value):
    def change(header, tensors):
        factors = json.loads(header["factors"])
        factors[0][key] = value
        header["factors"] = json.dumps(factors)

    return change


def without_weight(header, tensors):
    factors = json.loads(header["factors"])
    del factors[0]["weight"]
    header["factors"] = json.dumps(factors)


def tensor_is(key, make):
    def change(header, tensors):
        if make is None:
            del tensors[key]
        else:
            tensors[key] = make(tensors[key])

    return change


def poisoned(array):
    array = array.copy()
    array.flat[0] = np.nan
    return array


FORGERIES = {
    "no counter": header_is("counter", None),
    "a counter of letters": header_is("counter", "abc"),
    "a counter below zero": header_is("counter", "-1"),
    "a counter with a fraction": header_is("counter", "1.5"),
    "no generator": header_is("generator", None),
    "a generator of another kind": header_is("generator", '{"bit_generator": "MT19937"}'),
    "a generator that is no state": header_is("generator", "{}"),
    "a generator that is a list": header_is("generator", "[]"),
    "nested without end": header_is("generator", "[" * 100_000),
    "factors that are no JSON": header_is("factors", "{"),
    "factors that are a number": header_is("factors", "3"),
    "factors that are numbers": header_is("factors", "[1, 2]"),
    "a factor without a weight": without_weight,
    "a weight of letters": factor_is("weight", "a"),
    "a weight that is not finite": factor_is("weight", float("nan")),
    "no weight": factor_is("weight", None),
    "a weight below zero": factor_is("weight", -1.0),
    "a weight of zero with an average": factor_is("weight", 0.0),
    "repeats of letters": factor_is("repeats", "a"),
    "repeats of zero": factor_is("repeats", 0.0),
    "repeats that are not finite": factor_is("repeats", float("inf")),
    "a damping of letters": header_is("damping", '"a"'),
    "an average that is missing": tensor_is(WEIGHTED, None),
    "an average with NaN": tensor_is(WEIGHTED, poisoned),
    "an average of integers": tensor_is(WEIGHTED, lambda a: a.astype(np.int32)),
    "an average of another shape": tensor_is(WEIGHTED, lambda a: a[:-1].copy()),
    "an inverse that is missing": tensor_is("factor/0/power/0", None),
    "an inverse with NaN": tensor_is("factor/0/power/0", poisoned),
    "a parameter with NaN": tensor_is("parameter/dense1.bias", poisoned),
    "an array that no factor has": lambda header, tensors: tensors.update(
        {"factor/0/power/9": np.ones(3, np.float32)}
    ),
}


@pytest.mark.parametrize("forgery", FORGERIES)
def test_a_forged_state_is_refused_and_nothing_moves(forgery, saved, tmp_path):
    path = forged(saved, tmp_path / "forged.safetensors", FORGERIES[forgery])
    for steps in (0, 1):
        engine = engine_of()
        for _ in range(steps):
            engine.step(X, Y)
        before, parameters = state_of(engine), engine.parameters
        with pytest.raises(ke.InputError, match="state '"):
            engine.load(path)
        assert_same(before, state_of(engine))
        assert_arrays_equal(parameters, engine.parameters)


def test_a_state_that_nobody_changed_is_taken(saved, tmp_path):
    path = forged(saved, tmp_path / "same.safetensors", lambda header, tensors: None)
    engine, other = engine_of(), engine_of()
    other.step(X, Y)
    engine.load(path)
    assert_same(state_of(engine), state_of(other))


def test_a_state_of_another_damping_is_taken_with_a_warning(saved):
    engine = engine_of(damping=0.25)
    with pytest.warns(UserWarning, match=r"saved with damping 0\.001, and this engine has 0\.25"):
        engine.load(saved)
    assert engine.damping == 0.25


def test_a_load_that_ends_by_its_own_warning_changes_nothing(saved):
    engine = engine_of(damping=0.25)
    before = state_of(engine)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="saved with damping"):
            engine.load(saved)
    assert_same(before, state_of(engine))


def test_a_state_of_the_same_damping_or_of_an_older_version_warns_of_nothing(saved, tmp_path):
    old = forged(saved, tmp_path / "old.safetensors", header_is("damping", None))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine_of().load(saved)
        engine_of(damping=0.25).load(old)


def test_the_command_tells_of_another_damping(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "m.onnx").write_bytes(demo_model("mlp"))
    np.savez("b.npz", **X)
    np.savez("t.npz", targets=Y)
    command = [
        "precondition",
        "m.onnx",
        "--inputs",
        "b.npz",
        "--targets",
        "t.npz",
        "--threads",
        "1",
    ]
    files = ["--state", "s.st", "-o", "out.st"]
    assert main([*command, *files]) == 0
    assert "warning" not in capsys.readouterr().err
    assert main([*command, *files, "--damping", "0.25"]) == 0
    assert "warning: the state 's.st' was saved with damping" in capsys.readouterr().err
