"""Dense layers in every spelling: the numbers are those of the plain one, ``x·W + b``."""

import numpy as np
import pytest
from onnx import numpy_helper

import kfac_engine as ke
from tests import models, oracle

# float32 sums of a few dozen terms, relative to the largest entry.
SINGLE = 2e-4
BATCH, D, K, T, H = 5, 4, 3, 2, 2


def integers(name, *values):
    return f"{name} = Constant<value_ints={list(values)}>()  "


FLAT, HEADS = "batch,4 -> batch,k", "batch,2,4 -> batch,h,t,k"
PLAIN, NO_BIAS = "y = Gemm(input, w, b)", "y = MatMul(input, w)"
HALF = "c = Constant<value_float=0.5>()  x = Mul(input, c)  "
COLUMNS, ROWS = "x = Transpose<perm=[1, 0]>(input)  ", "y = Transpose<perm=[1, 0]>(s)"
SCALED = "scaled = Mul(c, w)  turned = Transpose<perm=[1, 0]>(scaled)  s = MatMul(input, turned)  "
SCALED += "y = Add(s, b)"
EINSUM = 's = Einsum<equation="{}">({})  y = Add(s, b)'
APART = integers("apart", 0, 0, H, K) + "r = Reshape(s, apart)  y = Transpose<perm=[0, 2, 1, 3]>(r)"
# Constants and nodes of the file, plain nodes, sides, what the plain weight is made of the file's.
CASES = {
    "alpha and beta": (
        "w(4,3) b(3)", "y = Gemm<alpha=0.5, beta=2.0>(input, w, b)",
        "c = Constant<value_float=0.25>()  two = Constant<value_float=2.0>()  x = Mul(input, c)  "
        "s = Gemm(x, w, b)  y = Mul(s, two)",
        FLAT, lambda w: w,
    ),
    "alpha without bias": (
        "w(4,3)", "y = Gemm<alpha=0.5, beta=3.0>(input, w)", HALF + "y = MatMul(x, w)", FLAT,
        lambda w: w),
    "transA": (
        "w(3,4) b(1,3)", COLUMNS + "y = Gemm<transA=1, transB=1>(x, w, b)", PLAIN, FLAT,
        lambda w: w.T),
    "Gemm, weight first": (
        "w(3,4) b(3,1)", f"{COLUMNS} s = Gemm(w, x, b)  {ROWS}", PLAIN, FLAT, lambda w: w.T),
    "Gemm, both turned": (
        "w(4,3)", f"s = Gemm<transA=1, transB=1>(w, input)  {ROWS}", NO_BIAS, FLAT, lambda w: w),
    "MatMul, weight first": (
        "w(3,4) b(3,1)", f"{COLUMNS} p = MatMul(w, x)  s = Add(p, b)  {ROWS}", PLAIN, FLAT,
        lambda w: w.T),
    "Gemm, then Add": (
        "w(4,3) b(3)", "s = Gemm(input, w)  y = Add(s, b)", PLAIN, FLAT, lambda w: w),
    "weight of an axis more": (
        "w(1,4,3) b(3) axis=0", "p = MatMul(input, w)  s = Squeeze(p, axis)  y = Add(s, b)", PLAIN,
        FLAT, lambda w: w[0]),
    "vector": (
        "w(4) axis=1", "s = MatMul(input, w)  y = Unsqueeze(s, axis)", NO_BIAS, FLAT,
        lambda w: w[:, None]),
    "vector first": (
        "w(4) axis=1", COLUMNS + "s = MatMul(w, x)  y = Unsqueeze(s, axis)", NO_BIAS, FLAT,
        lambda w: w[:, None]),
    "Einsum": ("w(3,4) b(3)", EINSUM.format("nd,kd->nk", "input, w"), PLAIN, FLAT, lambda w: w.T),
    "Einsum, weight first": (
        "w(3,4) b(3)", EINSUM.format("kd,nd->nk", "w, input"), PLAIN, FLAT, lambda w: w.T),
    "scaled weight": ("w(3,4) b(3) c:0.5", SCALED, HALF + "y = Gemm(x, w, b)", FLAT, lambda w: w.T),
    "divided weight": (
        "w(4,3) b(3) c:2.0", "v = Div(w, c)  y = Gemm(input, v, b)", HALF + "y = Gemm(x, w, b)",
        FLAT, lambda w: w),
    # A dense layer as a convolution of one pixel.
    "scaled filter": (
        "w(3,4,1) b(3) c=0.5 axis=2",
        "v = Mul(w, c)  x = Unsqueeze(input, axis)  s = Conv(x, v, b)  y = Squeeze(s, axis)",
        HALF + "y = Gemm(x, w, b)", FLAT, lambda w: w[:, :, 0].T),
    "Einsum to heads": (
        "w(4,2,3) b(2,1,3)", EINSUM.format("ntd,dhk->nhtk", "input, w"),
        "p = MatMul(input, w)  s = Add(p, b)  " + APART, HEADS, lambda w: w.reshape(D, H * K)),
    "Einsum from heads": (
        "w(2,3,4) b(4)", EINSUM.format("nhtk,hkd->ntd", "input, w"),
        integers("joined", 0, 0, H * K)
        + "x = Transpose<perm=[0, 2, 1, 3]>(input)  r = Reshape(x, joined)  s = MatMul(r, w)  "
        "y = Add(s, b)",
        "batch,2,2,3 -> batch,t,d", lambda w: w.reshape(H * K, D),
    ),
    "experts of the same input": (
        "w(2,4,3) b(2,3)", EINSUM.format("nd,edk->nek", "input, w"),
        integers("apart", 0, H, K) + "s = Gemm(input, w, b)  y = Reshape(s, apart)",
        "batch,4 -> batch,e,k", lambda w: w.transpose(1, 0, 2).reshape(D, H * K)),
    # Three axes of data for one of the weight's: all experts see the same rows.
    "stretched input": (
        "w(2,4,3) axis=1", "x = Unsqueeze(input, axis)  y = MatMul(x, w)",
        "s = MatMul(input, w)  " + APART, HEADS, lambda w: w.transpose(1, 0, 2).reshape(D, H * K)),
}  # fmt: skip


