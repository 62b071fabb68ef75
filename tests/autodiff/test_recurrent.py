"""Recurrent operators have the derivatives of their formulas, in all their forms."""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import onnxruntime as ort
import pytest
from onnx import TensorProto, checker, helper, numpy_helper

import kfac_engine as ke
from kfac_engine.autodiff.differentiate import differentiate
from kfac_engine.errors import BackendError, UnsupportedOpError
from kfac_engine.graph.load import load_graph
from kfac_engine.runtime.sample_run import sample_facts
from tests.autodiff.recurrences import DIRECTIONS, GATES, recurrence
from tests.comparing import assert_arrays_close

STEPS, D_IN, HIDDEN = 3, 2, 2
ROLES = ("X", "W", "R", "B", "sequence_lens", "initial_h", "initial_c", "P")
WEIGHTS = ("W", "R", "B", "P")
RESULTS = ("Y", "Y_h", "Y_c")
# Sums of some fifty float32 products through three steps.
CLOSE = 2e-5
# Central differences in float64: the error of the step is its square, far below float32's.
STEP = 1e-5

Options = Mapping[str, object]

# Operator, what is given besides X, W and R, and attributes.
FORMS: Mapping[str, tuple[str, tuple[str, ...], Options]] = {
    **{
        f"{op}-{direction}": (op, ("B",), {"direction": direction})
        for op in GATES
        for direction in DIRECTIONS
    },
    **{
        f"{op}-{direction}-all": (op, ROLES[3:], {"direction": direction, "clip": 0.9})
        for op in GATES
        for direction in DIRECTIONS
    },
    **{
        f"{op}-lengths-{direction}": (op, ("sequence_lens",), {"direction": direction})
        for op in GATES
        for direction in DIRECTIONS
    },
    **{f"{op}-bare": (op, (), {}) for op in GATES},
    **{f"{op}-clipped": (op, ("B", "initial_h"), {"clip": 0.4}) for op in GATES},
    **{
        f"{op}-batch-first": (
            op,
            ("B", "sequence_lens", "initial_h", "initial_c"),
            {"direction": "bidirectional", "layout": 1},
        )
        for op in GATES
    },
    "LSTM-no-cell": ("LSTM", ("initial_h",), {}),
    "LSTM-peepholes": ("LSTM", ("P",), {}),
    "LSTM-coupled": ("LSTM", ("B", "P"), {"input_forget": 1}),
    "GRU-after": ("GRU", ("B", "initial_h"), {"linear_before_reset": 1}),
    "GRU-after-bare": ("GRU", (), {"linear_before_reset": 1, "direction": "bidirectional"}),
    "LSTM-activations": (
        "LSTM",
        ("B",),
        {
            "direction": "bidirectional",
            "activations": ["HardSigmoid", "Elu", "tanh", "Sigmoid", "LeakyRelu", "Softsign"],
            "activation_alpha": [0.3, 0.7, 0.2],
            "activation_beta": [0.4],
        },
    ),
    "GRU-activations": ("GRU", ("B",), {"activations": ["HardSigmoid", "Softplus"]}),
    "RNN-numbers": (
        "RNN",
        ("B",),
        {
            "direction": "bidirectional",
            "activations": ["Affine", "ScaledTanh"],
            "activation_alpha": [0.5, 1.5],
            "activation_beta": [0.1, 0.7],
        },
    ),
    **{
        f"RNN-{name}": ("RNN", ("B",), {"activations": [name]})
        for name in ("Relu", "LeakyRelu", "Elu", "Softsign", "Softplus")
    },
    "RNN-threshold": (
        "RNN", ("B",), {"activations": ["ThresholdedRelu"], "activation_alpha": [0.4]}),
}  # fmt: skip


