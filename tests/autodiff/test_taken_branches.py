"""Branches that constants and given settings decide: their weights train, others are gone."""

import numpy as np
import pytest
from onnx import parser

import kfac_engine as ke
from kfac_engine.errors import BackendError, UnsupportedOpError
from tests.graph.running import run_model

# Rounding of float32 sums of a few numbers, relative to the largest.
SINGLE = 2e-6

WEIGHT = {
    "initializer": ("<float[3,2] {0} = {{{1}}}>", ""),
    "node": ("", "{0} = Constant <value = float[3,2] {{{1}}}> ()"),
}
NUMBERS = {"slow": "1, 2, 3, 4, 5, 6", "fast": "-1, 0.5, 2, -3, 1, 1"}
DECIDES = {
    "constant": ("", "int64 rate = {16000},"),
    "setting": (", int64 rate", ""),
    "setting_of_one_axis": (", int64[1] rate", ""),
    "truth": (", bool fast_one", ""),
}


def branches(spelling, decides):
    """``x W``, where the rate decides which W of two branches, or which of another ``If``."""
    stored, read = WEIGHT[spelling]
    inputs, constants = DECIDES[decides]
    weights = {
        name: (stored.format(name, numbers), read.format(name, numbers))
        for name, numbers in NUMBERS.items()
    }
    fast = f"c = Identity ({'fast_one' if decides == 'truth' else 'same'})"
    if decides != "truth":
        fast = f"same = Equal (rate, wanted)  {fast}"
    return parser.parse_model(
        f"""<ir_version: 8, opset_import: ["": 18]>
        m (float[n,3] x{inputs}) => (float[n,2] y) <{constants} int64 wanted = {{16000}}> {{
          {fast}
          y = If (c) <
            then_branch = t () => (float[n,2] p) {weights["fast"][0]} {{
              {weights["fast"][1]}  no = Constant <value = bool {{0}}> ()
              p = If (no) <
                then_branch = tt () => (float[n,2] never) <float[2] unused = {{1, 2}}> {{
                  zero = MatMul (x, fast)  never = Add (zero, unused) }},
                else_branch = te () => (float[n,2] always) {{ always = MatMul (x, fast) }}
              > }},
            else_branch = e () => (float[n,2] q) {weights["slow"][0]} {{
              {weights["slow"][1]}  q = MatMul (x, slow) }}
          >
        }}"""
    )


def setting(decides, fast):
    """The input that decides, if it is one."""
    if decides == "truth":
        return {"fast_one": np.array(fast)}
    rate = np.array(16000 if fast else 8000)
    return {} if decides == "constant" else {"rate": rate.reshape((1,) * ("axis" in decides))}


CASES = [
    (spelling, decides, fast)
    for spelling in WEIGHT
    for decides in DECIDES
    for fast in (True, False)
    if fast or decides != "constant"
]


@pytest.mark.parametrize(("spelling", "decides", "fast"), CASES)
def test_weight_of_selected_branch_is_trained_and_exported(spelling, decides, fast, tmp_path):
    model = branches(spelling, decides)
    x = np.random.default_rng(0).standard_normal((5, 3)).astype(np.float32)
    inputs = {"x": x, **setting(decides, fast)}
    engine = ke.Engine.from_onnx(model, loss="normal", sample_inputs=inputs)
    name = "fast" if fast else "slow"
    assert list(engine.parameters) == [name]
    graph = engine.collection.graph.loaded.graph
    assert {"fast", "slow", "unused"}.intersection(graph.constants) == {name}
    weight = np.array(NUMBERS[name].split(", "), float).reshape(3, 2)
    np.testing.assert_array_equal(engine.parameters[name], weight)
    found = engine.step(inputs, np.zeros((5, 2), np.float32)).gradients[name]
    truth = 2 * x.T.astype(float) @ (x @ weight) / 5  # the loss sums over features
    np.testing.assert_allclose(found, truth, atol=SINGLE * np.abs(truth).max())
    engine.set_parameters({name: np.eye(3, 2, dtype=np.float32)})
    engine.export(tmp_path / "new.onnx")
    written = (tmp_path / "new.onnx").read_bytes()
    np.testing.assert_allclose(run_model(written, inputs)["y"], x[:, :2], rtol=1e-6)
    other = setting(decides, not fast)
    if other:
        old = run_model(model.SerializeToString(), {"x": x, **other})["y"]
        np.testing.assert_array_equal(run_model(written, {"x": x, **other})["y"], old)


def test_changed_setting_after_sample_run_raises_error():
    model = branches("node", "setting")
    x = np.ones((4, 3), np.float32)
    engine = ke.Engine.from_onnx(
        model, loss="normal", sample_inputs={"x": x, "rate": np.array(16000)}
    )
    targets = np.zeros((4, 2), np.float32)
    with pytest.raises(BackendError, match=r"If was unrolled for .* as in the sample inputs"):
        engine.step({"x": x, "rate": np.array(8000)}, targets)
    assert engine.step({"x": x, "rate": np.array(16000)}, targets).loss > 0


def test_gradient_model_uses_setting_of_sample_inputs():
    x = np.ones((4, 3), np.float32)
    sample = {"x": x, "rate": np.array(8000)}
    gradient = ke.differentiate(branches("node", "setting"), loss="normal", sample_inputs=sample)
    found = run_model(gradient.SerializeToString(), {**sample, "targets": np.zeros((4, 2), "f4")})
    truth = 2 * x.T @ (x @ np.array([[1, 2], [3, 4], [5, 6]])) / 4
    np.testing.assert_allclose(found["gradient/slow"], truth, rtol=1e-5)


@pytest.mark.parametrize("decides", ["setting", "truth"])
def test_branch_on_missing_setting_error_names_remedies(decides):
    (name,) = setting(decides, True)
    with pytest.raises(UnsupportedOpError, match=f"'{name}': pass a batch .*sample_inputs.*const"):
        ke.Engine.from_onnx(branches("node", decides), loss="normal")


def test_dynamic_axis_of_integers_is_data():
    model = branches("node", "setting_of_one_axis")
    model.graph.input[1].type.tensor_type.shape.dim[0].dim_param = "n"
    inputs = {"x": np.ones((1, 3), np.float32), "rate": np.array([16000])}
    with pytest.raises(UnsupportedOpError, match="'c' depends on the data, through 'rate'"):
        ke.Engine.from_onnx(model, loss="normal", sample_inputs=inputs)


def test_setting_determines_loop_iterations():
    model = parser.parse_model(
        """<ir_version: 8, opset_import: ["": 18]>
        m (float[n,2] x, int64 times) => (float[n,2] y) <float[2] w = {2, 3}, bool on = {1}> {
          y = Loop (times, on, x) <
            body = b (int64 i, bool c, float[n,2] h) => (bool c_out, float[n,2] g) {
              c_out = Identity (c)  g = Mul (h, w) }
          >
        }"""
    )
    inputs = {"x": np.array([[1, 2], [3, 4]], np.float32), "times": np.array(3)}
    found = ke.precondition(model, inputs, np.zeros((2, 2), np.float32), loss="normal")
    x, w = inputs["x"].astype(float), np.array([2.0, 3.0])
    truth = (2 * (x * w**3) * (3 * x * w**2)).sum(axis=0) / 2
    np.testing.assert_allclose(found.gradients["w"], truth, rtol=1e-5)
    with pytest.raises(UnsupportedOpError, match="'times': pass a batch"):
        ke.Engine.from_onnx(model, loss="normal")
