"""Derivatives with respect to inputs as a file, against differences of the plain model."""

import re
import warnings

import numpy as np
import onnx
import pytest

import kfac_engine as ke
from tests import models, oracle
from tests.nightly import nightly_but, seeds

ALL = {"jacobian": True, "laplacian": True, "hessian": True, "directional": True}
D = 6  # features, and outputs of a block

# Blocks from 6 features x to 6 features y, as onnx's parser reads them; "@" ends each other name.
# Weights w, v of one block are 6 × 6, their biases have 6 numbers.
BLOCKS = {
    "dense": "z@ = MatMul(x, w@)  s@ = Add(z@, b@)  y = Tanh(s@)",
    "transposed": "z@ = Gemm<transB = 1>(x, w@, b@)  y = Gelu<approximate = \"tanh\">(z@)",
    "sine": "z@ = Gemm(x, w@, b@)  y = Sin(z@)",
    "swish": "z@ = Gemm(x, w@, b@)  g@ = Sigmoid(z@)  y = Mul(z@, g@)",
    "residual": "z@ = Gemm(x, w@, b@)  h@ = Softplus(z@)  y = Sub(x, h@)",
    "gated": "z@ = MatMul(x, w@)  g@ = MatMul(x, v@)  a@ = Tanh(z@)  y = Mul(a@, g@)",
    "softmax": "z@ = MatMul(x, w@)  p@ = Softmax(z@)  y = Mul(x, p@)",
    "log softmax": "z@ = MatMul(x, w@)  y = LogSoftmax(z@)",
    "layer norm": "z@ = LayerNormalization(x, b@, c@)  h@ = MatMul(z@, w@)  y = Add(x, h@)",
    "batch norm": "z@ = MatMul(x, w@)  h@ = BatchNormalization(z@, b@, c@, m@, q@)  y = Elu(h@)",
    "root mean square": """a@ = Mul(x, x)  n@ = ReduceMean<keepdims = 1>(a@, last)
        e@ = Add(n@, one)  r@ = Sqrt(e@)  y = Div(x, r@)""",
    "radii": "n@ = ReduceL2<keepdims = 1>(x, last)  e@ = Exp(n@)  y = Div(x, e@)",
    "powers": "a@ = Mul(x, x)  e@ = Add(a@, one)  p@ = Pow(e@, half)  y = Mul(p@, b@)",
    "periodic": "z@ = MatMul(x, w@)  s@ = Sin(z@)  c@_ = Cos(z@)  j@ = Concat<axis = 1>(s@, c@_)"
    "  y = MatMul(j@, t@)",
    "attention": """h@ = Reshape(x, tokens)  j@ = MatMul(h@, k@)
        p@ = Transpose<perm = [0, 2, 1]>(h@)  s@ = MatMul(j@, p@)  a@ = Softmax(s@)
        o@ = MatMul(a@, h@)  y = Reshape(o@, rows)""",
    "einsum": """h@ = Reshape(x, tokens)  s@ = Einsum<equation = "nic,njc,cd->nij">(h@, h@, k@)
        o@ = Einsum<equation = "nij,njc->nic">(s@, h@)  y = Reshape(o@, rows)""",
    "convolution": """h@ = Reshape(x, line)  z@ = Conv<pads = [1, 1]>(h@, f@)  a@ = Tanh(z@)
        p@ = AveragePool<kernel_shape = [3], pads = [1, 1]>(a@)  y = Reshape(p@, rows)""",
    "gru": """h@ = Reshape(x, tokens)  i@ = Transpose<perm = [1, 0, 2]>(h@)
        g@, l@ = GRU<hidden_size = 3>(i@, gw@, gr@)  o@ = Squeeze(g@, one_axis)
        a@ = Transpose<perm = [1, 0, 2]>(o@)  y = Reshape(a@, rows)""",
    "determinant": """h@ = Reshape(x, line)  p@ = Transpose<perm = [0, 2, 1]>(h@)
        m@_ = MatMul(p@, h@)  e@ = Add(m@_, identity)  d@ = Det(e@)  c@_ = Log(d@)
        k@_ = Unsqueeze(c@_, one_axis)  y = Mul(k@_, x)""",
    "parts": """a@, c@_ = Split<axis = 1>(x, halves)  e@ = Exp(a@)  m@_ = Mul(e@, c@_)
        y = Concat<axis = 1>(c@_, m@_)""",
    "picked": """g@ = Gather<axis = 1>(x, order)  n@ = Neg(g@)  z@ = Where(mask, n@, x)
        y = Atan(z@)""",
    "maximum": "z@ = MatMul(x, w@)  a@ = Mul(z@, x)  y = Max(a@, x)",
}  # fmt: skip
SMALL = {
    "last": [-1], "tokens": [-1, 2, 3], "rows": [-1, 6], "line": [-1, 1, 6], "halves": [3, 3],
    "one_axis": [1], "order": [5, 3, 3, 0, 2, 1],
}  # fmt: skip
WEIGHTS = {
    "w": (6, 6), "v": (6, 6), "b": (6,), "c": (6,), "m": (6,), "k": (3, 3), "t": (12, 6),
    "f": (1, 1, 3), "gw": (1, 9, 3), "gr": (1, 9, 3), "q": (6,),
}  # fmt: skip