def finished(sides, constants, nodes, fed="float"):
    return models.written(sides, constants, f"{nodes}  output = Tanh(y)", fed)


def constants_of(model):
    return {e.name: e for e in model.graph.initializer if e.name in ("w", "b")}


def step(model):
    engine = ke.Engine.from_onnx(
        model, loss="normal", estimation_mode="empirical", reduction="batch_mean"
    )
    feeds = models.random_inputs(model, BATCH)
    output = ke.load_model(model).run(feeds)["output"]
    targets = np.random.default_rng(3).standard_normal(output.shape).astype(np.float32)
    return engine, engine.step(feeds, targets)


@pytest.mark.parametrize("name", CASES)
def test_layer_forms_have_natural_gradients_of_plain_form(name):
    constants, nodes, plain, sides, matrix = CASES[name]
    model, other = finished(sides, constants, nodes), finished(sides, "", plain)
    values = {n: numpy_helper.to_array(entry) for n, entry in constants_of(model).items()}
    for key, value in values.items():
        array = np.ascontiguousarray(matrix(value) if key == "w" else value.ravel())
        other.graph.initializer.append(numpy_helper.from_array(array, key))
    expected = step(other)[1]
    engine, found = step(model)
    (layer,) = engine.layers
    kind = "conv1d" if name == "scaled filter" else "fully_connected"
    assert (layer.kind, layer.parameters) == (kind, tuple(values))
    np.testing.assert_allclose(found.loss, expected.loss, rtol=SINGLE)
    moved = {"w": matrix(found.natural_gradients["w"])}
    if "b" in values:
        moved["b"] = found.natural_gradients["b"].ravel()
    for key, value in moved.items():
        wanted = expected.natural_gradients[key]
        np.testing.assert_allclose(value, wanted, atol=SINGLE * np.abs(wanted).max(), err_msg=key)


# -- experts ---------------------------------------------------------------------------------------


