"""The reverse sweep: which paths it follows, what it adds up, what it refuses."""

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from onnx import TensorProto, helper

from kfac_engine.autodiff.differentiate import differentiate, needed
from kfac_engine.autodiff.rules import REFUSED_DOMAINS
from kfac_engine.errors import UnknownNameError, UnsupportedOpError
from kfac_engine.graph.structure import Fact, Graph, Input, Node, Subgraph
from tests.autodiff.harness import Bench, finite_differences
from tests.comparing import assert_arrays_close

# Graphs below are polynomials or small networks in float64: only rounding is left.
ROUNDING = 1e-12
# Central differences with this step err by about 1e-9.
STEP, FINITE_DIFFERENCES = 2.0**-16, 1e-6


def node(op, inputs, outputs, **attributes):
    first = outputs.split()[0]
    operands = tuple("" if name == "-" else name for name in inputs.split())
    return Node(op, operands, tuple(outputs.split()), attributes, name=f"make_{first}")


def build(nodes, fed, outputs, wrt, runtime="reference", **constants):
    """A bench over some nodes; what is fed and not a constant is a data input."""
    feeds = {name: np.asarray(value) for name, value in fed.items()}
    arrays = {name: np.asarray(value) for name, value in constants.items()}
    inputs = tuple(Input(name, array.dtype, None) for name, array in feeds.items())
    graph = Graph(tuple(nodes), inputs, tuple(outputs), arrays, 18, name="tiny")
    return Bench(graph, feeds, tuple(outputs), tuple(wrt), runtime)


def gradients(made, **cotangents):
    return made.gradients(made.sample, {n: np.asarray(g) for n, g in cotangents.items()})


A, B, G = np.array([2.0, -3.0]), np.array([5.0, 7.0]), np.array([1.5, -0.5])


# -- adding up -------------------------------------------------------------------------------------


# Nodes, cotangents of their outputs, and gradients.
SUMS = {
    "two readers": (
        [node("Mul", "a b", "y"), node("Add", "y a", "z")], {"z": G}, {"a": G * (B + 1)}),
    "one reader twice": ([node("Mul", "a a", "y")], {"y": G}, {"a": 2 * A * G}),
    "three readers in a chain": (
        [node("Mul", "a a", "s"), node("Mul", "s a", "c"), node("Add", "c s", "y")], {"y": G},
        {"a": G * (3 * A**2 + 2 * A)}),
    "several outputs": (
        [node("Mul", "a b", "y"), node("Neg", "a", "z")], {"y": G, "z": A}, {"a": G * B - A}),
    "readers of an intermediate value": (
        [node("Neg", "a", "h"), node("Mul", "h h", "s"), node("Add", "s h", "y")], {"y": G},
        {"h": G * (2 * -A + 1)}),
    "a parameter and a value that depends on it": (
        [node("Mul", "a b", "h"), node("Mul", "h h", "y")], {"y": G},
        {"h": 2 * A * B * G, "b": 2 * A * A * B * G}),
    "an output that another output reads": (
        [node("Neg", "a", "h"), node("Mul", "h h", "y")], {"h": B, "y": G}, {"h": B + 2 * -A * G}),
}  # fmt: skip


@pytest.mark.parametrize(("nodes", "cotangents", "expected"), SUMS.values(), ids=SUMS)
def test_cotangents_of_all_readers_and_outputs_are_added(nodes, cotangents, expected):
    made = build(nodes, {"a": A, "b": B}, list(cotangents), list(expected))
    assert_arrays_close(gradients(made, **cotangents), expected, rtol=ROUNDING)