def operands(op, optional, options, n):
    """Arrays for X, W, R and what else is given; numbers that float32 holds exactly."""
    rng = np.random.default_rng([n, len(optional), *op.encode()])
    d, gates = len(DIRECTIONS[str(options.get("direction", "forward"))]), GATES[op]
    sides = {
        "X": (STEPS, n, D_IN),
        "W": (d, gates * HIDDEN, D_IN),
        "R": (d, gates * HIDDEN, HIDDEN),
        "B": (d, 2 * gates * HIDDEN),
        "initial_h": (d, n, HIDDEN),
        "initial_c": (d, n, HIDDEN),
        "P": (d, 3 * HIDDEN),
    }
    only_lstm = () if op == "LSTM" else ("initial_c", "P")
    made = {
        role: rng.normal(size=sides[role]).astype(np.float32)
        for role in ("X", "W", "R", *optional)
        if role in sides and role not in only_lstm
    }
    if options.get("layout"):
        for role in {"X", "initial_h", "initial_c"}.intersection(made):
            made[role] = made[role].swapaxes(0, 1)
    if "sequence_lens" in optional:
        made["sequence_lens"] = rng.permutation([1, STEPS, *rng.integers(1, STEPS, n - 2)]).astype(
            np.int32
        )
    return made


def model_of(op, feeds, options, frozen=WEIGHTS):
    """One node; ``frozen`` are initializers, the rest inputs with an open batch."""
    batch_axis = {"X": 1, "sequence_lens": 0, "initial_h": 1, "initial_c": 1}
    inputs = []
    for name in feeds:
        if name not in frozen:
            sides = list(feeds[name].shape)
            if name in batch_axis:
                sides[0 if options.get("layout") else batch_axis[name]] = "n"
            kind = TensorProto.INT32 if name == "sequence_lens" else TensorProto.FLOAT
            inputs.append(helper.make_tensor_value_info(name, kind, sides))
    names = [role if role in feeds else "" for role in ROLES[: 8 if op == "LSTM" else 6]]
    results = list(RESULTS[: 3 if op == "LSTM" else 2])
    node = helper.make_node(op, names, results, name="memory", hidden_size=HIDDEN, **options)
    graph = helper.make_graph(
        [node],
        "recurrent",
        inputs,
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in results],
        [numpy_helper.from_array(feeds[name], name) for name in frozen if name in feeds],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)


def slopes(op, feeds, options, cotangents, name, along):
    """The change of all results, weighted with cotangents, as one operand moves."""

    def contraction(step):
        moved = {**feeds, name: feeds[name].astype(float) + step * along}
        values = zip(RESULTS, recurrence(op, moved, options), strict=False)
        return sum(float((value * cotangents[result]).sum()) for result, value in values)

    return (contraction(STEP) - contraction(-STEP)) / (2 * STEP)


@pytest.mark.parametrize("form", FORMS)
def test_recurrence_formulas_equal_runtime(form):
    op, optional, options = FORMS[form]
    options = {**options, "layout": 0}  # all that the runtime executes
    feeds = operands(op, optional, options, 3)
    model = model_of(op, feeds, options, frozen=())
    found = ort.InferenceSession(model.SerializeToString()).run(None, feeds)
    for value, truth in zip(found, recurrence(op, feeds, options), strict=True):
        np.testing.assert_allclose(value, truth, rtol=CLOSE, atol=CLOSE)


@pytest.mark.parametrize("form", FORMS)
def test_recurrence_gradients_equal_formulas(form):
    op, optional, options = FORMS[form]
    first = operands(op, optional, options, 2)
    weights = {name: first[name] for name in WEIGHTS if name in first}
    sample = {name: first[name] for name in first if name not in weights}
    model = ke.load_model(
        model_of(op, first, options), trainable=list(weights), sample_inputs=sample
    )
    for n in (2, 3):  # the batch is open: one model for both
        feeds = {**operands(op, optional, options, n), **weights}
        trace = model.run({name: feeds[name] for name in feeds if name not in weights})
        rng = np.random.default_rng(n)
        truths = dict(zip(RESULTS, recurrence(op, feeds, options), strict=False))
        assert_arrays_close(trace, truths, rtol=CLOSE, atol=CLOSE)
        cotangents = {name: rng.normal(size=v.shape).astype("f") for name, v in truths.items()}
        wrt = [name for name in feeds if name != "sequence_lens"]
        gradients = trace.vjp(cotangents, wrt)
        for name in wrt:
            along = rng.normal(size=feeds[name].shape)
            slope = slopes(op, feeds, options, cotangents, name, along)
            found = float((gradients[name] * along).sum())
            scale = float(np.abs(gradients[name] * along).sum()) + 1
            assert abs(found - slope) < CLOSE * scale, name