def network(*names, batch="N"):
    """A model of these blocks, one after the other, and a last layer with two outputs."""
    text, value = [], "x"
    for index, name in enumerate(names):
        block = BLOCKS[name].replace("@", str(index))
        target = f"y{index}"
        words = [{"x": value, "y": target}.get(word, word) for word in _words(block)]
        text.append("".join(words))
        value = target
    nodes = " ".join(text) + f"  u = MatMul({value}, last_weight)"
    model = onnx.parser.parse_model(
        f"""<ir_version: 10, opset_import: ["": 20]>
        net (float[{batch},{D}] x) => (float[{batch},2] u) {{ {nodes} }}"""
    )
    rng = np.random.default_rng(len(nodes))
    constants = {name: np.array(value) for name, value in SMALL.items()}
    constants |= {"one": np.float32(1), "half": np.float32(0.3)}
    constants |= {"mask": np.arange(6) < 4, "identity": np.eye(6, dtype="float32")}
    shapes = {f"{w}{i}": shape for w, shape in WEIGHTS.items() for i in range(len(names))}
    for name, shape in {**shapes, "last_weight": (6, 2)}.items():
        values = rng.normal(size=shape) * 0.6
        constants[name] = (abs(values) + 0.5 if name[0] == "q" else values).astype("float32")
    read = {name for node in model.graph.node for name in node.input}
    for name, array in constants.items():
        if name in read:
            model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    return model


def _words(text):
    word, words = "", []
    for letter in text:
        if letter.isalnum() or letter == "_":
            word += letter
        else:
            words += [word, letter] if word else [letter]
            word = ""
    return [*words, word]