@pytest.mark.parametrize(("op", "rows"), [("MatMul", 1), ("Gemm", 1), ("MatMul", 9)])
def test_products_of_few_rows_with_one_matrix_have_one_gradient(op, rows):
    """The steps of a recurrent layer, in the file's form of a weight: transposed for Gemm."""
    turned = {"transB": 1} if op == "Gemm" else {}
    nodes = []
    for step in range(4):
        nodes += [
            node(op, f"h{step} w", f"s{step}", **turned),
            node("Tanh", f"s{step}", f"t{step}"),
            node("Add", f"t{step} h{step}", f"h{step + 1}"),
        ]
    rng = np.random.default_rng(0)
    w, h, g = (rng.standard_normal(shape) / 6 for shape in ((36, 36), (rows, 36), (rows, 36)))
    made = build(nodes, {"h0": h}, ["h4"], ["w", "h0"], w=w)
    found = gradients(made, h4=g)
    expected = finite_differences(replace(made, wrt=("h0",)), {"h0": h}, {"h4": g}, STEP)
    np.testing.assert_allclose(found["h0"], expected["h0"], atol=FINITE_DIFFERENCES)
    states, slopes = [h], []
    for _ in range(4):
        states.append(np.tanh(states[-1] @ (w.T if turned else w)) + states[-1])
    back = g
    for before, after in zip(states[-2::-1], states[::-1], strict=False):
        slopes.append((1 - (after - before) ** 2) * back)
        back = back + slopes[-1] @ (w if turned else w.T)
    total = sum(x.T @ s for x, s in zip(states[-2::-1], slopes, strict=True))
    np.testing.assert_allclose(found["w"], total.T if turned else total, rtol=ROUNDING)
    products = [n for n in made.backward.nodes if n.op == "Gemm" and n.attributes.get("transA")]
    assert len(products) == (1 if rows == 1 else 4)


def test_cotangents_are_added_as_soon_as_they_are_known():
    """At the end, all gradients of a matrix that many layers share would be in memory."""
    nodes = [node("MatMul", f"h{i} w", f"h{i + 1}") for i in range(4)]
    w, h = np.eye(3) + 0.1, np.ones((5, 3))
    made = build(nodes, {"h0": h}, ["h4"], ["w"], w=w)
    power = np.linalg.matrix_power
    expected = sum(power(w.T, i) @ h.T @ h @ power(w.T, 3 - i) for i in range(4))
    np.testing.assert_allclose(gradients(made, h4=h)["w"], expected, rtol=ROUNDING)
    order = [n.outputs[0] for n in made.backward.nodes]
    for place, added in enumerate(made.backward.nodes):
        if added.op == "Add":
            assert order.index(added.inputs[1]) == place - 1


def test_gradient_of_output_is_its_cotangent():
    made = build([node("Neg", "a", "y")], {"a": A}, ["y"], ["y"])
    np.testing.assert_array_equal(gradients(made, y=G)["y"], G)
    assert made.backward.nodes == ()


# -- paths that end --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "path",
    [
        [node("Cast", "a", "i", to=TensorProto.INT64), node("Cast", "i", "f", to=11)],
        [node("ArgMax", "a", "i", axis=0), node("Cast", "i", "f", to=11)],
        [node("Shape", "a", "i"), node("Cast", "i", "f", to=11)],
        [node("Floor", "a", "f")],
        [node("Greater", "a b", "i"), node("Cast", "i", "f", to=11)],
    ],
    ids=lambda path: path[0].op,
)
def test_gradient_through_zero_derivative_operator_is_absent(path):
    made = build([*path, node("Mul", "f b", "y")], {"a": A, "b": B}, ["y"], ["a", "b"])
    assert set(made.backward.gradients) == {"b"}


def test_gradient_of_unread_value_is_absent():
    nodes = [node("Neg", "a", "y"), node("Neg", "b", "z")]
    assert set(build(nodes, {"a": A, "b": B}, ["y"], ["a", "b"]).backward.gradients) == {"a"}


def test_forward_pass_saves_only_values_read_by_gradient():
    nodes = [node("Add", "a b", "h"), node("Mul", "h b", "y"), node("Exp", "y", "unused")]
    assert build(nodes, {"a": A, "b": B}, ["y"], ["a"]).backward.saved == ("b",)
    assert build(nodes[:1], {"a": A, "b": B}, ["h"], ["a"]).backward.saved == ()


def test_casts_convert_gradient_to_type_of_operand():
    nodes = [
        node("Cast", "a", "wide", to=TensorProto.DOUBLE),
        node("Mul", "wide b", "h"),
        node("Cast", "h", "y", to=TensorProto.FLOAT),
    ]
    made = build(nodes, {"a": A.astype("float32"), "b": B}, ["y"], ["a", "b"], "ort")
    found = gradients(made, y=G.astype("float32"))
    assert (found["a"].dtype, found["b"].dtype) == (np.float32, np.float64)
    np.testing.assert_array_equal(found["a"], G * B)  # small integers: exact in float32
    np.testing.assert_array_equal(found["b"], G * A)


# -- refusals --------------------------------------------------------------------------------------


def refusal(nodes, outputs, wrt, **fed):
    graph = build(nodes, fed, outputs, wrt).graph
    with pytest.raises(UnsupportedOpError) as caught:
        differentiate(graph, {}, outputs, wrt)
    return str(caught.value)