@pytest.mark.parametrize("op", GATES)
@pytest.mark.parametrize("result", RESULTS[:2])
def test_each_single_result_has_valid_gradient_model(op, result):
    options = {"direction": "bidirectional"}
    feeds = operands(op, ("B",), options, 2)
    model = model_of(op, feeds, options)
    kept = [entry for entry in model.graph.output if entry.name == result]
    del model.graph.output[:]
    model.graph.output.extend(kept)
    names = model.graph.node[0].output
    names[:] = [name if name == result else "" for name in names]
    gradient = ke.differentiate(model, wrt=["R", "X"])
    checker.check_model(gradient, full_check=True)
    rng = np.random.default_rng(0)
    truth = recurrence(op, feeds, options)[RESULTS.index(result)]
    cotangent = rng.normal(size=truth.shape).astype(np.float32)
    cotangents = dict.fromkeys(RESULTS, np.zeros(())) | {result: cotangent}
    session = ort.InferenceSession(gradient.SerializeToString())
    fed = {"X": feeds["X"], "cotangent": cotangent}
    for name in ("R", "X"):
        found = session.run([f"gradient/{name}"], fed)[0]
        along = rng.normal(size=feeds[name].shape)
        slope = slopes(op, feeds, options, cotangents, name, along)
        assert abs(float((found * along).sum()) - slope) < CLOSE * (np.abs(found).sum() + 1)


@pytest.mark.parametrize("op", GATES)
def test_gate_matrices_are_sliced_once_for_all_steps(op):
    feeds = operands(op, ("B",), {}, 2)
    graph = ke.load_model(model_of(op, feeds, {}), trainable=["W", "R", "B"]).graph
    products = [node for node in graph.nodes if node.op == "Gemm"]
    recurrent = 2 if op == "GRU" else 1
    assert len(products) == STEPS * (1 + recurrent)
    assert len({node.inputs[1] for node in products}) == 1 + recurrent
    assert len(graph.consumers["W"]) == len(graph.consumers["R"]) == 1


def test_other_sequence_length_error_names_unrolled_length():
    feeds = operands("LSTM", (), {}, 2)
    proto = model_of("LSTM", feeds, {})
    proto.graph.input[0].type.tensor_type.shape.dim[0].dim_param = "steps"
    sample = {"X": feeds["X"]}
    model = ke.load_model(proto, trainable=["W"], sample_inputs=sample)
    longer = {"X": np.concatenate([feeds["X"]] * 2)}
    with pytest.raises(BackendError, match=r"'memory/.*LSTM was unrolled over 3 steps"):
        _ = model.run(longer)["Y"]


def test_examples_that_are_steps_need_sample_inputs_of_their_number_and_no_other_export():
    feeds = operands("LSTM", (), {}, 1)
    proto = model_of("LSTM", feeds, {})
    steps, batch, _ = proto.graph.input[0].type.tensor_type.shape.dim
    steps.dim_param, batch.dim_value = "n", 1
    data = {"X": feeds["X"]}
    assert len(feeds["X"]) == 3
    proto.graph.output.pop(-1)
    proto.graph.output.pop(-1)

    with pytest.raises(ke.ShapeError, match="has 3 examples") as refused:
        ke.Engine.from_onnx(proto, loss="normal").predict(data)
    assert str(refused.value).endswith("at 2 along axis 0 of 'X', the axis of the steps.")
    assert "give sample_inputs (--inputs) with the steps of the data" in str(refused.value)
    assert "export" not in str(refused.value)
    assert len(ke.Engine.from_onnx(proto, loss="normal", sample_inputs=data).predict(data)) == 3


REFUSED = {
    "unknown": ({"activations": ("Sine",)}, "unknown activation 'Sine'"),
    "number": (
        {"activations": ("Affine",)},
        "does not list the parameters of its activation 'Affine'",
    ),
    "count": ({"activations": ("Tanh", "Tanh")}, "lists 2 activations"),
}


@pytest.mark.parametrize("form", REFUSED)
def test_unsupported_recurrence_error_names_node(form):
    options, words = REFUSED[form]
    feeds = operands("RNN", (), {}, 2)
    graph = load_graph(model_of("RNN", feeds, {}))
    facts = sample_facts(graph)
    node = replace(graph.nodes[0], attributes={**graph.nodes[0].attributes, **options})
    with pytest.raises(UnsupportedOpError, match=words):
        differentiate(replace(graph, nodes=(node,)), facts, ["Y"], ["W"])
