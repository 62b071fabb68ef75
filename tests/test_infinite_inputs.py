"""Inputs with infinity or NaN: allowed where the results are finite, named where they are not.

The truth is the same function with finite inputs: a Boolean mask, and missing values filled in.
"""

import warnings
from typing import NamedTuple

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import numpy_helper, parser

import kfac_engine as ke

RNG = np.random.default_rng(0)
WEIGHTS = {n: RNG.standard_normal((4, 4)).astype(np.float32) for n in ("Wq", "Wk", "Wv", "W", "V")}
X = RNG.standard_normal((5, 3, 4)).astype(np.float32)
SEE = np.tril(np.ones((3, 3), bool))
HOLES = np.where(RNG.random(X.shape) < 0.1, np.float32(np.nan), X)
FIRST = tuple(int(i) for i in np.argwhere(np.isnan(HOLES))[0])


class Case(NamedTuple):
    """A model with its inputs."""

    model: onnx.ModelProto
    inputs: dict[str, np.ndarray]


def model_of(inputs, nodes):
    model = parser.parse_model(
        f'<ir_version: 8, opset_import: ["": 18]> g ({inputs}) => (float[N,3,4] y) {{ {nodes} }}'
    )
    constants = {**WEIGHTS, "low": np.float32(-3e38), "zero": np.float32(0)}
    used = {name for node in model.graph.node for name in node.input}
    model.graph.initializer.extend(
        numpy_helper.from_array(array, name) for name, array in constants.items() if name in used
    )
    return model


def attention(mask, masked):
    return model_of(
        f"float[N,3,4] x, {mask} mask",
        f"""q = MatMul(x, Wq) k = MatMul(x, Wk) v = MatMul(x, Wv) kt = Transpose<perm=[0,2,1]>(k)
        s = MatMul(q, kt) m = {masked} a = Softmax<axis=-1>(m) y = MatMul(a, v)""",
    )


PLACES = np.broadcast_to(SEE, (5, 3, 3))
ADDED = np.where(SEE, np.float32(0), np.float32(-np.inf))
IMPUTED = model_of("float[N,3,4] x", "g = IsNaN(x) z = Where(g, zero, x) y = MatMul(z, W)")
# A model whose inputs have infinity or NaN, and the same function with finite inputs.
FINITE = {
    "mask": (
        Case(attention("float[3,3]", "Add(s, mask)"), {"x": X, "mask": ADDED}),
        Case(attention("bool[3,3]", "Where(mask, s, low)"), {"x": X, "mask": SEE}),
    ),
    "mask of each example": (
        Case(
            attention("float[N,3,3]", "Add(s, mask)"),
            {"x": X, "mask": np.where(PLACES, np.float32(0), np.float32(-np.inf))},
        ),
        Case(attention("bool[N,3,3]", "Where(mask, s, low)"), {"x": X, "mask": PLACES}),
    ),
    "missing values": (Case(IMPUTED, {"x": HOLES}), Case(IMPUTED, {"x": np.nan_to_num(HOLES)})),
}
# The NaN reaches the output, or the gradient of W alone.
SPOILED = Case(model_of("float[N,3,4] x", "y = MatMul(x, W)"), {"x": HOLES})
HIDDEN = Case(
    model_of(
        "float[N,3,4] x", "h = MatMul(x, W) g = IsNaN(h) z = Where(g, zero, h) y = MatMul(z, V)"
    ),
    {"x": HOLES},
)
Y = RNG.standard_normal(X.shape).astype(np.float32)
OPTIONS = {"loss": "normal", "threads": 1, "estimation_mode": "exact", "damping": 0.1}


def engine_of(case):
    return ke.Engine.from_onnx(case.model, sample_inputs=case.inputs, **OPTIONS)


def curvature_of(case, data=None, **options):
    data = data or {n: np.nan_to_num(a) for n, a in case.inputs.items()}
    return ke.curvature(case.model, (data, Y), loss="normal", sample_inputs=data, **options)


def observed(case):
    engine = engine_of(case)
    engine.observe(case.inputs)
    return engine.precondition({n: np.ones_like(a) for n, a in engine.parameters.items()})


