"""Constants that a file states to be no parameters are not trained, unless the user names them."""

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper, parser

import kfac_engine as ke
from kfac_engine.graph.analysis.trainable import excluded_reason, trainable_parameters
from kfac_engine.graph.load import load_graph
from kfac_engine.graph.passes.decompose import _LINEAR_MODELS, _STATISTICS
from tests import oracle
from tests.models import one_operator

KIND = "pkg.torch.export.graph_signature.InputSpec.kind"
FOLDED = "pkg.onnxscript.optimizer.folded_from"
SIGNATURE = "pkg.torch.export.ExportedProgram.graph_signature"
# A layer, and constants before and after it.
BODY = "h = Sub (x, mean)  p = MatMul (h, w)  y = Add (p, b)"


def torch_file(body=BODY, kinds=None, folded=None, signature="", shapes=None):
    """A file with the metadata of the newer exporter of PyTorch."""
    shapes = {"w": (3, 2), "mean": (3,), "b": (2,)} | (shapes or {})
    model = parser.parse_model(
        f'<ir_version: 10, opset_import: ["": 18]> m (float[N,3] x) => (float[] y) {{ {body} }}'
    )
    model.producer_name = "pytorch"
    rng = np.random.default_rng(0)
    for name, shape in shapes.items():
        array = rng.normal(size=shape).astype(np.float32)
        model.graph.initializer.append(numpy_helper.from_array(array, name))
        value = helper.make_tensor_value_info(name, 1, shape)
        entries = {KIND: (kinds or {}).get(name), FOLDED: (folded or {}).get(name)}
        for key, entry in entries.items():
            if entry:
                value.metadata_props.add(key=key, value=str(entry))
        model.graph.value_info.append(value)
    if signature:
        model.graph.metadata_props.add(key=SIGNATURE, value=signature)
    return model


def lines(*entries):
    """A signature, as the exporter writes it."""
    listed = "\n".join(f"t{i}: {entry}" for i, entry in enumerate(entries))
    return f"\n# inputs\n{listed}\nx: USER_INPUT\n\n# outputs\ny: USER_OUTPUT\n"


PARAMETERS = {"w": "PARAMETER", "b": "PARAMETER"}
# What the file states about "mean", and what the reason says; None if it is trained.
STATED = {
    "buffer": (torch_file(kinds=PARAMETERS | {"mean": "BUFFER"}), "a buffer of the module"),
    "constant_of_the_code": (
        torch_file(kinds=PARAMETERS | {"mean": "CONSTANT_TENSOR"}), "a constant in the code"),
    # The metadata of an initializer is absent if a result has its name.
    "buffer_in_the_signature_only": (
        torch_file(kinds=PARAMETERS, signature=lines("BUFFER target='mean' persistent=True")),
        "a buffer of the module"),
    "folded_from_a_buffer": (
        torch_file(
            folded={"mean": ["raw", "val_0"]},
            signature=lines("PARAMETER target='w'", "BUFFER target='raw' persistent=True"),
        ),
        "computed from the buffer 'raw'",
    ),
    "folded_from_numbers": (
        torch_file(kinds=PARAMETERS, folded={"mean": ["val_0", "val_1"]}),
        "computed from constants in the code"),
    "buffer_behind_views_and_casts": (
        torch_file(
            "i = Identity (mean)  d = Cast <to=11> (i)  f = Cast <to=1> (d)  h = Sub (x, f)"
            "  p = MatMul (h, w)  y = Add (p, b)",
            kinds=PARAMETERS | {"mean": "BUFFER"},
        ),
        "a buffer of the module",
    ),
    "parameter": (torch_file(kinds=PARAMETERS | {"mean": "PARAMETER"}), None),
    "no_metadata": (torch_file(), None),
    "folded_from_a_parameter": (
        torch_file(
            folded={"mean": ["raw", "gain"]},
            signature=lines("PARAMETER target='gain'", "BUFFER target='raw' persistent=True"),
        ),
        None,
    ),
    # A normalization that was multiplied into a weight keeps the name of the weight.
    "parameter_that_was_folded_again": (
        torch_file(folded={"mean": ["val_0"]}, signature=lines("PARAMETER target='mean'")), None),
    "folded_in_a_file_without_kinds": (torch_file(folded={"mean": ["raw"]}), None),
    # A result of this name is no tensor of the module.
    "name_of_an_output": (
        torch_file(
            signature="\n# inputs\np_w: PARAMETER target='w'\n\n# outputs\n"
            "g: BUFFER_MUTATION target='mean'\n"
        ),
        None,
    ),
}  # fmt: skip