def check(model, features=D, *, tolerance=2e-6, wrt="x", output="u", **others):
    """Compare all derivatives of an output with differences of the model."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ke.ExportWarning)  # Max has a kink
        result = ke.derivatives(model, wrt, output, **ALL)
    rng = np.random.default_rng(0)
    x, v = rng.normal(size=(2, 3, features)) / 2
    names = [entry.name for entry in result.graph.output if entry.name.endswith(f" {output}")]
    fed = {wrt: x, "direction": v, **others}
    found = dict(zip(names, oracle.evaluate(result, fed, *names), strict=True))

    def at(moved):
        return oracle.evaluate(model, {wrt: moved, **others}, output)[0]

    expected = differences(at, x, v)
    assert names == [
        f"{what} of {output}" if " " not in what else f"{what} {output}" for what in expected
    ]
    for name, value in zip(names, expected.values(), strict=True):
        assert found[name].shape == value.shape, name
        scale = max(1.0, np.abs(value).max())
        np.testing.assert_allclose(
            found[name], value, rtol=0, atol=tolerance * scale, err_msg=name
        )  # fmt: skip
    return result


def differences(at, x, v, step=2.0**-12):
    """Central differences by the names of the outputs, of the fourth order."""
    units = np.eye(x.shape[1])
    # Weights of the values at -2, -1, 0, 1 and 2 steps.
    slope = {-2: 1 / 12, -1: -2 / 3, 1: 2 / 3, 2: -1 / 12}
    bend = {-2: -1 / 12, -1: 4 / 3, 0: -5 / 2, 1: 4 / 3, 2: -1 / 12}

    def along(weights, direction):
        return sum(c * at(x + k * step * direction) for k, c in weights.items())

    first = np.stack([along(slope, e) for e in units], -1) / step
    squares = [along(bend, e) for e in units]
    pairs = {
        (i, j): (along(bend, units[i] + units[j]) - squares[i] - squares[j]) / 2
        for i in range(len(units))
        for j in range(i)
    }
    second = (
        np.stack(
            [
                np.stack(
                    [
                        squares[i] if i == j else pairs[max(i, j), min(i, j)]
                        for j in range(len(units))
                    ],
                    -1,
                )
                for i in range(len(units))
            ],
            -2,
        )
        / step**2
    )
    return {
        "jacobian": first,
        "laplacian": np.trace(second, axis1=-2, axis2=-1),
        "hessian": second,
        "first directional of": along(slope, v) / step,
        "second directional of": along(bend, v) / step**2,
    }


@pytest.mark.parametrize("block", BLOCKS)
def test_derivatives_equal_differences(block):
    check(network(block, "dense"))


@pytest.mark.parametrize("seed", nightly_but(range(2), seeds(200)))
def test_derivatives_of_random_networks_equal_differences(seed):
    rng = np.random.default_rng(seed)
    smooth = [name for name in BLOCKS if name != "maximum"]  # differences meet its kink by chance
    check(network(*rng.choice(smooth, size=3)))


# -- models as they come ---------------------------------------------------------------------------


def test_examples_with_several_axes_give_derivatives_with_these_axes():
    model = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["": 18]>
        electrons (float[N,2,3] x) => (float[N] u) {
            r = ReduceSumSquare<keepdims = 0>(x, axes)  e = Neg(r)  u = Exp(e)
        }"""
    )
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.array([1, 2]), "axes"))
    result = ke.derivatives(model, "x", jacobian=True, laplacian=True, hessian=True)
    x = np.random.default_rng(0).normal(size=(4, 2, 3))
    u, first, bend, second = oracle.evaluate(
        result, {"x": x}, "u", "jacobian of u", "laplacian of u", "hessian of u"
    )
    np.testing.assert_allclose(first, -2 * x * u[:, None, None], atol=1e-12)
    expected = (4 * (x**2).sum((1, 2)) - 12) * u
    np.testing.assert_allclose(bend, expected, atol=1e-12)
    np.testing.assert_allclose(np.einsum("nabab->n", second), expected, atol=1e-12)
    assert second.shape == (4, 2, 3, 2, 3)


