"""Running statistics that a file shares with weights become arrays of their own."""

import numpy as np
import onnxruntime as ort

import kfac_engine as ke
from tests.models import written

ROUNDING = 1e-6


def model(shared):
    """A product, a normalization that never saw data, and a product."""
    zeros, ones = "0.,0.,0.,0.", "1.,1.,1.,1."
    apart = "" if shared else f" mean={zeros} variance={ones}"
    statistics = "shift, scale" if shared else "mean, variance"
    return written(
        "n,3 -> n,2",
        f"w(3,4) v(4,2) scale={ones} shift={zeros}{apart}",
        f"s = MatMul (input, w)  b = BatchNormalization (s, scale, shift, {statistics})"
        "  output = MatMul (b, v)",
    )


def test_shared_statistics_have_gradients_of_separate_constants():
    rng = np.random.default_rng(1)
    x, targets = {"input": rng.normal(size=(5, 3)).astype(np.float32)}, rng.integers(0, 2, 5)
    found, wanted = (
        ke.Engine.from_onnx(model(shared), loss="categorical", damping=0.1).step(x, targets)
        for shared in (True, False)
    )
    assert found.natural_gradients.keys() == wanted.natural_gradients.keys()
    for name, natural in wanted.natural_gradients.items():
        np.testing.assert_allclose(found.gradients[name], wanted.gradients[name], atol=ROUNDING)
        np.testing.assert_allclose(found.natural_gradients[name], natural, atol=1e-5)


def test_new_scale_does_not_change_exported_statistics(tmp_path):
    engine = ke.Engine.from_onnx(model(True), loss="categorical")
    engine.set_parameters({"scale": np.full(4, 2, np.float32), "shift": np.ones(4, np.float32)})
    engine.export(tmp_path / "new.onnx")
    x = np.random.default_rng(1).normal(size=(5, 3)).astype(np.float32)
    (found,) = ort.InferenceSession(tmp_path / "new.onnx").run(None, {"input": x})
    w, v = engine.parameters["w"], engine.parameters["v"]
    np.testing.assert_allclose(found, (2 * (x @ w) / np.sqrt(1 + 1e-5) + 1) @ v, rtol=1e-5)


def test_constants_without_weight_use_are_not_renamed():
    engine = ke.Engine.from_onnx(model(False), loss="categorical")
    assert set(engine.parameters) == {"w", "v", "scale", "shift"}
