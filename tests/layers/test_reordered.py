"""Weights whose rows are put in another order before a layer reads them."""

import numpy as np
import pytest
from onnx import numpy_helper

import kfac_engine as ke
from tests import models, oracle

# float32 sums of a few dozen terms, relative to the largest entry.
SINGLE = 1e-4
# float64 throughout; the oracle itself is good to 1e-11.
DOUBLE = 1e-9
BATCH, STEPS, WIDTH, STATE = 6, 3, 4, 3

# Operator to the order in which ONNX wants PyTorch's gates (i, f, g, o and r, z, n).
GATES = {"LSTM": (0, 3, 1, 2), "GRU": (1, 0, 2)}


def by_slices(name, gates):
    cuts = [f"{name}{g} = Slice({name}, at{g}, at{g + 1}, first)" for g in gates]
    order = ", ".join(f"{name}{g}" for g in gates)
    return "  ".join([*cuts, f"{name}_ = Concat<axis=0>({order})"])


def by_split(name, gates):
    pieces, order = (", ".join(f"{name}{g}" for g in row) for row in (sorted(gates), gates))
    split = f"{pieces} = Split<axis=0, num_outputs={len(gates)}>({name})"
    return f"{split}  {name}_ = Concat<axis=0>({order})"


def by_gather(name, gates):
    return f"{name}_ = Gather<axis=0>({name}, order)"


def rows(gates):
    return np.concatenate([np.arange(place * STATE, (place + 1) * STATE) for place in gates])


def constants(gates):
    """Those that ``by_slices`` and ``by_gather`` read."""
    bounds = [f"at{g}={g * STATE}" for g in range(len(gates) + 1)]
    return f" first=0 order={','.join(map(str, rows(gates)))} {' '.join(bounds)}"


def recurrence(op, reorder=None):
    """A recurrence with weights in PyTorch's order, or as ONNX wants them where not reordered."""
    gates, names = GATES[op], ("w", "r", "bw", "br")
    size = len(gates) * STATE
    model = models.written(
        f"batch,{STEPS},{WIDTH} -> batch,2",
        f"w({size},{WIDTH}) r({size},{STATE}) bw({size}) br({size}) head({STATE},2)"
        + constants(gates),
        "  ".join(reorder(name, gates) for name in names if reorder)
        + f"""  b_ = Concat<axis=0>(bw_, br_)  W = Unsqueeze(w_, first)  R = Unsqueeze(r_, first)
            B = Unsqueeze(b_, first)  steps = Transpose<perm=[1, 0, 2]>(input)
            all, last = {op}<hidden_size={STATE}>(steps, W, R, B)
            state = Squeeze(last, first)  output = Gemm(state, head)""",
    )
    for entry in model.graph.initializer:
        if not reorder and entry.name in names:
            array = numpy_helper.to_array(entry)[rows(gates)]
            entry.CopyFrom(numpy_helper.from_array(array, f"{entry.name}_"))
    return model


def step(model):
    engine = ke.Engine.from_onnx(model, loss="normal", estimation_mode="exact")
    feeds = models.random_inputs(model, BATCH)
    return engine, engine.step(feeds, np.zeros((BATCH, 2), np.float32))


@pytest.mark.parametrize(
    ("op", "reorder"),
    [("LSTM", by_slices), ("LSTM", by_gather), ("GRU", by_slices), ("GRU", by_split)],
)
def test_reordered_gates_have_natural_gradients_of_ordered_gates(op, reorder):
    engine, found = step(recurrence(op, reorder))
    _, expected = step(recurrence(op))
    (w, *_), (r, *_) = (
        next(entry.parameters for entry in engine.layers if name in entry.parameters)
        for name in ("w", "r")
    )
    assert (w, r) == ("w", "r")
    kinds = {entry.kind for entry in engine.layers}
    assert kinds == {"fully_connected_multi", "fully_connected"}
    for name in ("w", "r", "bw", "br"):
        wanted = expected.natural_gradients[f"{name}_"]
        np.testing.assert_allclose(
            found.natural_gradients[name][rows(GATES[op])],
            wanted,
            atol=SINGLE * np.abs(wanted).max(),
            err_msg=name,
        )


def test_reordered_rows_have_exact_block_for_one_example():
    gates = (1, 0)
    model = models.written(
        f"batch,{WIDTH} -> batch,{2 * STATE}",
        f"w({2 * STATE},{WIDTH}) b({2 * STATE})" + constants(gates),
        f"""{by_slices("w", gates)}  {by_gather("b", gates)}
            s = Gemm<transB=1>(input, w_, b_)  output = Tanh(s)""",
        "double",
    )
    feeds = models.random_inputs(model, batch=1)
    engine = ke.Engine.from_onnx(
        model, loss="normal", estimation_mode="exact", reduction="batch_mean"
    )
    engine.observe(feeds)
    (layer,) = engine.layers
    assert (layer.parameters, layer.parts) == (("w", "b"), ("", ""))
    F = oracle.dense_fisher(model, feeds, "output", ["w", "b"], "normal")
    entries = np.arange(w_size := 2 * STATE * WIDTH).reshape(2 * STATE, WIDTH)
    packed = np.concatenate([entries[rows(gates)].T.ravel(), w_size + rows(gates)])
    block = engine.collection.fisher_blocks[layer.key].full_fisher_block()
    np.testing.assert_allclose(block, F[np.ix_(packed, packed)], atol=DOUBLE)