@pytest.mark.parametrize(("model", "words"), STATED.values(), ids=STATED)
def test_statement_of_the_file_decides(model, words):
    graph = load_graph(model)
    reason = excluded_reason(graph, "mean")
    assert (reason is None) if words is None else words in str(reason)
    assert ("mean" in trainable_parameters(graph)) == (words is None)
    assert {"w", "b"} <= set(trainable_parameters(graph))


# The program of the exporter: "mean" was merged with "b", which the node reads in its place.
MERGED = lines("PARAMETER target='w'", "PARAMETER target='b'", "BUFFER target='mean'")
CALLS = {
    "buffer": ("args = (%x, %t2)", True),
    "parameter": ("args = (%x, %t1)", False),
    "both": ("args = (%t1, %t2)", False),
    "unknown": ("args = (%x, %view)", False),
}


@pytest.mark.parametrize(("call", "apart"), CALLS.values(), ids=CALLS)
def test_buffer_that_was_merged_with_a_parameter_is_a_constant_of_its_own(call, apart):
    body = "p = MatMul (x, w)  s = Add (p, b)  y = Mul (s, b)"
    model = torch_file(body, PARAMETERS, signature=MERGED)
    mean = next(entry for entry in model.graph.initializer if entry.name == "mean")
    model.graph.initializer.remove(mean)
    key = "pkg.torch.onnx.fx_node"
    model.graph.node[1].metadata_props.add(key=key, value="%add : call(args = (%p, %t1))")
    model.graph.node[2].metadata_props.add(key=key, value=f"%mul : call({call})")
    graph = load_graph(model)
    assert set(trainable_parameters(graph)) == {"w", "b"}
    assert graph.nodes[2].inputs[1] == ("mean" if apart else "b")
    if apart:
        assert "a buffer" in str(excluded_reason(graph, "mean"))
        np.testing.assert_array_equal(graph.constants["mean"], graph.constants["b"])


# -- numbers that a module learns ------------------------------------------------------------------

# The computation of y, in which the parameter f has a shape.
LEARNED = {
    "factor": ("h = Mul (x, f)  y = MatMul (h, w)", ()),
    "factor_of_one_entry": ("h = Mul (x, f)  y = MatMul (h, w)", (1,)),
    "factor_of_a_residual_branch": (
        "h = MatMul (x, v)  a = Tanh (h)  s = Mul (f, a)  z = Add (x, s)  y = MatMul (z, w)", ()),
    "temperature": ("h = MatMul (x, w)  y = Div (h, f)", ()),
    "logit_scale": ("e = Exp (f)  h = MatMul (x, w)  y = Mul (h, e)", ()),
    "exponent_of_a_pooling": (
        "p = Mul (x, x)  q = Pow (p, f)  m = MatMul (q, w)  a = Abs (m)  i = Reciprocal (f)"
        "  y = Pow (a, i)",
        (),
    ),
    "bound": ("h = MatMul (x, w)  y = Min (h, f)", ()),
    "bound_of_a_clip": ("h = MatMul (x, w)  y = Clip (h, , f)", ()),
    "initial_state": (
        "s = Unsqueeze (x, zero)  h, l = RNN <hidden_size = 2> (s, u, r, , , f)"
        "  y = Squeeze (l, zero)",
        (1, 5, 2),
    ),
    "mask_of_ones_and_zeros": ("h = Mul (x, f)  y = MatMul (h, w)", (5, 3)),
}  # fmt: skip


def learned(row, kind="PARAMETER", **metadata):
    body, shape = LEARNED[row]
    shapes = {"f": shape, "v": (3, 3), "u": (1, 2, 3), "r": (1, 2, 2)}
    model = torch_file(body, {"w": "PARAMETER", "f": kind}, shapes=shapes, **metadata)
    values = {"f": np.full(shape, 0.7, np.float32), "zero": np.array([0])}
    if "mask" in row:
        values["f"][1:3] = 1 - (values["f"][0:1] > 0)
        values["f"] = (values["f"] > 0).astype(np.float32)
    kept = [entry for entry in model.graph.initializer if entry.name not in values]
    del model.graph.initializer[:]
    model.graph.initializer.extend(kept)
    model.graph.initializer.extend(numpy_helper.from_array(a, n) for n, a in values.items())
    return model


@pytest.mark.parametrize("row", LEARNED)
def test_numbers_that_the_file_calls_parameters_are_trained(row):
    """The gradient is that of differences of the loss."""
    model = learned(row)
    assert "f" in trainable_parameters(load_graph(model))
    inputs = {"x": np.random.default_rng(3).normal(size=(5, 3)).astype(np.float32)}
    targets = np.random.default_rng(4).normal(size=(5, 2)).astype(np.float32)
    engine = ke.Engine.from_onnx(model, loss="normal", sample_inputs=inputs, threads=1)
    _, expected = oracle.loss_and_gradient(model, inputs, "y", ["f"], "normal", targets)
    found = engine.gradients(inputs, targets).gradients["f"]
    assert np.abs(expected["f"]).max() > 1e-2
    np.testing.assert_allclose(found, expected["f"], rtol=1e-4, atol=1e-5)
    ke.KfacOptimizer(engine).step(inputs, targets)
    assert not np.array_equal(engine.parameters["f"], np.full(LEARNED[row][1], 0.7, np.float32))


