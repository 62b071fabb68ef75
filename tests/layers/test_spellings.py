"""Dense layers in every spelling: the numbers are those of the plain one, ``x·W + b``."""

import numpy as np
import pytest

import kfac_engine as ke
from tests import models, oracle

# float32 sums of a few dozen terms, relative to the largest entry.
SINGLE = 2e-4
BATCH, D, K, T, H = 5, 4, 3, 2, 2


def turned(net, x, to, *perm):
    return net.op("Transpose", x, to=to, perm=list(perm))


def numbers(net, name, *values):
    return net.constant(name, np.array(values))


def scalar(net, name, value):
    return net.constant(name, np.array(value, np.float32))


# Each case: spelled as files do, and plainly; both make "y" of "input".


def gemm_scaled(net):
    w, b = net.weight("w", D, K), net.weight("b", K)
    net.op("Gemm", "input", w, b, to="y", alpha=0.5, beta=2.0)


def gemm_scaled_plain(net):
    x = net.op("Mul", "input", scalar(net, "ratio", 0.25), to="x")
    net.op("Mul", net.op("Gemm", x, "w", "b", to="s"), scalar(net, "beta", 2.0), to="y")


def gemm_without_bias(net):
    net.op("Gemm", "input", net.weight("w", D, K), to="y", alpha=0.5, beta=3.0)


def gemm_without_bias_plain(net):
    x = net.op("Mul", "input", scalar(net, "alpha", 0.5), to="x")
    net.op("MatMul", x, "w", to="y")


def gemm_turned_data(net):
    x = turned(net, "input", "columns", 1, 0)
    net.op("Gemm", x, net.weight("w", K, D), net.weight("b", 1, K), to="y", transA=1, transB=1)


def gemm_weight_first(net):
    x = turned(net, "input", "columns", 1, 0)
    y = net.op("Gemm", net.weight("w", K, D), x, net.weight("b", K, 1), to="s")
    turned(net, y, "y", 1, 0)


def gemm_both_turned(net):
    y = net.op("Gemm", net.weight("w", D, K), "input", to="s", transA=1, transB=1)
    turned(net, y, "y", 1, 0)


def matmul_weight_first(net):
    x = turned(net, "input", "columns", 1, 0)
    y = net.op("MatMul", net.weight("w", K, D), x, to="s")
    y = net.op("Add", y, net.weight("b", K, 1), to="biased")
    turned(net, y, "y", 1, 0)


def gemm_then_add(net):
    net.op(
        "Add", net.op("Gemm", "input", net.weight("w", D, K), to="s"), net.weight("b", K), to="y"
    )


def matmul_thin_weight(net):
    x = net.op("MatMul", "input", net.weight("w", 1, D, K), to="s")
    x = net.op("Squeeze", x, numbers(net, "axis", 0), to="flat")
    net.op("Add", x, net.weight("b", K), to="y")


def matmul_vector(net):
    x = net.op("MatMul", "input", net.weight("w", D), to="s")
    net.op("Unsqueeze", x, numbers(net, "axis", 1), to="y")


def matmul_vector_first(net):
    x = net.op("MatMul", net.weight("w", D), turned(net, "input", "columns", 1, 0), to="s")
    net.op("Unsqueeze", x, numbers(net, "axis", 1), to="y")


def einsum(net):
    x = net.op("Einsum", "input", net.weight("w", K, D), to="s", equation="nd,kd->nk")
    net.op("Add", x, net.weight("b", K), to="y")


def einsum_weight_first(net):
    x = net.op("Einsum", net.weight("w", K, D), "input", to="s", equation="kd,nd->nk")
    net.op("Add", x, net.weight("b", K), to="y")


def scaled_weight(net):
    w = net.op("Mul", scalar(net, "c", 0.5), net.weight("w", K, D), to="scaled")
    w = turned(net, w, "turned", 1, 0)
    net.op("Add", net.op("MatMul", "input", w, to="s"), net.weight("b", K), to="y")


def divided_weight(net):
    w = net.op("Div", net.weight("w", D, K), scalar(net, "c", 2.0), to="scaled")
    net.op("Gemm", "input", w, net.weight("b", K), to="y")


def scaled_filter(net):
    """A dense layer as a convolution of one pixel, its filter scaled by an array of one number."""
    c = net.constant("c", np.array([0.5], np.float32))
    w = net.op("Mul", net.weight("w", K, D, 1), c, to="scaled")
    x = net.op("Unsqueeze", "input", numbers(net, "axis", 2), to="pixels")
    x = net.op("Conv", x, w, net.weight("b", K), to="s")
    net.op("Squeeze", x, numbers(net, "axis_2", 2), to="y")


