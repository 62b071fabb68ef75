"""A classifier of sequences goes through the whole engine: gradients, layers, training."""

import numpy as np
import pytest

import kfac_engine as ke
from tests.autodiff.recurrences import GATES, recurrence
from tests.models import parsed

STEPS, EXAMPLES, D_IN, HIDDEN, CLASSES = 4, 6, 2, 3, 3
# A loss of order one in float32, through four steps.
CLOSE = 1e-5
# Central differences in float64.
STEP = 1e-5


def weights(op):
    rng = np.random.default_rng([7, *op.encode()])
    rows = GATES[op] * HIDDEN
    sides = {
        "W": (1, rows, D_IN),
        "R": (1, rows, HIDDEN),
        "B": (1, 2 * rows),
        "V": (HIDDEN, CLASSES),
        "c": (CLASSES,),
    }
    return {name: (rng.normal(size=s) / 2).astype(np.float32) for name, s in sides.items()}


def classifier(op):
    """The last state of a recurrence, and a dense layer on it."""
    return parsed(
        f"""classifier (float[{STEPS},n,{D_IN}] x) => (float[n,{CLASSES}] logits) {{
          [memory] "", h = {op} <hidden_size = {HIDDEN}> (x, W, R, B)
          last = Squeeze (h, axes)  logits = Gemm (last, V, c)
        }}""",
        {**weights(op), "axes": [0]},
    )


def cross_entropy(op, x, t, values):
    feeds = {"X": x, **{name: values[name] for name in ("W", "R", "B")}}
    logits = recurrence(op, feeds, {})[1][0] @ values["V"] + values["c"]
    log_p = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    return float(-log_p[np.arange(len(t)), t].mean())


def batch():
    """Sequences, and whether their first feature rises, falls or does neither."""
    rng = np.random.default_rng(3)
    t = np.arange(EXAMPLES) % CLASSES
    x = rng.normal(size=(STEPS, EXAMPLES, D_IN)) / 4
    x[..., 0] += np.linspace(-1, 1, STEPS)[:, None] * (t - 1)
    return x.astype(np.float32), t


@pytest.mark.parametrize("op", GATES)
def test_loss_and_gradients_are_those_of_the_formula(op):
    x, t = batch()
    result = ke.Engine.from_onnx(classifier(op), loss="categorical").gradients({"x": x}, t)
    values = {name: array.astype(float) for name, array in weights(op).items()}
    assert abs(result.loss - cross_entropy(op, x, t, values)) < CLOSE
    for name, value in values.items():
        along = np.random.default_rng(0).normal(size=value.shape)
        up, down = (
            cross_entropy(op, x, t, {**values, name: value + step * along})
            for step in (STEP, -STEP)
        )
        slope = (up - down) / (2 * STEP)
        assert abs(float((result.gradients[name] * along).sum()) - slope) < CLOSE


@pytest.mark.parametrize("op", GATES)
def test_both_matrices_of_a_step_are_layers_used_once_a_step(op):
    engine = ke.Engine.from_onnx(classifier(op), loss="categorical")
    used = {
        layer.parameters[0]: len(layer.inputs)
        for layer in engine.layers
        if layer.kind == "fully_connected_multi"
    }
    assert used == {"W": STEPS, "R": STEPS}
    covered = {name for layer in engine.layers for name in layer.parameters if not layer.reason}
    assert covered == set(weights(op))