@pytest.mark.parametrize("row", LEARNED)
@pytest.mark.parametrize("kind", ["", "BUFFER", "CONSTANT_TENSOR"])
def test_numbers_that_the_file_does_not_call_parameters_are_not_trained(row, kind):
    trained = "f" in trainable_parameters(load_graph(learned(row, kind)))
    assert trained == (not kind and row in {"logit_scale", "exponent_of_a_pooling"})


@pytest.mark.parametrize("kinds", [{"f": "PARAMETER"}, {}])
def test_a_zero_that_is_added_to_a_product_is_trained_only_if_the_file_states_it(kinds):
    model = torch_file("y = Gemm (x, w, f)", {"w": "PARAMETER"} | kinds, shapes={"f": ()})
    zero = next(entry for entry in model.graph.initializer if entry.name == "f")
    zero.CopyFrom(numpy_helper.from_array(np.float32(0), "f"))
    assert ("f" in trainable_parameters(load_graph(model))) == bool(kinds)


def test_a_parameter_that_is_read_like_an_attribute_is_not_trained():
    body = "e = Range (zero, three, f)  h = Mul (x, e)  g = Mul (h, f)  y = MatMul (g, w)"
    model = torch_file(body, {"w": "PARAMETER", "f": "PARAMETER"}, shapes={"f": ()})
    values = {"f": 1.0, "zero": 0.0, "three": 3.0}
    kept = [entry for entry in model.graph.initializer if entry.name != "f"]
    del model.graph.initializer[:]
    model.graph.initializer.extend(kept)
    model.graph.initializer.extend(
        numpy_helper.from_array(np.float32(number), name) for name, number in values.items()
    )
    assert "step of a range" in str(excluded_reason(load_graph(model), "f"))


def test_a_parameter_of_which_the_exporter_has_computed_a_function_is_not_trained():
    """The function, such as the inverse of an exponent, would not follow it."""
    model = learned("factor", folded={"w": ["f"]})
    assert "f" not in trainable_parameters(load_graph(model))


@pytest.mark.parametrize(("call", "trained"), [("%x, %t1", True), ("%x, 0.7", False), ("", True)])
def test_a_parameter_that_was_merged_with_a_number_of_the_code_is_not_trained(call, trained):
    """The second reader is a node of the call; without its metadata there is no evidence."""
    model = learned("factor", signature=lines("PARAMETER target='w'", "PARAMETER target='f'"))
    key = "pkg.torch.onnx.fx_node"
    if call:
        model.graph.node[0].metadata_props.add(key=key, value=f"%mul : call(args = ({call}))")
    assert ("f" in trainable_parameters(load_graph(model))) == trained


# Uses of a number that the code of a module repeats to the shape of a batch: torch.zeros or full.
REPEATED = {
    "state": "e = Expand (val_1, size)  h = MatMul (e, w)  g = MatMul (x, w)  y = Add (g, h)",
    "sums": "e = Expand (val_1, size)  i = Cast <to = 7> (x)"
    '  s = ScatterElements <axis = 0, reduction = "add"> (e, i, x)  y = MatMul (s, w)',
    "padding": "e = Expand (val_1, size)  s = Concat <axis = 0> (e, x)  y = MatMul (s, w)",
}


@pytest.mark.parametrize("use", REPEATED)
@pytest.mark.parametrize("value", [0, 0.5])
@pytest.mark.parametrize("origin", [None, ["f"], ["mean"]])
def test_a_number_in_the_code_is_trained_only_if_it_comes_from_a_parameter(use, value, origin):
    body = f"size = Shape (x)  {REPEATED[use]}"
    kinds = {"w": "PARAMETER", "f": "PARAMETER", "mean": "BUFFER"}
    model = torch_file(body, kinds, folded={"val_1": origin}, shapes={"f": (), "val_1": ()})
    number = next(entry for entry in model.graph.initializer if entry.name == "val_1")
    number.CopyFrom(numpy_helper.from_array(np.float32(value), "val_1"))
    assert ("val_1" in trainable_parameters(load_graph(model))) == (origin == ["f"])


def test_user_trains_a_buffer_by_name():
    graph = load_graph(STATED["buffer"][0])
    assert trainable_parameters(graph, ["mean", "w"]) == ("w", "mean")