def test_only_the_named_input_and_output_are_differentiated():
    model = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["": 18]>
        net (float[N,2] x, float[N,2] t, int64[N] kind)
            => (float[N,2] u, float[N,2] v, int64[N] k) {
            a = Mul(x, t)  u = Sin(a)  v = Mul(t, t)  k = Neg(kind)
        }"""
    )
    x, t = np.random.default_rng(0).normal(size=(2, 3, 2))
    result = ke.derivatives(model, "x", laplacian=True)
    assert [entry.name for entry in result.graph.output] == ["u", "v", "k", "laplacian of u"]
    (found,) = oracle.evaluate(result, {"x": x, "t": t, "kind": np.zeros(3, int)}, "laplacian of u")
    # u_i does not depend on the other feature.
    np.testing.assert_allclose(found, -(t**2) * np.sin(x * t), atol=1e-12)
    inner = ke.derivatives(model, "t", ["v", "a"], jacobian=True)
    assert [entry.name for entry in inner.graph.output][3:] == [
        "a",
        "jacobian of v",
        "jacobian of a",
    ]


def test_selected_derivatives_are_entries_of_all_derivatives():
    model = network("dense", "swish")
    names = {"x": tuple("abcdef")}
    result = ke.derivatives(model, names, selected=[("c",), ("b", "b"), ("d", "a"), (5,)])
    labels = ["c", "b, b", "d, a", "f"]
    outputs = [f"derivative of u by {label}" for label in labels]
    assert [entry.name for entry in result.graph.output] == ["u", *outputs]
    x = np.random.default_rng(0).normal(size=(3, D))
    found = oracle.evaluate(result, {"x": x}, *outputs)
    every = ke.derivatives(model, "x", jacobian=True, hessian=True)
    first, second = oracle.evaluate(every, {"x": x}, "jacobian of u", "hessian of u")
    entries = [first[..., 2], second[..., 1, 1], second[..., 0, 3], first[..., 5]]
    for value, expected in zip(found, entries, strict=True):
        np.testing.assert_allclose(value, expected, rtol=0, atol=1e-12)
    # Only four directions and two second derivatives pass through the network.
    assert sum("w1" in node.input for node in result.graph.node) == 1 + 5 + 2
    numbered = ke.derivatives(model, "x", selected=[("0", 2)])
    assert numbered.graph.output[1].name == "derivative of u by 0, 2"


@pytest.mark.parametrize("dtype", ["float64", "float16"])
def test_results_have_the_type_of_the_output(dtype):
    model = models.mlp(dtype=dtype)
    result = ke.derivatives(model, "input", **ALL)
    code = onnx.helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    assert {entry.type.tensor_type.elem_type for entry in result.graph.output} == {code}
    assert {entry.type.tensor_type.elem_type for entry in result.graph.input} == {code}
    onnx.checker.check_model(result, full_check=True)


def test_constant_outputs_have_zeros_where_a_derivative_is_zero():
    model = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["": 18]>
        net (float[N,2] x) => (float[N,1] u) { u = ReduceSum<keepdims = 1>(x, last) }"""
    )
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.array([1]), "last"))
    result = ke.derivatives(model, "x", **ALL)
    fed = {"x": np.ones((3, 2)), "direction": np.ones((3, 2))}
    names = [entry.name for entry in result.graph.output][1:]
    found = dict(zip(names, oracle.evaluate(result, fed, *names), strict=True))
    assert (found["jacobian of u"] == 1).all()
    assert not found["hessian of u"].any()
    assert found["hessian of u"].shape == (3, 1, 2, 2)
    assert found["laplacian of u"].shape == (3, 1)
    assert (found["first directional of u"] == 2).all()
    assert not found["second directional of u"].any()


# -- layers of the result --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("blocks", "kinds"),
    [
        (["dense", "transposed"], {"w0": "fully_connected_multi", "w1": "fully_connected_multi"}),
        (["convolution", "sine"], {"f0": "convolution_multi", "w1": "fully_connected_multi"}),
        (["attention", "residual"], {"k0": "fully_connected_multi", "w1": "fully_connected_multi"}),
    ],
)
def test_engines_find_the_layers_used_several_times(blocks, kinds):
    result = ke.derivatives(network(*blocks), "x", laplacian=True)
    loss = {"u": "normal", "laplacian of u": "normal"}
    engine = ke.Engine.from_onnx(result, loss=loss)
    found = {layer.parameters[0]: layer for layer in engine.layers}
    assert {name: found[name].kind for name in kinds} == kinds
    assert found["last_weight"].kind == "fully_connected_multi"
    plain = ke.Engine.from_onnx(network(*blocks), loss="normal")
    assert set(engine.parameters) == set(plain.parameters)


def test_parameters_of_the_model_alone_are_trained():
    # The derivative of a batch normalization reads its statistics; that of a pool has a kernel.
    model = network("batch norm", "convolution")
    result = ke.derivatives(model, "x", laplacian=True)
    engine = ke.Engine.from_onnx(result, loss={"laplacian of u": "normal"})
    assert set(engine.parameters) <= set(ke.Engine.from_onnx(model, loss="normal").parameters)
    assert {"w0", "b0", "f1"} <= set(engine.parameters)