def test_missing_rule_error_names_operator_node_and_parameter():
    message = refusal(
        [node("MatMul", "w x", "h"), node("Unheard", "h", "y")], ["y"], ["x", "w"], w=A, x=B
    )
    assert "Unheard (opset 18)" in message
    assert "'make_y'" in message
    assert "'x'" in message


def test_missing_rule_error_names_operator_domain():
    strange = Node("Relu", ("a",), ("y",), name="strange", domain="my.ops")
    assert "my.ops::Relu" in refusal([strange], ["y"], ["a"], a=A)


def test_operator_without_rule_is_allowed_off_gradient_path():
    nodes = [node("Det", "c", "d"), node("Mul", "a d", "y"), node("Det", "a", "z")]
    made = build(nodes, {"a": np.eye(2), "c": 2 * np.eye(2)}, ["y"], ["a"])
    np.testing.assert_allclose(gradients(made, y=np.ones((2, 2)))["a"], 4, rtol=ROUNDING)


def body(captured):
    inner = helper.make_node("Neg", [captured], ["inner"])
    graph = helper.make_graph(
        [inner], "body", [], [helper.make_tensor_value_info("inner", 11, [2])]
    )
    return Subgraph(graph.SerializeToString(), (captured,))


@pytest.mark.parametrize(("op", "attributes"), [
    ("If", {"then_branch": body("w"), "else_branch": body("x")}),
    ("Loop", {"body": body("w")}),
])  # fmt: skip
def test_body_that_captures_active_value_raises_error(op, attributes):
    made_by = Node(op, ("c",), ("y",), attributes, name="branching")
    message = refusal([made_by], ["y"], ["w"], w=A, x=B, c=np.array(True))
    assert op in message
    assert "'branching'" in message
    assert "'w'" in message


def test_body_that_captures_inactive_values_is_allowed():
    branches = {"then_branch": body("b"), "else_branch": body("b")}
    nodes = [Node("If", ("c",), ("h",), branches, name="branching"), node("Mul", "a h", "y")]
    made = build(nodes, {"a": A, "b": B, "c": np.array(True)}, ["y"], ["a"])
    np.testing.assert_allclose(gradients(made, y=G)["a"], G * -B, rtol=ROUNDING)


@pytest.mark.parametrize(("outputs", "wrt"), [(["y"], ["nobody"]), (["nobody"], ["a"])])
def test_unknown_name_raises_error(outputs, wrt):
    graph = build([node("Neg", "a", "y")], {"a": A}, ["y"], ["a"]).graph
    with pytest.raises(UnknownNameError, match="'nobody' is not a value of model 'tiny'"):
        differentiate(graph, {}, outputs, wrt)


# -- networks --------------------------------------------------------------------------------------


def image_network(rng):
    nodes = [
        node("Conv", "x w1 b1", "s1", pads=(1, 1, 1, 1)),
        node("Relu", "s1", "a1"),
        node("MaxPool", "a1", "p1", kernel_shape=(2, 2), strides=(2, 2)),
        node("Conv", "p1 w2 -", "s2", pads=(1, 1, 1, 1)),
        node("Add", "s2 p1", "r"),
        node("GlobalAveragePool", "r", "m"),
        node("Flatten", "m", "f"),
        node("Gemm", "f w3 b3", "s3", transB=1),
        node("LogSoftmax", "s3", "y"),
    ]
    shapes = {"x": (3, 1, 4, 4), "w1": (2, 1, 3, 3), "b1": (2,), "w2": (2, 2, 3, 3),
              "w3": (3, 2), "b3": (3,)}  # fmt: skip
    return nodes, {name: rng.normal(size=sides) for name, sides in shapes.items()}


def attention(rng):
    nodes = [
        node("LayerNormalization", "x scale shift", "n"),
        node("MatMul", "n wq", "q"),
        node("MatMul", "n wk", "k"),
        node("MatMul", "n wv", "v"),
        node("Transpose", "k", "kt", perm=(0, 2, 1)),
        node("MatMul", "q kt", "logits"),
        node("Softmax", "logits", "weights"),
        node("MatMul", "weights v", "mixed"),
        node("Add", "x mixed", "y"),
    ]
    shapes = {"x": (2, 3, 4), "scale": (4,), "shift": (4,), "wq": (4, 4), "wk": (4, 4),
              "wv": (4, 4)}  # fmt: skip
    return nodes, {name: rng.normal(size=sides) for name, sides in shapes.items()}


