"""Cases for matrix products and convolutions."""

from math import prod

from tests.autodiff.harness import N, case, p, x

_GEMM = [
    *(
        case("Gemm", f"flags_{ta}{tb}", a, b, p(4), transA=ta, transB=tb, alpha=0.7, beta=1.3)
        for ta, a in ((0, x(N, 3)), (1, x(3, N)))
        for tb, b in ((0, p(3, 4)), (1, p(4, 3)))
    ),
    case("Gemm", "plain", x(N, 3), p(3, 4)),
    case("Gemm", "no_c_with_alpha", x(N, 3), p(3, 4), alpha=-2.0),
    case("Gemm", "scalar_c", x(N, 3), p(3, 4), p()),
    case("Gemm", "one_element_c", x(N, 3), p(3, 4), p(1), beta=0.5),
    case("Gemm", "row_c", x(N, 3), p(3, 4), p(1, 4)),
    case("Gemm", "column_c", x(N, 3), p(3, 4), x(N, 1)),
    case("Gemm", "full_c", x(N, 3), p(3, 4), x(N, 4)),
    case("Gemm", "weight_on_left", p(4, 3), x(N, 3), transB=1),
]

_MATMUL = [
    case("MatMul", "matrices", x(N, 3), p(3, 4)),
    case("MatMul", "batch_with_matrix", x(N, 2, 3), p(3, 4)),
    case("MatMul", "deep_batch_with_matrix", x(N, 2, 2, 3), p(3, 4)),
    case("MatMul", "matrix_with_batch", p(4, 3), x(N, 3, 2)),
    case("MatMul", "matrix_with_deep_batch", p(4, 3), x(N, 2, 3, 2)),
    case("MatMul", "batches", x(N, 2, 3), x(N, 3, 4)),
    case("MatMul", "heads", x(N, 2, 3, 2), x(N, 2, 2, 3)),
    case("MatMul", "stretched_batch", x(N, 1, 2, 3), p(2, 3, 4)),
    case("MatMul", "one_weight_for_each", p(2, 4, 3), x(N, 2, 3, 1)),
    case("MatMul", "stack_of_rows", x(N, 3, 1, 2), p(3, 2, 4)),
    case("MatMul", "stack_under_positions", x(N, 2, 3, 2, 4), p(3, 4, 2)),
    case("MatMul", "stack_with_axis_of_one", x(N, 3, 2, 4), p(1, 3, 4, 2)),
    case("MatMul", "stack_between_axes", x(N, 3, 2, 1, 4), p(3, 1, 4, 2)),
    case("MatMul", "one_matrix_with_axes_of_one", x(N, 3, 2, 4), p(1, 1, 4, 2)),
    case("MatMul", "stack_on_left", p(3, 4, 2), x(N, 3, 2, 1)),
    case("MatMul", "stack_on_left_under_positions", p(3, 1, 4, 2), x(N, 3, 2, 2, 3)),
    case("MatMul", "both_sides_broadcast", x(N, 1, 3, 2), p(1, 2, 2, 3)),
    case("MatMul", "both_sides_broadcast_apart", x(N, 2, 1, 2, 3), p(1, 3, 3, 2)),
    case("MatMul", "data_without_stack", x(N, 3), p(2, 3, 4)),
    case("MatMul", "data_without_stack_on_right", p(2, 4, 3), x(3, N)),
    case("MatMul", "vectors", p(3), p(3)),
    case("MatMul", "matrix_with_vector", x(N, 3), p(3)),
    case("MatMul", "batch_with_vector", x(N, 2, 3), p(3)),
    case("MatMul", "vector_with_matrix", p(3), x(3, N)),
    case("MatMul", "vector_with_batch", p(3), x(N, 3, 2)),
    case("MatMul", "vector_with_deep_batch", p(3), x(N, 2, 3, 2)),
    case("MatMul", "inner_side_of_one", x(N, 1, 2, 1), p(2, 1, 3)),
    case("MatMul", "outer_sides_of_one", x(N, 1, 3), x(N, 3, 1)),
]