# Constants, nodes, positions, and the weight with a matrix for each expert.
EXPERTS = {
    "MatMul": ("w(2,4,3) b(2,1,3)", "s = MatMul(input, w)  y = Add(s, b)", T, lambda w: w),
    "Einsum": (
        "w(2,3,4) b(2,1,3)", EINSUM.format("netd,ekd->netk", "input, w"), T,
        lambda w: w.swapaxes(1, 2),
    ),
    # Slots come before the batch, as mixtures of experts hand out their rows.
    "slots first": (
        "w(2,4,3) b(2,1,3) axis=2",
        "x = Transpose<perm=[1, 0, 2, 3]>(input)  r = Squeeze(x, axis)  p = MatMul(r, w)  "
        "s = Add(p, b)  v = Unsqueeze(s, axis)  y = Transpose<perm=[1, 0, 2, 3]>(v)",
        1, lambda w: w,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", EXPERTS)
def test_each_expert_has_kronecker_factor_pair(name):
    constants, nodes, positions, stack = EXPERTS[name]
    model = finished(f"batch,{H},{positions},{D} -> batch,e,t,k", constants, nodes)
    engine, result = step(model)
    (layer,) = engine.layers
    assert (layer.kind, layer.parameters) == ("stacked_dense", ("w", "b"))
    assert layer.factor_shapes == ((H, D + 1, D + 1), (H, K, K))
    x = models.random_inputs(model, BATCH)["input"].astype("float64")
    trace = ke.load_model(model).run(models.random_inputs(model, BATCH))
    targets = np.random.default_rng(3).standard_normal(trace["output"].shape).astype(np.float32)
    ds = trace.vjp({"output": 2 * (trace["output"] - targets)}, ["y"])["y"].astype("float64")
    block = engine.collection.get_blocks()[0].full_fisher_block()
    side = (D + 1) * K
    for slot in range(H):
        a = np.insert(x[:, slot].reshape(-1, D), D, 1, axis=1)
        g = ds[:, slot].reshape(-1, K)
        expected = positions * np.kron(a.T @ a, g.T @ g) / len(a) ** 2
        found = block[slot * side : (slot + 1) * side, slot * side : (slot + 1) * side]
        np.testing.assert_allclose(found, expected, atol=SINGLE * np.abs(expected).max())
    # Product and division by the damped block are inverse to each other, in the file's layout.
    back = engine.precondition(engine.precondition(result.gradients, exp=-1), exp=1)
    for key, gradient in result.gradients.items():
        np.testing.assert_allclose(
            back[key], gradient, atol=100 * SINGLE * np.abs(gradient).max(), err_msg=key
        )
    assert stack(result.natural_gradients["w"]).shape == (H, D, K)


# -- tables ----------------------------------------------------------------------------------------


def test_product_with_one_hot_rows_is_embedding():
    blocks = []
    for nodes in (
        "hot = OneHot(input, depth, values)  y = MatMul(hot, w)", "y = Gather(w, input)"
    ):  # fmt: skip
        constants = f"w({models.VOCABULARY},3) depth:{models.VOCABULARY} values=0.0,1.0"
        engine, result = step(finished("batch,2 -> batch,2,3", constants, nodes, "int64"))
        (layer,) = engine.layers
        assert (layer.kind, layer.inputs) == ("embedding", "input")
        blocks.append(result.natural_gradients["w"])
    np.testing.assert_allclose(*blocks, rtol=SINGLE, atol=1e-6)


def test_rewritten_graph_keeps_values_of_file():
    """Whatever is written anew: a trace still shows what the file computes."""
    model = models.written(
        FLAT, "w(3,4) b(3) c:0.5 v(3,3)", SCALED + "  z = Gemm<alpha=0.5>(y, v)  output = Tanh(z)"
    )
    feeds = models.random_inputs(model, BATCH)
    trace = ke.load_model(model).run(feeds)
    values = ["scaled", "turned", "s", "y", "z", "output"]
    expected = oracle.evaluate(oracle.to_float64(model), feeds, *values)
    for name, wanted in zip(values, expected, strict=True):
        np.testing.assert_allclose(trace[name], wanted, rtol=1e-5, atol=1e-6, err_msg=name)


def test_subtracted_shift_keeps_signs_of_zeros():
    net = models.Net()
    net.op("Sub", "input", net.constant("b", np.array([0.0, -0.0, 1.0], "f")), to="y")
    net.op("Tanh", "y", to="output")
    model = net.model({"input": ["batch", 3]}, {"output": ["batch", 3]})
    x = np.array([[0.0, 0.0, 1.0], [-1.0, 1.0, 0.0]], "f")
    found = ke.load_model(model).run({"input": x})["y"]
    np.testing.assert_array_equal(found, x - np.array([0.0, -0.0, 1.0], "f"))
    assert not np.signbit(found[0]).any()
