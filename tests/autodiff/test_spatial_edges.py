"""Images where finite differences do not reach: kinks, forms of ONNX Runtime alone, refusals."""

import numpy as np
import pytest

from kfac_engine.errors import UnsupportedOpError
from tests.autodiff.harness import N, Operand, bench, case, k, x

# Results are sums of a few products in float32.
ROUNDING = 1e-5


# -- linear maps that the reference does not know --------------------------------------------------

_REGION = k([0, 0, 0.1, -0.2, 1, 1, 0.8, 1.1], "float32")
_LINEAR = [
    case("Resize", "other_half_pixels", x(1, N, 3, 4), None, k([1, 1, 1.5, 2], "float32"),
         mode="linear", coordinate_transformation_mode="tf_half_pixel_for_nn"),
    case("Resize", "other_half_pixels_of_one_axis", x(1, N, 3, 4), None,
         k([1, 1, 1, 2], "float32"), mode="cubic",
         coordinate_transformation_mode="tf_half_pixel_for_nn"),
    case("Resize", "cropped_by_scales", x(1, N, 4, 3), _REGION, k([1, 1, 1.7, 2.2], "float32"),
         mode="linear", coordinate_transformation_mode="tf_crop_and_resize"),
    case("Resize", "corners_by_scales", x(1, N, 4, 3), None, k([1, 1, 1.7, 0.7], "float32"),
         mode="cubic", coordinate_transformation_mode="align_corners"),
    case("Resize", "negative_axes", x(1, N, 4, 3), None, None, k([5, 7]), mode="linear",
         axes=(-1, -2)),
    case("Resize", "cubic_to_one_pixel", x(1, N, 4, 3), None, None, k([1, 5]), mode="cubic",
         axes=(2, 3), coordinate_transformation_mode="pytorch_half_pixel"),
    case("MaxUnpool", "larger_than_inferred", x(1, 1, 2, 2),
         Operand(value=np.array([[[[5, 7], [13, 15]]]]), active=False), k([1, 1, 5, 5]),
         kernel_shape=(2, 2), strides=(2, 2)),
]  # fmt: skip


@pytest.mark.parametrize("tested", _LINEAR, ids=str)
def test_gradient_of_linear_operator_is_transpose(tested):
    made = bench(tested, "ort", batch=2)
    evaluate = made.forward(made.sample, made.outputs)
    value = made.sample["operand_0"]

    def image(pixels):
        return evaluate({**made.sample, "operand_0": pixels})["result_0"]

    units = np.eye(value.size, dtype="float32").reshape(-1, *value.shape)
    matrix = np.stack([image(unit).ravel() for unit in units])
    g = np.random.default_rng(0).normal(size=image(value).shape).astype("float32")
    found = made.gradients(made.sample, {"result_0": g})["operand_0"]
    np.testing.assert_allclose(found.ravel(), matrix @ g.ravel(), atol=ROUNDING)


# -- kinks -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("p", [1, 2, 3])
@pytest.mark.parametrize("runtime", ["reference", "ort"])
def test_gradient_of_norm_of_zeros_is_zero(runtime, p):
    for op, geometry in (("LpPool", {"kernel_shape": (2,)}), ("GlobalLpPool", {})):
        made = bench(case(op, "zeros", x(1, 1, 3), p=p, newest=21, **geometry), runtime, batch=1)
        zeros = np.zeros_like(made.sample["operand_0"])
        ones = np.ones(made.facts["result_0"].shape, zeros.dtype)
        found = made.gradients({"operand_0": zeros}, {"result_0": ones})["operand_0"]
        np.testing.assert_array_equal(found, zeros)


# -- forms without a rule --------------------------------------------------------------------------


def _fed(value):
    return Operand(value=np.asarray(value), active=False)


_REFUSED = [
    case("Resize", "scales", x(1, 1, 3, 4), None, x(4, draw=lambda *_: np.full(4, 1.0)),
         mode="linear"),
    case("Resize", "aspect_of_all_axes", x(1, 1, 3, 4), None, None, k([1, 1, 6, 6]),
         mode="linear", keep_aspect_ratio_policy="not_larger"),
    case("DFT", "computed_axis", x(2, 3, 2), None, _fed(1), opset=20),
    case("DFT", "cut_spectrum", x(2, 6, 2), k(4), axis=1, inverse=1, onesided=1, newest=19),
    case("Col2Im", "computed_block", x(1, 4, 6), k([3, 4]), _fed([2, 2])),
    case("LpPool", "same_and_dilations", x(2, 1, 6), kernel_shape=(2,), dilations=(2,),
         auto_pad="SAME_LOWER"),
]  # fmt: skip


@pytest.mark.parametrize("refused", _REFUSED, ids=str)
def test_unsupported_form_error_names_operator_and_node(refused):
    with pytest.raises(UnsupportedOpError, match=rf"{refused.op}.*'tested'"):
        _ = bench(refused, "reference", batch=2).backward