_SPATIAL = {1: (7,), 2: (5, 4), 3: (3, 2, 4)}
# Name to kernel, which also says the number of axes, and attributes.
_WINDOWS = {
    "pixelwise": ((1, 1), {}),
    "pixelwise_strided": ((1, 1), {"strides": (2, 2)}),
    "plain": ((3, 3), {}),
    "same_size": ((3, 3), {"pads": (1, 1, 1, 1)}),
    "asymmetric_pads": ((3, 2), {"pads": (0, 1, 2, 0)}),
    "overpadded": ((2, 2), {"pads": (2, 3, 2, 3)}),
    "overpadded_strided": ((2, 2), {"pads": (2, 3, 2, 3), "strides": (2, 2)}),
    "strided": ((3, 3), {"strides": (2, 2), "pads": (1, 1, 1, 1)}),
    "strided_unpadded": ((3, 2), {"strides": (2, 3)}),
    "stride_over_kernel": ((2, 1), {"strides": (3, 2)}),
    "dilated": ((2, 3), {"dilations": (3, 2), "pads": (1, 1, 0, 2)}),
    "dilated_strided": ((2, 2), {"dilations": (2, 3), "strides": (3, 2), "pads": (1, 2, 1, 0)}),
    "stem": ((5, 5), {"strides": (3, 3), "pads": (2, 2, 2, 2)}),
    "same_upper": ((2, 3), {"auto_pad": "SAME_UPPER"}),
    "same_lower": ((2, 3), {"auto_pad": "SAME_LOWER"}),
    "same_upper_strided": ((2, 4), {"auto_pad": "SAME_UPPER", "strides": (2, 2)}),
    "same_lower_strided": ((2, 4), {"auto_pad": "SAME_LOWER", "strides": (2, 2)}),
    "same_stride_over_kernel": ((1, 2), {"auto_pad": "SAME_UPPER", "strides": (3, 3)}),
    "valid": ((2, 3), {"auto_pad": "VALID", "strides": (2, 1)}),
    "line": ((3,), {"pads": (1, 1)}),
    "line_strided": ((3,), {"strides": (2,), "pads": (0, 1)}),
    "volume": ((2, 2, 2), {"pads": (0, 1, 0, 1, 0, 1)}),
    "volume_strided": ((2, 1, 3), {"strides": (2, 2, 2), "pads": (0, 0, 1, 1, 0, 1)}),
}

_CONV = [
    *(
        case("Conv", name, x(N, 2, *_SPATIAL[len(kernel)]), p(3, 2, *kernel), p(3), **attributes)
        for name, (kernel, attributes) in _WINDOWS.items()
    ),
    # With many channels and few positions the examples are joined before they are multiplied.
    case("Conv", "joined", x(N, 6, 3, 3), p(5, 6, 3, 3)),
    case("Conv", "joined_pixelwise", x(N, 6, 2, 1), p(5, 6, 1, 1)),
    case("Conv", "joined_strided", x(N, 6, 4, 4), p(5, 6, 3, 3), strides=(2, 3)),
    case("Conv", "dilated_square", x(N, 2, 6, 5), p(3, 2, 3, 2), dilations=(2, 3),
         pads=(2, 0, 3, 1)),
    case("Conv", "one_channel", x(N, 1, 4, 5), p(4, 1, 3, 3), pads=(1, 0, 0, 1)),
    # As many channels as taps.
    *(
        case("Conv", f"{name}_many_channels", x(N, prod(kernel), *_SPATIAL[len(kernel)]),
             p(2, prod(kernel), *kernel), **attributes)
        for name, (kernel, attributes) in _WINDOWS.items()
        if name in ("pixelwise", "pixelwise_strided", "overpadded_strided", "dilated_strided",
                    "stride_over_kernel", "asymmetric_pads", "same_lower_strided", "valid",
                    "line_strided")
    ),
    case("Conv", "no_bias", x(N, 2, 4, 4), p(3, 2, 3, 3), kernel_shape=(3, 3)),
    *(
        case("Conv", f"{name}_{kind}", x(N, ins * groups, *_SPATIAL[len(_WINDOWS[kind][0])]),
             p(outs * groups, ins, *_WINDOWS[kind][0]), group=groups, **_WINDOWS[kind][1])
        for name, groups, ins, outs in (("groups", 2, 2, 3), ("depthwise", 3, 1, 1),
                                        ("depthwise_doubled", 2, 1, 2))
        for kind in ("same_size", "strided", "same_upper_strided", "line", "volume_strided")
    ),
]  # fmt: skip

CASES = (*_GEMM, *_MATMUL, *_CONV)
