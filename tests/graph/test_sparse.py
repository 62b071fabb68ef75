"""Sparse tensors of a file, read as arrays with all entries."""

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import helper, numpy_helper, parser

import kfac_engine as ke
from kfac_engine.graph import tensors

DENSE = np.array([[0, 2, 0], [0, 0, -3], [1, 0, 0], [0, 0, 0]], np.float32)
FLAT, PLACES = np.flatnonzero(DENSE), np.argwhere(DENSE)
VALUES = DENSE[DENSE != 0]


def sparse(values=VALUES, indices=FLAT, dims=DENSE.shape):
    tensors_ = (
        numpy_helper.from_array(np.asarray(a), n) for a, n in ((values, "w"), (indices, ""))
    )
    return helper.make_sparse_tensor(*tensors_, dims)


def model(entry, *, node=False):
    """A product with a sparse weight, stored as an initializer or as a Constant."""
    proto = parser.parse_model(
        """<ir_version: 8, opset_import: ["": 18]>
        m (float[n,4] x) => (float[n,3] y) { y = MatMul (x, w) }"""
    )
    if node:
        constant = helper.make_node("Constant", [], ["w"], sparse_value=entry)
        proto.graph.node.insert(0, constant)
    else:
        proto.graph.sparse_initializer.append(entry)
    return proto


@pytest.mark.parametrize("node", [False, True], ids=["initializer", "node"])
@pytest.mark.parametrize("indices", [FLAT, PLACES], ids=["flat", "coordinates"])
def test_sparse_weight_is_trained_as_a_dense_one(indices, node, tmp_path):
    proto = model(sparse(indices=indices), node=node)
    dense = model(sparse())
    del dense.graph.sparse_initializer[:]
    dense.graph.initializer.append(numpy_helper.from_array(DENSE, "w"))
    x = np.random.default_rng(0).standard_normal((5, 4)).astype(np.float32)
    (expected,) = onnxruntime.InferenceSession(dense.SerializeToString()).run(None, {"x": x})
    steps = []
    for each in (proto, dense):
        engine = ke.Engine.from_onnx(each, loss="normal")
        np.testing.assert_array_equal(engine.parameters["w"], DENSE)
        steps.append(engine.step({"x": x}, np.zeros((5, 3))).natural_gradients["w"])
    np.testing.assert_array_equal(*steps)
    engine.export(tmp_path / "new.onnx")
    written = onnx.load(tmp_path / "new.onnx")
    onnx.checker.check_model(written, full_check=True)
    session = onnxruntime.InferenceSession(written.SerializeToString())
    np.testing.assert_array_equal(session.run(None, {"x": x})[0], expected)


BAD = {
    "outside": (sparse(indices=[1, 5, 12]), "outside"),
    "negative": (sparse(indices=[-1, 5, 6]), "outside"),
    "coordinates outside": (sparse(indices=[[0, 1], [1, 3], [2, 0]]), "outside"),
    "repeated": (sparse(indices=[1, 5, 5]), "repeated"),
    "too few": (sparse(indices=[1, 5]), r"values of shape \(3,\)"),
    "three coordinates": (sparse(indices=np.zeros((3, 3), np.int64)), "one index"),
    "real indices": (sparse(indices=np.float32([1, 5, 6])), "integers"),
    "matrix of values": (sparse(values=np.ones((3, 1), np.float32)), "one index"),
    "no shape": (sparse(dims=[]), r"shape \[\]"),
    "negative size": (sparse(dims=[-4, 3]), r"\[-4, 3\]"),
    "too many entries": (sparse(dims=[1 << 40, 1 << 40]), "at most"),
}


@pytest.mark.parametrize("node", [False, True], ids=["initializer", "node"])
@pytest.mark.parametrize(("entry", "words"), BAD.values(), ids=BAD)
def test_damaged_sparse_tensor_error_names_it(entry, words, node):
    with pytest.raises(ke.ModelError, match=f"'w'.*{words}"):
        ke.load_model(model(entry, node=node))


def test_sparse_tensor_above_free_memory_is_refused_before_it_is_read(monkeypatch):
    monkeypatch.setattr(tensors, "available_memory", lambda: 40)
    with pytest.raises(ke.MemoryLimitError, match="'w' takes"):
        ke.load_model(model(sparse()))


def test_name_of_two_initializers_is_refused():
    proto = model(sparse())
    proto.graph.initializer.append(numpy_helper.from_array(DENSE, "w"))
    with pytest.raises(ke.ModelError, match="'w'"):
        ke.load_model(proto)
