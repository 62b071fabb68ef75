"""Sample runs in several sessions: the same types, shapes and values as NumPy has them."""

import numpy as np
import pytest
from onnx import parser

from kfac_engine.errors import BackendError
from kfac_engine.graph.load import load_graph
from kfac_engine.runtime import sample_run
from kfac_engine.runtime.sample_run import SampleRun, measured_facts

# `x` and `total`, a scalar, are read again at the end; `list` is no array; `t` is a captured value.
MODEL = """<ir_version: 10, opset_import: ["" : 18]>
graph (float[n,3] x, bool up) => (float[n,3] y)
<float[3,2] w = {1, 2, 3, 4, 5, 6}, int64 first = {0}> {
  total = ReduceSum <keepdims = 0> (x)
  s = MatMul (x, w)
  t = Relu (s)
  list = SequenceConstruct (t, s)
  turned = Transpose <perm = [1, 0]> (s)
  square = MatMul (turned, s)
  sign = Greater (square, total)
  u = SequenceAt (list, first)
  v = If (up) <then_branch = yes () => (float[a,2] one) { one = Add (t, u) },
               else_branch = no () => (float[b,2] two) { two = Identity (u) }>
  back = MatMul (v, turned)
  z = MatMul (back, x)
  y = Mul (z, total)
}"""
X = np.array([[1, -2, 0.5], [0, 1, -1]], np.float32)
FEEDS = {"x": X, "up": np.array(True)}
W = np.arange(1, 7, dtype=np.float32).reshape(3, 2)
S = X @ W
T = np.maximum(S, 0)
EXPECTED = {
    "total": X.sum(),
    "s": S,
    "t": T,
    "turned": S.T,
    "square": S.T @ S,
    "sign": X.sum() < S.T @ S,
    "u": T,
    "v": 2 * T,
    "back": 2 * T @ S.T,
    "z": 2 * T @ S.T @ X,
    "y": 2 * T @ S.T @ X * X.sum(),
}


@pytest.fixture(params=[1, 2, 3, 5, 100])
def most(request, monkeypatch):
    monkeypatch.setattr(sample_run, "_MOST_NODES", request.param)
    return int(request.param)


@pytest.fixture
def graph():
    return load_graph(parser.parse_model(MODEL))


@pytest.mark.usefixtures("most")
def test_facts_are_independent_of_session_length(graph):
    facts = SampleRun(graph).facts(FEEDS)
    found = {name: (facts[name].dtype, facts[name].shape) for name in EXPECTED}
    assert found == {name: (value.dtype, value.shape) for name, value in EXPECTED.items()}
    assert "list" not in facts
    assert measured_facts(graph, FEEDS) == facts


@pytest.mark.usefixtures("most")
def test_values_are_independent_of_session_length(graph):
    run = SampleRun(graph)
    for times in 1, 2:  # in two runs of the same sessions
        values = run.values({**FEEDS, "x": times * X}, ["t", "y", "total"])
        np.testing.assert_allclose(values["total"], times * EXPECTED["total"], rtol=1e-6)
        np.testing.assert_allclose(values["t"], times * EXPECTED["t"], rtol=1e-6)
        np.testing.assert_allclose(values["y"], times**4 * EXPECTED["y"], rtol=1e-6)


def test_shapes_are_inferred_across_sessions(most, graph):
    declared = SampleRun(graph).inferred_shapes()
    assert declared["square"] == (2, 2)
    assert "s" not in declared  # its first axis is open
    assert declared.get("total") == (() if most > 1 else None)  # a scalar is measured with its node


def test_sessions_are_extended_for_sequences(most, graph, monkeypatch):
    opened = []
    make = sample_run.Session

    def counted(model, **options):
        opened.append(model.nodes)
        return make(model, **options)

    monkeypatch.setattr(sample_run, "Session", counted)
    SampleRun(graph).values(FEEDS, ["square"])
    assert opened == {1: [1, 1, 1], 2: [2, 1]}.get(most, [3])
    opened.clear()
    # The third of four nodes makes the list, the fourth reads it: a session that ends between
    # them is made again, twice as long.
    SampleRun(graph).values(FEEDS, ["u"])
    assert opened == {1: [1, 1, 1, 2], 2: [2, 2], 3: [3, 4]}.get(most, [4])


@pytest.mark.usefixtures("most")
def test_incompatible_sizes_raise_error(graph):
    with pytest.raises(BackendError, match="a sample run of"):
        SampleRun(graph).facts({**FEEDS, "x": np.ones((2, 4), np.float32)})
