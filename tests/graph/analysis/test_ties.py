"""Weights that are equal in the file: found, and trained as one where that is asked for."""

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

import kfac_engine as ke
from kfac_engine.analysis.spectra.operator import MATRICES
from kfac_engine.graph.analysis.exporter_changes import Tie, find_ties
from tests import models

WIDTH, BATCH = 3, 5


def found_in(**arrays):
    return find_ties({name: np.array(a, np.float32) for name, a in arrays.items()}, arrays)


@pytest.mark.parametrize(
    ("arrays", "expected"),
    [
        ({"a": [[1, 2], [3, 4]], "b": [[1, 2], [3, 4]]}, (Tie("a", "b"),)),
        ({"a": [[1, 2, 3], [4, 5, 6]], "b": [[1, 4], [2, 5], [3, 6]]}, (Tie("a", "b", True),)),
        ({"a": [[1, 2], [3, 4]], "b": [[1, 2], [3, 5]]}, ()),
        ({"a": [[1, 2], [3, 4]], "b": [[1, 5], [3, 4]]}, ()),
        ({"a": [[1, 1], [1, 1]], "b": [[1, 1], [1, 1]]}, ()),
        ({"a": [1, 2], "b": [1, 2]}, ()),
        ({"a": [[1, 2]], "b": [[1, 2]], "c": [[1], [2]]}, (Tie("a", "b"), Tie("a", "c", True))),
        ({"a": [[[1, 2]]], "b": [[[1], [2]]]}, ()),
    ],
    ids=["equal", "transposed", "last entry", "inner entry", "one number", "vectors", "three",
         "three axes"],
)  # fmt: skip
def test_find_ties_returns_equal_weights(arrays, expected):
    assert found_in(**arrays) == expected


def network(copies):
    """Two layers on one weight, written twice (the second time transposed) or once."""
    net = models.Net()
    w = net.weight("w", WIDTH, WIDTH)
    x = net.op("Tanh", net.op("MatMul", "input", w, to="s"), to="t")
    if copies:
        net.constant("copy", net._constants["w"].T.copy())
        net.op("Gemm", x, "copy", to="output", transB=1)
    else:
        net.op("MatMul", x, w, to="output")
    return net.model({"input": ["batch", WIDTH]}, {"output": ["batch", WIDTH]})


def step(model, **options):
    engine = ke.Engine.from_onnx(model, loss="normal", estimation_mode="exact", **options)
    feeds = models.random_inputs(model, BATCH)
    return engine, engine.step(feeds, np.zeros((BATCH, WIDTH), np.float32))


def test_tied_weights_have_shared_gradient_in_own_layouts():
    _, expected = step(network(copies=False))
    engine, found = step(network(copies=True), tie_weights=True)
    assert engine.ties == (Tie("w", "copy", True),)
    for kind in ("gradients", "natural_gradients"):
        wanted, arrays = getattr(expected, kind)["w"], getattr(found, kind)
        # float32 sums of the same terms
        np.testing.assert_allclose(arrays["w"], wanted, rtol=1e-5)
        np.testing.assert_array_equal(arrays["copy"], arrays["w"].T)


def test_rate_is_clipped_as_that_of_one_weight():
    _, expected = step(network(copies=False))
    _, found = step(network(copies=True), tie_weights=True)
    rate = expected.clipped_rate(1e9, 1e-3)
    assert found.clipped_rate(1e9, 1e-3) == pytest.approx(rate, rel=1e-5)
    assert "1 array of 9 numbers" in repr(found)


@pytest.mark.parametrize("matrix", MATRICES)
def test_whole_matrix_is_that_of_one_weight(matrix):
    feeds = models.random_inputs(network(copies=True), BATCH)
    batch = feeds, np.zeros((BATCH, WIDTH), np.float32)
    alone, tied = (
        ke.curvature_operator(network(copies), batch, matrix, loss="normal", tie_weights=copies)
        for copies in (False, True)
    )
    unit = np.eye(WIDTH**2)
    np.testing.assert_allclose(tied @ unit, alone @ unit, rtol=0, atol=1e-5)


def test_equal_weights_are_tied_only_on_request():
    engine, found = step(network(copies=True))
    assert engine.ties == (Tie("w", "copy", True),)
    assert not np.allclose(found.gradients["copy"], found.gradients["w"].T)
    assert [layer.parameters for layer in engine.layers] == [("w",), ("copy",)]


def test_new_value_of_tied_weight_updates_copies_and_file(tmp_path):
    engine, _ = step(network(copies=True), tie_weights=True)
    values = np.arange(9, dtype=np.float32).reshape(WIDTH, WIDTH)
    engine.set_parameters({"copy": values})
    np.testing.assert_array_equal(engine.parameters["w"], values.T)
    engine.export(tmp_path / "out.onnx")
    written = {
        e.name: numpy_helper.to_array(e) for e in onnx.load(tmp_path / "out.onnx").graph.initializer
    }
    np.testing.assert_array_equal(written["w"], values.T)
    np.testing.assert_array_equal(written["copy"], values)


def test_different_values_for_tied_weights_raise_error():
    engine, result = step(network(copies=True), tie_weights=True)
    ones = np.ones((WIDTH, WIDTH), np.float32)
    with pytest.raises(ke.InputError, match="'copy' is tied to 'w'"):
        engine.set_parameters({"w": ones, "copy": 2 * ones})
    with pytest.raises(ke.InputError, match="'copy' is tied to 'w'"):
        engine.precondition({**result.gradients, "copy": ones})
    alone = engine.precondition({"copy": result.gradients["copy"]})
    np.testing.assert_array_equal(alone["w"], result.natural_gradients["w"])


def test_resumed_engine_with_tied_weights_continues_identically(tmp_path):
    engine, result = step(network(copies=True), tie_weights=True)
    engine.save(tmp_path / "state.safetensors")
    other = ke.Engine.from_onnx(
        network(copies=True), loss="normal", estimation_mode="exact", tie_weights=True
    )
    other.load(tmp_path / "state.safetensors")
    again = other.precondition(result.gradients)
    np.testing.assert_array_equal(again["copy"], result.natural_gradients["copy"])
