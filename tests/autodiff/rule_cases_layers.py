"""Cases for pools and normalizations."""

from tests.autodiff.harness import N, case, distinct, k, p, positive, x

_SPATIAL = {1: (7,), 2: (5, 4), 3: (3, 2, 3)}
# Name to kernel, which also says the number of axes, and attributes.
_WINDOWS = {
    "tiled": ((2, 2), {"strides": (2, 2)}),
    "overlapping": ((3, 3), {"strides": (2, 2), "pads": (1, 1, 1, 1)}),
    "dense": ((2, 3), {}),
    "asymmetric_pads": ((3, 2), {"strides": (2, 1), "pads": (0, 1, 2, 0)}),
    "ceil_mode": ((2, 3), {"strides": (2, 3), "ceil_mode": 1}),
    "ceil_mode_padded": ((3, 3), {"strides": (2, 2), "pads": (1, 0, 1, 1), "ceil_mode": 1}),
    "stride_over_kernel": ((1, 2), {"strides": (2, 3)}),
    "same_upper": ((2, 3), {"auto_pad": "SAME_UPPER", "strides": (2, 2)}),
    "same_lower": ((2, 3), {"auto_pad": "SAME_LOWER", "strides": (2, 2)}),
    "same_dense": ((2, 3), {"auto_pad": "SAME_UPPER"}),
    "valid": ((2, 3), {"auto_pad": "VALID", "strides": (2, 2)}),
    "line": ((3,), {"strides": (2,), "pads": (1, 1)}),
    "volume": ((2, 2, 2), {"strides": (2, 1, 2), "pads": (0, 1, 0, 0, 1, 1)}),
}


def _pools(op, opset=18, **attributes):
    for name, (kernel, geometry) in _WINDOWS.items():
        label = "_".join((name, f"opset{opset}", *attributes))
        yield case(
            op, label, x(N, 2, *_SPATIAL[len(kernel)], draw=distinct), kernel_shape=kernel,
            opset=opset, **geometry, **attributes,
        )  # fmt: skip


_POOLS = [
    *_pools("MaxPool"),
    case("MaxPool", "dilated", x(N, 2, 3, 5, draw=distinct), kernel_shape=(2, 2), dilations=(2, 3)),
    case("MaxPool", "dilated_as_it_strides", x(N, 2, 5, 4, draw=distinct), kernel_shape=(2, 2),
         strides=(2, 2), dilations=(2, 2)),
    case("MaxPool", "tiled_line", x(N, 2, 7, draw=distinct), kernel_shape=(3,), strides=(3,)),
    case("MaxPool", "tiled_volume", x(N, 2, 2, 3, 4, draw=distinct), kernel_shape=(1, 2, 3),
         strides=(1, 2, 3)),
    case("MaxPool", "exact_tiles", x(N, 2, 4, 3, draw=distinct), kernel_shape=(2, 3),
         strides=(2, 3)),
    case("MaxPool", "column_major", x(N, 2, 4, 3, draw=distinct), kernel_shape=(2, 2),
         strides=(2, 1), storage_order=1),
    *_pools("AveragePool"),
    *_pools("AveragePool", count_include_pad=1),
    *_pools("AveragePool", opset=19),
    case("AveragePool", "dilated", x(N, 2, 5, 6), kernel_shape=(2, 2), dilations=(2, 3),
         pads=(1, 0, 1, 1), opset=19),
    case("AveragePool", "exact_tiles", x(N, 2, 4, 3), kernel_shape=(2, 3), strides=(2, 3)),
    *(
        case(op, f"one_window_beyond_the_image_{opset}", x(N, 2, 4, 3, draw=distinct), ceil_mode=1,
             kernel_shape=(900, 900), strides=(900, 900), opset=opset)
        for op, opset in (("AveragePool", 18), ("AveragePool", 19), ("LpPool", 18))
    ),
    case("MaxPool", "with_indices", x(N, 2, 4, 3, draw=distinct), kernel_shape=(2, 2),
         strides=(2, 1), outputs=2),
    case("MaxPool", "tiles_with_indices", x(N, 2, 4, 3, draw=distinct), kernel_shape=(2, 3),
         strides=(2, 3), outputs=2),
    *_pools("LpPool"),
    *(
        case("LpPool", f"power_{p}", x(N, 2, 4, 3, draw=distinct), kernel_shape=(2, 2), p=p)
        for p in (1, 3)
    ),
    case("LpPool", "dilated", x(N, 2, 5, 6), kernel_shape=(2, 2), dilations=(2, 3),
         pads=(1, 0, 1, 1)),
    *(
        # ONNX Runtime 1.31 has no kernel of the newer operator set.
        case("GlobalLpPool", f"power_{p}_{len(sides)}d", x(N, 2, *sides, draw=distinct), p=p,
             newest=21)
        for p, sides in ((1, (2, 3)), (2, (2, 3)), (3, (2, 3)), (2, (4,)), (2, (2, 1, 2)))
    ),
    *(
        case(op, f"{len(sides)}d", x(N, 2, *sides, draw=distinct))
        for op in ("GlobalAveragePool", "GlobalMaxPool")
        for sides in _SPATIAL.values()
    ),
]  # fmt: skip