def product_of(case):
    engine = engine_of(case)
    ones = {n: np.ones_like(a) for n, a in engine.parameters.items()}
    return engine.curvature_products(engine.trace(case.inputs, Y)).multiply_fisher(ones)


# What reads derivatives, and returns arrays.
DERIVATIVES = {
    "step": lambda case: engine_of(case).step(case.inputs, Y).natural_gradients,
    "gradients": lambda case: engine_of(case).gradients(case.inputs, Y).gradients,
    "observe": observed,
    "precondition": lambda case: ke.precondition(case.model, case.inputs, Y, "normal").gradients,
    "products": product_of,
    "kron": lambda case: curvature_of(case, case.inputs).eigenvalues(),
    "diagonal": lambda case: curvature_of(case, case.inputs, structure="diagonal").eigenvalues(),
    "full": lambda case: curvature_of(case, case.inputs, structure="full").eigenvalues(),
    "influence": lambda case: ke.Influence(curvature_of(case)).self_scores((case.inputs, Y)),
    "laplace": lambda case: ke.Laplace(curvature_of(case)).predict(case.inputs).variance,
    "tiles": lambda case: [
        array
        for tile in curvature_of(case).example_gradients(case.inputs, Y)
        for array in tile.arrays.values()
    ],
}
# What reads the outputs alone.
OUTPUTS = {
    "predict": lambda case: engine_of(case).predict(case.inputs),
    "loss": lambda case: engine_of(case).loss(case.inputs, Y),
    "evaluate": lambda case: engine_of(case).evaluate((case.inputs, Y)),
}


def flat(value):
    """All numbers of a result."""
    if isinstance(value, dict):
        value = [value[name] for name in sorted(value)]
    return np.concatenate([np.ravel(flat(v)) for v in value]) if isinstance(value, list) else value


@pytest.mark.parametrize("call", [*DERIVATIVES, *OUTPUTS])
@pytest.mark.parametrize("name", FINITE)
def test_results_equal_those_of_finite_inputs(name, call):
    case, same = FINITE[name]
    run = (DERIVATIVES | OUTPUTS)[call]
    found, truth = (np.asarray(flat(run(one)), np.float64) for one in (case, same))
    assert np.isfinite(truth).all()
    np.testing.assert_allclose(found, truth, rtol=1e-4, atol=1e-4 * abs(truth).max())


@pytest.mark.parametrize("name", FINITE)
def test_predictions_equal_onnx_runtime(name):
    case, _ = FINITE[name]
    (truth,) = ort.InferenceSession(case.model.SerializeToString()).run(None, case.inputs)
    np.testing.assert_allclose(OUTPUTS["predict"](case), truth, rtol=1e-5, atol=1e-5)


NAMED = (
    rf"input 'x' contains NaN or infinity, first at index \({FIRST[0]}, {FIRST[1]}, {FIRST[2]}\)"
)


@pytest.mark.parametrize("call", [*DERIVATIVES, *OUTPUTS])
def test_an_input_that_spoils_the_output_is_named(call):
    with pytest.raises(ke.NonFiniteError, match=NAMED):
        (DERIVATIVES | OUTPUTS)[call](SPOILED)


@pytest.mark.parametrize("call", DERIVATIVES)
def test_an_input_that_spoils_a_derivative_is_named(call):
    with pytest.raises(ke.NonFiniteError, match=NAMED) as failure:
        DERIVATIVES[call](HIDDEN)
    assert str(failure.value).count("input 'x'") == 1


@pytest.mark.parametrize("call", OUTPUTS)
def test_outputs_that_stay_finite_are_returned(call):
    assert np.isfinite(flat(OUTPUTS[call](HIDDEN))).all()


def test_errors_of_finite_inputs_name_no_input():
    engine = engine_of(FINITE["missing values"][1])
    engine.set_parameters({"W": np.full((4, 4), 1e38, np.float32)})
    with warnings.catch_warnings(action="ignore"), pytest.raises(ke.NonFiniteError) as failure:
        engine.step({"x": 1e3 * X}, Y)
    assert "input 'x'" not in str(failure.value)