@pytest.mark.parametrize("network", [image_network, attention], ids=lambda make: make.__name__)
def test_gradients_of_a_network_equal_finite_differences(network):
    rng = np.random.default_rng(5)
    nodes, feeds = network(rng)
    hidden = [entry.outputs[0] for entry in nodes[:-1] if entry.op in ("Conv", "MatMul", "Gemm")]
    made = build(nodes, feeds, ["y"], [*feeds, *hidden])
    cotangents = {"y": rng.normal(size=made.facts["y"].shape)}
    found = made.gradients(feeds, cotangents)
    assert set(found) == {*feeds, *hidden}
    parameters = build(nodes, feeds, ["y"], feeds)
    assert_arrays_close(
        found,
        finite_differences(parameters, feeds, cotangents, STEP),
        rtol=0,
        atol=FINITE_DIFFERENCES,
    )


# -- rounding to whole numbers ---------------------------------------------------------------------

_SCALE, _FLOATS = np.float32(0.5), np.array([[1, -2], [3, 4]], "float32")


@pytest.mark.parametrize("facts", [{}, {"q": "float8_e4m3fn"}, {"q": "int4"}], ids=str)
@pytest.mark.parametrize("rounding", ["Cast", "QuantizeLinear"])
def test_cast_to_type_missing_in_numpy_raises_error(rounding, facts):
    nodes = [node(rounding, "x", "q"), node("Cast", "q", "y", to=1)]
    known = {name: Fact(np.dtype(getattr(ml_dtypes, kind)), (2,)) for name, kind in facts.items()}
    known |= {name: Fact(np.dtype("float32"), (2,)) for name in "xy"}
    graph = build(nodes, {"x": _FLOATS}, ["y"], ["x"]).graph
    with pytest.raises(UnsupportedOpError, match=rf"{rounding} at node 'make_q'.*'x'"):
        differentiate(graph, known, ["y"], ["x"])


def test_quantizer_of_runtime_domain_raises_error():
    nodes = [
        node("QuantizeLinear", "x scale zero", "q"),
        node("DequantizeLinear", "q scale zero", "y"),
    ]
    nodes = [replace(entry, domain="com.microsoft") for entry in nodes]
    made = build(nodes, {"x": _FLOATS}, ["y"], ["x"], "ort", scale=_SCALE, zero=np.int16(3))
    with pytest.raises(
        UnsupportedOpError, match=r"com\.microsoft::QuantizeLinear at node 'make_q'"
    ):
        _ = made.backward


def test_frozen_integers_do_not_block_gradient():
    nodes = [node("DequantizeLinear", "q scale", "w"), node("MatMul", "x w", "y")]
    whole = np.array([[1, -2], [3, 4]], "int8")
    made = build(nodes, {"x": _FLOATS}, ["y"], ["x"], "ort", q=whole, scale=_SCALE)
    found = gradients(made, y=np.ones((2, 2), "float32"))["x"]
    np.testing.assert_allclose(found, [[-0.5, 3.5]] * 2, rtol=ROUNDING)


def test_needed_nodes_include_values_captured_by_bodies():
    source, other = node("Neg", "x", "read"), node("Neg", "x", "unread")
    branch = Subgraph(b"", ("read",))
    chosen = node("If", "flag", "y", then_branch=branch, else_branch=branch)
    assert needed((source, other, chosen), ["y"]) == (source, chosen)


@pytest.mark.parametrize("domain", REFUSED_DOMAINS)
def test_file_saved_after_optimization_error_names_remedy(domain):
    """As in files of ``optimized_model_filepath``, which this processor may not run."""
    nodes = (
        Node("Mul", ("x", "w"), ("scaled",), {}, name="scale"),
        Node("ReorderInput", ("scaled",), ("blocks",), {}, name="blocked", domain=domain),
    )
    fact = Fact(np.dtype(np.float32), (1, 8, 2, 2))
    graph = Graph(nodes, (Input("x", fact.dtype, None),), ("blocks",), {"w": np.ones(1)}, 18)
    facts = dict.fromkeys(("x", "w", "scaled", "blocks"), fact)
    with pytest.raises(
        UnsupportedOpError, match=r"'blocked'.*after optimization.*ORT_ENABLE_BASIC"
    ):
        differentiate(graph, facts, ["blocks"], ["w"])
