"""Cases for operators that backward graphs are made of, and that some models use themselves."""

from tests.autodiff.harness import N, case, distinct, k, p, x

_TRANSPOSED = [
    case("ConvTranspose", label, x(N, ins, *sides), p(ins, outs, *kernel), *bias, **geometry)
    for label, ins, outs, sides, kernel, bias, geometry in (
        ("dense", 2, 3, (3, 4), (2, 3), (), {}),
        ("bias", 2, 3, (3, 2), (2, 2), (p(3),), {"strides": (2, 2)}),
        ("padded", 2, 3, (4, 3), (3, 3), (), {"pads": (1, 0, 1, 2)}),
        ("strided", 2, 3, (3, 3), (3, 2), (), {"strides": (2, 3), "pads": (1, 0, 0, 1)}),
        ("dilated", 2, 1, (3, 3), (2, 2), (), {"dilations": (2, 3), "strides": (1, 2)}),
        ("output_padding", 3, 2, (2, 3), (3, 3), (),
         {"strides": (2, 2), "pads": (1, 1, 1, 1), "output_padding": (1, 1)}),
        ("groups", 4, 3, (2, 3), (2, 2), (p(6),), {"group": 2, "strides": (2, 1)}),
        ("depthwise", 3, 1, (3, 3), (2, 2), (), {"group": 3, "strides": (2, 2)}),
        ("large_kernel", 2, 3, (3, 3), (4, 4), (), {"strides": (2, 2)}),
        ("line", 2, 2, (4,), (3,), (), {"strides": (2,)}),
        ("same_upper", 2, 3, (3, 3), (3, 4), (p(3),), {"auto_pad": "SAME_UPPER",
                                                       "strides": (2, 2)}),
        ("same_lower", 2, 3, (3, 2), (3, 2), (), {"auto_pad": "SAME_LOWER", "strides": (2, 1),
                                                  "dilations": (1, 2)}),
        ("same_stride_over_kernel", 1, 2, (3, 2), (1, 2), (), {"auto_pad": "SAME_UPPER",
                                                               "strides": (3, 2)}),
        ("valid", 1, 2, (3, 2), (3, 2), (), {"auto_pad": "VALID", "strides": (2, 1),
                                             "output_padding": (1, 0)}),
        ("output_shape", 2, 2, (3, 3), (3, 3), (p(2),), {"output_shape": (4, 8),
                                                         "strides": (2, 2)}),
        ("output_shape_same_upper", 2, 2, (3,), (4,), (), {"output_shape": (5,), "strides": (2,),
                                                           "auto_pad": "SAME_UPPER"}),
        ("output_shape_and_padding", 2, 2, (3,), (3,), (), {"output_shape": (6,), "strides": (2,),
                                                            "output_padding": (1,)}),
        ("output_shape_groups", 4, 1, (2, 2), (2, 3), (), {"output_shape": (3, 4), "group": 2,
                                                           "strides": (2, 1)}),
        ("volume_same_lower", 1, 1, (2, 2, 2), (2, 1, 3), (), {"auto_pad": "SAME_LOWER",
                                                               "strides": (1, 2, 2)}),
        ("volume", 1, 2, (2, 2, 2), (2, 1, 2), (), {"strides": (1, 2, 2)}),
    )
]  # fmt: skip

_ASYMMETRIC = {"coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}
_RESIZED = [
    case("Resize", label, x(N, 2, *sides), None, *target, **attributes)
    for label, sides, target, attributes in (
        ("tiles", (2, 3), (k([1, 1, 2, 3], "float32"),), _ASYMMETRIC),
        ("tiles_of_a_line", (3,), (k([1, 1, 2], "float32"),), _ASYMMETRIC),
        ("half_pixel_tiles", (2, 3), (k([1, 1, 3, 2], "float32"),), {}),
        ("fractions", (4, 4), (k([1, 1, 1.5, 0.5], "float32"),), _ASYMMETRIC),
        ("sizes", (3, 4), (None, k([3, 2, 5, 4])), _ASYMMETRIC),
    )
]

_PADDED = [
    case("Pad", "int32_axes", x(N, 3, 2), k([1, 2]), None, k([1], "int32")),
    case("Pad", "two_axes_out_of_order", x(N, 3, 2), k([1, 0, 0, 2]), None, k([2, -2])),
    case("Slice", "two_axes_out_of_order", x(N, 3, 4), k([1, 0]), k([4, 2]), k([2, 1])),
    case("MaxPool", "tiles_with_a_rest", x(N, 2, 5, 7, draw=distinct), kernel_shape=(2, 3),
         strides=(2, 3)),
]  # fmt: skip

CASES = (*_TRANSPOSED, *_RESIZED, *_PADDED)