def test_training_leaves_buffers_unchanged(tmp_path):
    engine = ke.Engine.from_onnx(STATED["buffer"][0], loss="categorical")
    rng = np.random.default_rng(1)
    data = rng.normal(size=(16, 3)).astype(np.float32), rng.integers(0, 2, 16)
    ke.fit(engine, data, epochs=1, batch_size=8)
    engine.export(tmp_path / "new.onnx")
    stored = {
        e.name: numpy_helper.to_array(e) for e in onnx.load(tmp_path / "new.onnx").graph.initializer
    }
    before = {e.name: numpy_helper.to_array(e) for e in STATED["buffer"][0].graph.initializer}
    np.testing.assert_array_equal(stored["mean"], before["mean"])
    assert not np.array_equal(stored["w"], before["w"])


def test_file_of_buffers_only_says_how_to_train_them():
    kinds = dict.fromkeys(("w", "b", "mean"), "BUFFER")
    with pytest.raises(ke.ModelError, match=r"'w' is a buffer of the module.*trainable="):
        trainable_parameters(load_graph(torch_file(kinds=kinds)))


# -- scikit-learn ----------------------------------------------------------------------------------


def sklearn_file(names, producer="skl2onnx"):
    """A transformer of the features and a layer, whose constants have these names."""
    body = "h = Mul (x, {scale})  c = Add (h, {offset})  p = MatMul (c, {w})  y = Add (p, {b})"
    shapes = {"scale": (3,), "offset": (3,), "w": (3, 2), "b": (1, 2)}
    model = torch_file(body.format(**names), shapes={names[k]: v for k, v in shapes.items()})
    model.producer_name = producer
    return load_graph(model)


NETWORK = {"scale": "Mu_Mulcst", "offset": "Ad_Addcst", "w": "coefficient", "b": "intercepts"}


@pytest.mark.parametrize(
    ("names", "producer", "trained"),
    [
        (NETWORK, "skl2onnx", ("coefficient", "intercepts")),
        (NETWORK | {"w": "coef", "b": "intercept"}, "skl2onnx", ("coef", "intercept")),
        (NETWORK | {"w": "coefficient1", "b": "intercepts1"}, "skl2onnx",
         ("coefficient1", "intercepts1")),
        (NETWORK | {"w": "theta", "b": "sigma"}, "skl2onnx",
         ("Mu_Mulcst", "Ad_Addcst", "theta", "sigma")),
        (NETWORK, "other", tuple(NETWORK.values())),
    ],
    ids=["network", "linear", "numbered", "unknown_estimator", "other_producer"],
)  # fmt: skip
def test_arrays_of_the_estimator_are_parameters(names, producer, trained):
    graph = sklearn_file(names, producer)
    assert trainable_parameters(graph) == trained
    for name in set(names.values()) - set(trained):
        assert "a transformer of scikit-learn measured" in str(excluded_reason(graph, name))


NUMBERS = [0.5, 2.0, -1.0]
# Each operator of the classical domain that becomes constants: attributes, trained constants.
CLASSICAL = {
    "Scaler": ({"offset": NUMBERS, "scale": NUMBERS}, set()),
    "Normalizer": ({"norm": "L2"}, set()),
    "ArrayFeatureExtractor": ({}, set()),
    "LinearRegressor": (
        {"coefficients": NUMBERS, "intercepts": [0.5]}, {"node.coefficients", "node.intercepts"}),
    "LinearClassifier": (
        {"coefficients": NUMBERS * 2, "intercepts": [0.5, 0.1], "classlabels_ints": [0, 1]},
        {"node.coefficients", "node.intercepts"}),
}  # fmt: skip


@pytest.mark.parametrize("op", CLASSICAL)
def test_statistics_of_classical_operators_are_not_parameters(op):
    attributes, trained = CLASSICAL[op]
    operands = {"places": np.array([2, 0])} if op == "ArrayFeatureExtractor" else {}
    results = ("label", "y") if op == "LinearClassifier" else ("y",)
    opsets = '"": 18, "ai.onnx.ml": 3'
    model = one_operator(
        op, {"x": "float[n,3]"}, operands, results, opsets, domain="ai.onnx.ml", **attributes
    )
    graph = load_graph(model)
    found = {name for name in graph.constants if excluded_reason(graph, name) is None}
    assert found == trained
    for label in _STATISTICS.get(f"ai.onnx.ml::{op}", {}):
        assert "measured from data" in str(excluded_reason(graph, f"node.{label}"))


def test_each_classical_operator_has_a_row():
    assert {name.partition("::")[2] for name in _LINEAR_MODELS} == set(CLASSICAL)
