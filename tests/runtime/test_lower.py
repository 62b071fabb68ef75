"""Every operator that is rewritten gives the value and the gradient of what it was."""

import numpy as np
import onnxruntime as ort
import pytest

import kfac_engine as ke
from kfac_engine.graph.load import load_graph
from kfac_engine.runtime.lower import lowered
from tests.models import parsed

STEP = 1e-3
# Central differences of float32 results with this step are right to about 1e-3.
TOLERANCE = 3e-3


def quick_gelu_model():
    w = np.random.default_rng(0).normal(size=(3, 4)).astype(np.float32)
    return parsed(
        """quick (float[n,3] x) => (float[n,4] y)
        { s = MatMul (x, w)  y = com.microsoft.QuickGelu <alpha = 1.5> (s) }""",
        {"w": w},
        '"": 18, "com.microsoft": 1',
    )


def test_fused_activation_gradient_equals_runtime_kernel():
    model = quick_gelu_model()
    rng = np.random.default_rng(1)
    x, g = rng.normal(size=(5, 3)).astype(np.float32), rng.normal(size=(5, 4)).astype(np.float32)
    gradient = ke.differentiate(model, wrt=["x"])
    found = ort.InferenceSession(gradient.SerializeToString()).run(
        ["gradient/x"], {"x": x, "cotangent": g}
    )[0]
    session = ort.InferenceSession(model.SerializeToString())
    truth = np.zeros_like(x)
    for index in np.ndindex(*x.shape):
        step = np.zeros_like(x)
        step[index] = STEP
        up, down = (session.run(None, {"x": x + s})[0] for s in (step, -step))
        truth[index] = ((up - down) * g).sum() / (2 * STEP)
    np.testing.assert_allclose(found, truth, rtol=TOLERANCE, atol=TOLERANCE)


def test_nodes_off_gradient_path_are_not_lowered():
    graph = load_graph(quick_gelu_model())
    rewritten, _ = lowered(graph, ())
    assert rewritten is graph


@pytest.mark.parametrize("wrt", ["x", "w"])
def test_lowering_keeps_result_names(wrt):
    graph, facts = lowered(load_graph(quick_gelu_model()), [wrt])
    assert graph.producers["y"].op == "Mul"
    assert {node.domain for node in graph.nodes} == {""}
    assert facts["y"].shape == facts["s"].shape