def scaled_plain(net):
    x = net.op("Mul", "input", scalar(net, "half", 0.5), to="x")
    net.op("Gemm", x, "w", "b", to="y")


def plain(net):
    net.op("Gemm", "input", "w", "b", to="y")


def plain_without_bias(net):
    net.op("MatMul", "input", "w", to="y")


def einsum_to_heads(net):
    x = net.op("Einsum", "input", net.weight("w", D, H, K), to="s", equation="ntd,dhk->nhtk")
    net.op("Add", x, net.weight("b", H, 1, K), to="y")


def to_heads_plain(net):
    s = net.op("Add", net.op("MatMul", "input", "w", to="p"), "b", to="s")
    s = net.op("Reshape", s, numbers(net, "apart", 0, 0, H, K), to="r")
    turned(net, s, "y", 0, 2, 1, 3)


def einsum_from_heads(net):
    x = net.op("Einsum", "input", net.weight("w", H, K, D), to="s", equation="nhtk,hkd->ntd")
    net.op("Add", x, net.weight("b", D), to="y")


def from_heads_plain(net):
    x = turned(net, "input", "t", 0, 2, 1, 3)
    x = net.op("Reshape", x, numbers(net, "together", 0, 0, H * K), to="r")
    net.op("Add", net.op("MatMul", x, "w", to="s"), "b", to="y")


def every_expert_sees_all(net):
    x = net.op("Einsum", "input", net.weight("w", H, D, K), to="s", equation="nd,edk->nek")
    net.op("Add", x, net.weight("b", H, K), to="y")


def every_expert_plain(net):
    x = net.op("Gemm", "input", "w", "b", to="s")
    net.op("Reshape", x, numbers(net, "apart", 0, H, K), to="y")


def matmul_stretched(net):
    """Three axes of data for one of the weight's: all experts see the same rows."""
    x = net.op("Unsqueeze", "input", numbers(net, "axis", 1), to="one_slot")
    net.op("MatMul", x, net.weight("w", H, D, K), to="y")


def matmul_stretched_plain(net):
    x = net.op("MatMul", "input", "w", to="s")
    x = net.op("Reshape", x, numbers(net, "apart", 0, 0, H, K), to="r")
    turned(net, x, "y", 0, 2, 1, 3)


_FLAT, _TOKENS = ["batch", D], ["batch", T, D]
# Spelled, plain, sides of the input, what the plain weight is made of the file's.
CASES = {
    "alpha and beta": (gemm_scaled, gemm_scaled_plain, _FLAT, lambda w: w),
    "alpha without bias": (gemm_without_bias, gemm_without_bias_plain, _FLAT, lambda w: w),
    "transA": (gemm_turned_data, plain, _FLAT, lambda w: w.T),
    "Gemm, weight first": (gemm_weight_first, plain, _FLAT, lambda w: w.T),
    "Gemm, both turned": (gemm_both_turned, plain_without_bias, _FLAT, lambda w: w),
    "MatMul, weight first": (matmul_weight_first, plain, _FLAT, lambda w: w.T),
    "Gemm, then Add": (gemm_then_add, plain, _FLAT, lambda w: w),
    "weight of an axis more": (matmul_thin_weight, plain, _FLAT, lambda w: w[0]),
    "vector": (matmul_vector, plain_without_bias, _FLAT, lambda w: w[:, None]),
    "vector first": (matmul_vector_first, plain_without_bias, _FLAT, lambda w: w[:, None]),
    "Einsum": (einsum, plain, _FLAT, lambda w: w.T),
    "Einsum, weight first": (einsum_weight_first, plain, _FLAT, lambda w: w.T),
    "scaled weight": (scaled_weight, scaled_plain, _FLAT, lambda w: w.T),
    "divided weight": (divided_weight, scaled_plain, _FLAT, lambda w: w),
    "scaled filter": (scaled_filter, scaled_plain, _FLAT, lambda w: w[:, :, 0].T),
    "Einsum to heads": (einsum_to_heads, to_heads_plain, _TOKENS, lambda w: w.reshape(D, H * K)),
    "Einsum from heads": (einsum_from_heads, from_heads_plain, ["batch", H, T, K],
                          lambda w: w.reshape(H * K, D)),
    "experts of the same input": (every_expert_sees_all, every_expert_plain, _FLAT,
                                  lambda w: w.transpose(1, 0, 2).reshape(D, H * K)),
    "stretched input": (matmul_stretched, matmul_stretched_plain, _TOKENS,
                        lambda w: w.transpose(1, 0, 2).reshape(D, H * K)),
}  # fmt: skip