def test_gradients_of_the_laplacian_equal_differences():
    result = ke.derivatives(network("dense", "attention"), "x", laplacian=True)
    engine = ke.Engine.from_onnx(result, loss={"laplacian of u": "normal"})
    rng = np.random.default_rng(0)
    x, targets = rng.normal(size=(4, D)).astype("float32"), np.zeros((4, 2), "float32")
    gradients = engine.gradients({"x": x}, targets).gradients
    directions = {name: rng.normal(size=gradients[name].shape) for name in ("w0", "b0", "k1")}

    def loss(step):
        moved = oracle.to_float64(result)
        for entry in moved.graph.initializer:
            if entry.name in directions:
                array = onnx.numpy_helper.to_array(entry) + step * directions[entry.name]
                entry.CopyFrom(onnx.numpy_helper.from_array(array, entry.name))
        (bend,) = oracle.evaluate(moved, {"x": x}, "laplacian of u")
        return (bend**2).sum(1).mean()  # the normal loss, without its constant

    rise = sum(np.vdot(gradients[name], v) for name, v in directions.items())
    assert rise == pytest.approx((loss(2**-12) - loss(-(2**-12))) * 2**11, rel=1e-4)


# -- what is refused -------------------------------------------------------------------------------


def text_model(sides, nodes, **constants):
    return models.parsed(f"net {sides} {{ {nodes} }}", constants, '"": 18, "com.microsoft": 1')


SIDES = "(float[N,2] x) => (float[N,2] u)"


@pytest.mark.parametrize(
    ("model", "arguments", "error", "message"),
    [
        (text_model(SIDES, "u = Tanh(x)"), {}, ke.InputError, "no derivative is chosen"),
        (text_model(SIDES, "u = Tanh(x)"), {"wrt": "y"}, ke.UnknownNameError, "inputs are: x"),
        (text_model(SIDES, "u = Tanh(x)"), {"wrt": 3}, ke.InputError, "not the name of an input"),
        (text_model(SIDES, "u = Mul(x, w)", w=np.ones((2,), "float32")), {"wrt": "w"},
         ke.UnknownNameError, "'w' is a parameter"),
        (text_model(SIDES, "u = Tanh(x)"), {"outputs": "v"}, ke.UnknownNameError, "'v'"),
        (text_model(SIDES, "u = Tanh(x)"), {"jacobian": "yes"}, ke.InputError, "jacobian"),
        (text_model(SIDES, "u = Tanh(x)"), {"selected": [("t",)]}, ke.UnknownNameError,
         "features are: 0, 1"),
        (text_model(SIDES, "u = Tanh(x)"), {"selected": [(2,)]}, ke.UnknownNameError, "feature 2"),
        (text_model(SIDES, "u = Tanh(x)"), {"selected": [(0, 0, 0)]}, ke.InputError, "one or two"),
        (text_model(SIDES, "u = Tanh(x)"), {"selected": ["t"]}, ke.InputError, "('x', 'x')"),
        (text_model(SIDES, "u = Tanh(x)"), {"wrt": {"x": ("t",)}}, ke.ShapeError,
         "2 different names"),
        (text_model("(int64[N,2] x) => (float[N,2] u)", "u = Cast<to = 1>(x)"), {}, ke.InputError,
         "whole numbers"),
        (text_model("(float[N] x) => (float[N] u)", "u = Tanh(x)"), {}, ke.ShapeError, "(n, d)"),
        (text_model("(float[N,M] x) => (float[N,M] u)", "u = Tanh(x)"), {}, ke.ShapeError,
         "no fixed size"),
        (text_model("(float[N,2] x) => (float[2,N] u)", "u = Transpose(x)"), {}, ke.ShapeError,
         "first axis"),
        (text_model("(float[2,N] x) => (float[2,N] u)", "u = Tanh(x)"), {}, ke.ShapeError,
         "fixed size"),
        (text_model("(float[N,2] x) => (float[] u)", "u = ReduceSum<keepdims = 0>(x)"), {},
         ke.ShapeError, "first axis"),
        (text_model(SIDES, "u = Softmax<axis = 0>(x)"), {}, ke.UnsupportedError,
         "examples depend on each other"),
        (text_model(SIDES, "r = Round(x)  u = Tanh(r)"), {}, ke.ModelError, "no output"),
        (text_model(SIDES, "r = Round(x)  u = Tanh(r)"), {"outputs": "u"}, ke.ModelError,
         "through steps"),
        (text_model("(float[N,2] x) => (int64[N] u)", "u = ArgMax<axis = 1, keepdims = 0>(x)"), {},
         ke.InputError, "int64"),
        (text_model(SIDES, "q, s, z = DynamicQuantizeLinear(x)  u = DequantizeLinear(q, s, z)"), {},
         ke.UnsupportedOpError, "rounds to numbers of a few bits"),
        (text_model(SIDES, "u = com.microsoft.BiasGelu_unknown(x)"), {}, ke.KfacError,
         "BiasGelu_unknown"),
    ],
)  # fmt: skip
def test_what_has_no_derivatives_is_refused(model, arguments, error, message):
    asked = {} if message == "no derivative is chosen" else {"laplacian": True}
    with pytest.raises(error, match=re.escape(message)):
        ke.derivatives(model, **{"wrt": "x", **asked, **arguments})


