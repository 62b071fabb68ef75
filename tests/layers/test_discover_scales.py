"""Scales and shifts of normalizations with statistics of the batch or of groups."""

import numpy as np
import pytest

import kfac_engine as ke
from kfac_engine.graph.structure import Graph, Input, Node
from kfac_engine.layers.discover import discover
from tests import models

# float32 sums of a few dozen terms, relative to the largest entry.
SINGLE = 1e-4
BATCH = 5
EPSILON = 0.1


def test_batch_normalization_in_training_form_is_layer():
    proto = models.written(
        "batch,3",
        "scale(3) shift(3) running_mean(3) running_var=0.5,1.,1.5",
        f"""y, mean, variance = BatchNormalization<training_mode=1, epsilon={EPSILON}>(
                input, scale, shift, running_mean, running_var)
            output = Tanh(y)""",
    )
    feeds = models.random_inputs(proto, BATCH)
    engine = ke.Engine.from_onnx(proto, loss="normal", estimation_mode="empirical")
    engine.observe(feeds, np.zeros((BATCH, 3), np.float32))
    trace = ke.load_model(proto).run(feeds)
    ds = trace.vjp({"output": 2 * trace["output"]}, ["y"])["y"]
    x = feeds["input"].astype("float64")
    v = np.hstack([(x - x.mean(0)) / np.sqrt(x.var(0) + EPSILON) * ds, ds])
    expected = v.T @ v / BATCH
    found = engine.collection.fisher_blocks["scale", "shift"].full_fisher_block()
    np.testing.assert_allclose(found, expected, atol=SINGLE * np.abs(expected).max())


@pytest.mark.parametrize(("opset", "kind"), [(20, "generic"), (21, "scale_and_shift")])
def test_group_normalization_scale_per_channel_is_layer(opset, kind):
    entries = 2 if opset < 21 else 4
    node = Node("GroupNormalization", ("x", "scale", "shift"), ("y",), {"num_groups": 2}, "made")
    constants = {name: np.ones(entries, np.float32) for name in ("scale", "shift")}
    x = Input("x", np.dtype("float32"), ("batch", 4, 3))
    shapes = {"x": (2, 4, 3), "y": (2, 4, 3), "scale": (entries,), "shift": (entries,)}
    graph = Graph((node,), (x,), ("y",), constants, opset)
    found, *rest = discover(graph, ("scale", "shift"), shapes, 2).layers
    assert found.kind == kind
    if kind == "generic":
        assert found.reason == "scale of GroupNormalization without one number for each channel"
    else:
        assert found.parameters == ("scale", "shift")
        assert (found.form.scale.feature_axis, found.form.shift.feature_axis) == (1, 1)
        assert not rest