_NORMALIZATIONS = [
    *(
        case("BatchNormalization", f"inference_{name}", x(N, 3, *sides), p(3), p(3), p(3),
             p(3, draw=positive), epsilon=0.1)
        for name, sides in (("flat", ()), ("line", (4,)), ("image", (2, 2)))
    ),
    *(
        case("BatchNormalization", f"training_{name}", x(N, 3, *sides), p(3), p(3),
              k([0, 0, 0], "float32"), k([1, 1, 1], "float32"), outputs=3, seen=(0,),
             training_mode=1, epsilon=0.1)
        for name, sides in (("flat", ()), ("line", (4,)), ("image", (2, 2)))
    ),
    case("LayerNormalization", "last", x(N, 2, 4), p(4), p(4)),
    case("LayerNormalization", "no_shift", x(N, 4), p(4), epsilon=0.1),
    case("LayerNormalization", "two_axes", x(N, 2, 3), p(2, 3), p(2, 3), axis=1),
    case("LayerNormalization", "negative_axes", x(N, 2, 3), p(2, 3), p(2, 3), axis=-2),
    case("LayerNormalization", "stretched_scale", x(N, 2, 3), p(3), p(1), axis=1),
    case("LayerNormalization", "scale_for_each_position", x(N, 2, 3), p(2, 3), p(2, 1)),
    case("LayerNormalization", "statistics", x(N, 2, 4), p(4), p(4), outputs=3),
    case("LayerNormalization", "only_mean", x(N, 4), p(4), outputs=3, seen=(1,)),
    case("LayerNormalization", "only_deviation", x(N, 4), p(4), outputs=3, seen=(2,)),
    case("LRN", "narrow", x(N, 5, 2, 3), size=3, alpha=0.7, beta=0.6, bias=1.5),
    case("LRN", "wider_than_channels", x(N, 2, 2, 2), size=5, alpha=2.0),
    case("LRN", "default", x(N, 3, 2, 1), size=1),
    case("InstanceNormalization", "image", x(N, 3, 2, 2), p(3), p(3)),
    case("InstanceNormalization", "line", x(N, 2, 4), p(2), p(2), epsilon=0.1),
    case("GroupNormalization", "scale_per_channel", x(N, 4, 2, 3), p(4), p(4), num_groups=2,
         opset=21),
    case("GroupNormalization", "scale_per_group", x(N, 6, 3), p(2), p(2), num_groups=2,
         epsilon=0.1, newest=20),
    case("GroupNormalization", "one_group", x(N, 3, 2, 2), p(3), p(3), num_groups=1, opset=21),
    case("GroupNormalization", "flat", x(N, 4), p(4), p(4), num_groups=2, opset=21),
]  # fmt: skip

CASES = (*_POOLS, *_NORMALIZATIONS)