def test_a_kink_under_a_second_derivative_is_reported():
    relu = text_model(SIDES, "r = Relu(x)  u = Mul(r, x)")
    with pytest.warns(ke.ExportWarning, match="Relu at node '.*' is zero almost everywhere"):
        result = ke.derivatives(relu, "x", laplacian=True)
    assert "Relu" in result.doc_string
    smooth = text_model(SIDES, "r = Relu(x)  u = Mul(x, x)  d = Div(x, two)", two=np.float32(2))
    for model, what in ((relu, "jacobian"), (smooth, "laplacian")):
        assert not ke.derivatives(model, "x", **{what: True}).doc_string


@pytest.mark.parametrize(
    ("nodes", "is_bent"),
    [
        ("u = ReduceMax<keepdims = 1>(x, last)", True),
        ("u, i = TopK(x, one)", True),
        ("u = LpNormalization<p = 1>(x)", False),  # of second order elsewhere
        ("a = Tanh(x)  u = BatchNormalization(a, s, s, s, s)", False),
        ("a = Add(x, s)  u = Max(a, s)", True),
        ("a = Abs(x)  u = Mul(a, s)", True),
        ("u = Clip(x)", False),
        ("u = Trilu(x)", False),
    ],
)
def test_only_steps_of_the_slope_are_reported(nodes, is_bent):
    constants = {"last": np.array([1]), "one": np.array([1]), "s": np.ones(2, "float32")}
    model = text_model("(float[N,2] x) => (float u)", nodes, **constants)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ke.ExportWarning)
        result = ke.derivatives(model, "x", hessian=True)
    assert ("almost everywhere" in result.doc_string) == is_bent


def test_names_of_the_model_stay_and_a_number_follows_new_ones():
    model = text_model(
        "(float[N,2] x) => (float[N,2] u, float[N,2] direction)", "u = Tanh(x)  direction = Sin(x)"
    )
    result = ke.derivatives(model, "x", "u", directional=True)
    assert [entry.name for entry in result.graph.input] == ["x", "direction_2"]


def test_derivatives_of_derivatives_equal_differences():
    once = ke.derivatives(network("dense", "softmax"), "x", laplacian=True)
    check(once, output="laplacian of u", tolerance=1e-5)


@pytest.mark.parametrize("block", ["layer norm", "softmax", "powers"])
def test_derivatives_of_gradients_equal_differences(block):
    gradient = ke.differentiate(network("dense", block), output="u", wrt="x")
    cotangent = np.random.default_rng(1).normal(size=(3, 2))
    check(gradient, output="gradient/x", cotangent=cotangent, tolerance=1e-5)


def test_the_result_can_be_differentiated_again():
    model = text_model("(float[N,1] x) => (float[N,1] u)", "u = Sin(x)")
    once = ke.derivatives(model, "x", laplacian=True)
    twice = ke.derivatives(once, "x", "laplacian of u", laplacian=True)
    x = np.linspace(-1, 1, 5)[:, None]
    (found,) = oracle.evaluate(twice, {"x": x}, "laplacian of laplacian of u")
    np.testing.assert_allclose(found, np.sin(x), atol=1e-12)