def finished(net, sides, rank):
    net.op("Tanh", "y", to="output")
    return net.model(
        {"input": sides}, {"output": ["batch", *[f"side {i}" for i in range(rank - 1)]]}
    )


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
    spelled, write_plain, sides, matrix = CASES[name]
    net = models.Net()
    spelled(net)
    values = {n: net._constants[n] for n in ("w", "b") if n in net._constants}
    rank = 4 if name in ("Einsum to heads", "stretched input") else 3 if len(sides) > 2 else 2
    rank = 3 if name == "experts of the same input" else rank
    model = finished(net, sides, rank)
    other = models.Net()
    other.constant("w", np.ascontiguousarray(matrix(values["w"])))
    if "b" in values:
        other.constant("b", values["b"].ravel())
    write_plain(other)
    expected = step(finished(other, sides, rank))[1]
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


def experts_by_matmul(net):
    x = net.op("MatMul", "input", net.weight("w", H, D, K), to="s")
    net.op("Add", x, net.weight("b", H, 1, K), to="y")


def experts_by_einsum(net):
    x = net.op("Einsum", "input", net.weight("w", H, K, D), to="s", equation="netd,ekd->netk")
    net.op("Add", x, net.weight("b", H, 1, K), to="y")


def experts_first(net):
    """Slots come before the batch, as mixtures of experts hand out their rows."""
    x = turned(net, "input", "dealt", 1, 0, 2, 3)
    x = net.op("Squeeze", x, numbers(net, "axis", 2), to="rows")
    x = net.op("MatMul", x, net.weight("w", H, D, K), to="s")
    x = net.op("Add", x, net.weight("b", H, 1, K), to="biased")
    x = net.op("Unsqueeze", x, numbers(net, "axis_2", 2), to="wide")
    turned(net, x, "y", 1, 0, 2, 3)


EXPERTS = {
    "MatMul": (experts_by_matmul, T, lambda w: w),
    "Einsum": (experts_by_einsum, T, lambda w: w.swapaxes(1, 2)),
    "slots first": (experts_first, 1, lambda w: w),
}


@pytest.mark.parametrize("name", EXPERTS)
def test_each_expert_has_kronecker_factor_pair(name):
    spelled, positions, stack = EXPERTS[name]
    net = models.Net()
    spelled(net)
    model = finished(net, ["batch", H, positions, D], 4)
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
    def rows(net, table):
        values = net.constant("values", np.array([0, 1], np.float32))
        hot = net.op("OneHot", "input", numbers(net, "depth", models.VOCABULARY), values, to="hot")
        net.op("MatMul", hot, table, to="y")

    blocks = []
    for build in (rows, lambda net, table: net.op("Gather", table, "input", to="y")):
        net = models.Net()
        build(net, net.weight("w", models.VOCABULARY, K))
        net.op("Tanh", "y", to="output")
        model = net.model({"input": ["batch", T]}, {"output": ["batch", T, K]}, "int64")
        engine, result = step(model)
        (layer,) = engine.layers
        assert (layer.kind, layer.inputs) == ("embedding", "input")
        blocks.append(result.natural_gradients["w"])
    np.testing.assert_allclose(*blocks, rtol=SINGLE, atol=1e-6)


def test_rewritten_graph_keeps_values_of_file():
    """Whatever is written anew: a trace still shows what the file computes."""
    net = models.Net()
    scaled_weight(net)
    net.op("Tanh", net.op("Gemm", "y", net.weight("v", K, K), to="z", alpha=0.5), to="output")
    model = net.model({"input": _FLAT}, {"output": ["batch", K]})
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


def test_bias_that_adds_axes_is_not_bias():
    """It gives the result a new first axis, along which there are no examples."""
    net = models.Net()
    product = net.op("MatMul", "input", net.weight("w", 4, 3), to="product")
    wide = net.op("Add", product, net.weight("b", 1, 1, 3), to="wide")
    net.op("Squeeze", wide, net.constant("axis", np.array([0])), to="output")
    proto = net.model({"input": ["batch", 4]}, {"output": ["batch", 3]})
    layers = ke.Engine.from_onnx(proto, loss="normal").layers
    assert ("w",) in [layer.parameters for layer in layers]


def test_scalar_is_not_bias():
    net = models.Net()
    product = net.op("MatMul", "input", net.weight("w", 4, 3), to="product")
    net.op("Add", product, net.weight("b", 1), to="output")
    proto = net.model({"input": ["batch", 4]}, {"output": ["batch", 3]})
    layers = ke.Engine.from_onnx(proto, loss="normal", trainable=["w", "b"]).layers
    assert ("w",) in [layer.parameters for layer in layers]
