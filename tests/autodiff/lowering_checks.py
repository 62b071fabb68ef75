"""Holds what an operator is rewritten as against the operator: values, and finite differences."""

import numpy as np

from kfac_engine.runtime.lower import lowered
from tests.autodiff.harness import Bench, bench, compiled, draw, finite_differences
from tests.comparing import assert_arrays_close

SAMPLE_BATCH = 2
BATCHES = (3, 1)
STEP = 2.0**-16
# ONNX Runtime works in float32, and gradients are sums of differences.
TOLERANCE = 1e-4


class Plain(Bench):
    """A graph that is only evaluated."""

    def forward(self, feeds, names):
        graph = self.graph
        return compiled(self.runtime, graph, graph.nodes, graph.constants, feeds, names)


def plain(tested, runtime) -> Plain:
    made = bench(tested, runtime, SAMPLE_BATCH)
    return Plain(made.graph, made.sample, made.outputs, made.wrt, runtime)


def rewritten(tested) -> tuple[Plain, Bench]:
    """The operator, and what it becomes; both run by ONNX Runtime."""
    made = plain(tested, "ort")
    inputs = {entry.name: made.sample[entry.name] for entry in made.graph.inputs}
    graph, _ = lowered(made.graph, made.wrt, inputs)
    assert tested.op not in {node.op for node in graph.nodes}
    return made, Bench(graph, made.sample, made.outputs, made.wrt, "ort")


def check_values(tested, batch):
    """What ONNX Runtime computes before and after is the same."""
    made, new = rewritten(tested)
    feeds = fed(made, tested, "float32", batch)
    truth = made.forward(feeds, made.outputs)(feeds)
    found = new.forward(feeds, made.outputs)(feeds)
    assert_arrays_close(found, truth, rtol=TOLERANCE, atol=TOLERANCE)


def check_gradients(tested):
    """Gradients are the differences of the operator's definition in float64."""
    reference = plain(tested, "reference")
    feeds = fed(reference, tested, "float64", BATCHES[0])
    rng = np.random.default_rng(0)
    values = reference.forward(feeds, reference.outputs)(feeds)
    cotangents = {name: rng.normal(size=value.shape) for name, value in values.items()}
    truth = finite_differences(reference, feeds, cotangents, STEP)
    made, new = rewritten(tested)
    narrow = {name: g.astype("float32") for name, g in cotangents.items()}
    found = new.gradients(fed(made, tested, "float32", BATCHES[0]), narrow)
    for name, expected in truth.items():
        actual = found.get(name, np.zeros_like(expected))
        scale = max(1.0, np.abs(expected).max(initial=0))
        np.testing.assert_allclose(actual, expected, rtol=0, atol=TOLERANCE * scale, err_msg=name)


def fed(made, tested, dtype, batch):
    arrays = draw(tested, dtype, batch)
    return {name: arrays[name] for name in made.sample}
