"""Cases for operators that move, pick and reduce."""

import numpy as np

from tests.autodiff.harness import N, Operand, case, distinct, indices, k, normal, p, positive, x

_NONE = k([])


def _given(draw: object, *sides: int | str) -> Operand:
    return Operand(sides, draw, active=False)  # type: ignore[arg-type]


_RELABELLED = [
    case("Identity", "any", x(N, 3)),
    case("Cast", "same_type", x(N, 3), to=1),
    case("CastLike", "same_type", x(N, 3), k([1], "float32")),
    case("Dropout", "inference", x(N, 3)),
    case("Dropout", "frozen_off", x(N, 3), k(0.3, "float32"), k(False, "bool")),
    case("Dropout", "with_mask_output", x(N, 3), outputs=2),
    case("Flatten", "default", x(N, 2, 3)),
    case("Flatten", "last", x(N, 2, 3), axis=-1),
    case("Flatten", "all_in_columns", x(N, 2, 3), axis=0),
    case("Flatten", "nothing", x(N, 3, 0)),
    case("Reshape", "merged", x(N, 2, 3), k([-1, 6])),
    case("Reshape", "copied_side", x(N, 6), k([0, 3, 2])),
    case("Reshape", "nothing_of_nothing", x(N, 3, 0), k([0, -1])),
    case("Squeeze", "all", x(N, 1, 3, 1), k([1, 3])),
    case("Squeeze", "negative", x(N, 3, 1), k([-1])),
    case("Squeeze", "no_axes", x(1, 3, 1, 2)),
    case("Unsqueeze", "two", x(N, 3), k([0, -1])),
    case("Transpose", "default", x(N, 2, 3)),
    case("Transpose", "cycle", x(N, 2, 3), perm=(1, 2, 0)),
    case("DepthToSpace", "columns_last", x(N, 8, 2, 3), blocksize=2),
    case("DepthToSpace", "channels_first", x(N, 8, 2, 3), blocksize=2, mode="CRD"),
    case("SpaceToDepth", "any", x(N, 2, 4, 6), blocksize=2),
]

_JOINED = [
    case("Concat", "channels", x(N, 2, 2), x(N, 1, 2), x(N, 3, 2), axis=1),
    case("Concat", "batch", x(N, 3), p(2, 3), axis=0),
    case("Concat", "negative", x(N, 1, 3), x(N, 1, 2), axis=-1),
    case("Concat", "one", x(N, 3), axis=1),
    case("Concat", "with_nothing", x(N, 0, 2), x(N, 3, 2), axis=1),
    case("Concat", "twice", p(2), p(2), axis=0),
    case("Split", "sizes", x(N, 5), k([2, 3]), outputs=2, axis=1),
    case("Split", "one_unused", x(N, 6), k([2, 1, 3]), outputs=3, seen=(0, 2), axis=1),
    case("Split", "number", x(N, 5, 2), outputs=2, axis=-2, num_outputs=2),
    case("Split", "first_axis", x(4, N), outputs=2, num_outputs=2),
    case("Expand", "new_axes", x(N, 3), k([2, 1, 1])),
    case("Expand", "stretched", x(N, 1, 3), k([1, 4, 1])),
    case("Expand", "parameter", p(1, 1, 3), k([2, 4, 3])),
    case("Expand", "shorter_shape", x(N, 2, 1), k([1])),
    case("Expand", "scalar", p(), k([2, 3])),
    case("Tile", "any", x(N, 2, 3), k([2, 1, 3])),
    case("Tile", "once", x(N, 2), k([1, 1])),
]

_BIG = 2**63 - 1
_CUT = [
    case("Slice", "middle", x(N, 5), k([1]), k([4]), k([1])),
    case("Slice", "two_axes", x(N, 5, 4), k([1, 0]), k([4, 2]), k([1, -1])),
    case("Slice", "negative_bounds", x(N, 5), k([-4]), k([-1]), k([-1])),
    case("Slice", "clamped", x(N, 5), k([-99]), k([99]), k([1])),
    case("Slice", "to_the_end", x(N, 5), k([2]), k([_BIG]), k([1]), k([1])),
    case("Slice", "no_axes", x(N, 5), k([0, 1]), k([9, 3])),
    case("Slice", "int32_bounds", x(N, 5), k([1], "int32"), k([3], "int32"), k([1], "int32")),
    case("Slice", "empty", x(N, 5), k([4]), k([2]), k([1])),
    case("Slice", "strided", x(N, 5), k([1]), k([5]), k([1]), k([2])),
    case("Slice", "reversed", x(N, 5, 2), k([-1]), k([-_BIG]), k([1]), k([-1])),
    case("Slice", "strided_and_plain", x(N, 5, 4), k([3, 1]), k([0, 3]), k([1, 2]), k([-2, 1])),
    case("Slice", "fed_bounds", x(N, 5), _given(lambda *_: np.array([1])), k([4]), k([1])),
    case("Slice", "fed_steps", x(N, 5), k([0]), k([5]), k([1]), _given(lambda *_: np.array([2]))),
    case("Pad", "border", x(N, 3, 2), k([0, 1, 2, 0, 3, 1]), p()),
    case("Pad", "no_value", x(N, 3), k([0, 1, 0, 2])),
    case("Pad", "axes", x(N, 3, 2), k([1, 2]), None, k([-2])),
    case("Pad", "cropped", x(N, 5, 4), k([0, -1, 2, 0, -2, -1])),
    case("Pad", "fed", x(N, 3), _given(lambda *_: np.array([0, 1, 0, -1]), 4), p()),
    case("Pad", "reflect", x(N, 4), k([0, 2, 0, 3]), mode="reflect"),
    case("Pad", "edge", x(N, 3), k([0, 2, 0, 1]), mode="edge"),
    case("Pad", "edge_axes", x(N, 3, 2), k([1, 2]), None, k([-2]), mode="edge"),
    case("Pad", "wrap", x(N, 3), k([0, 2, 0, 1]), mode="wrap", opset=19),
]  # fmt: skip

_PICKED = [
    case("Gather", "embedding", p(5, 2), indices(5, N, 3)),
    case("Gather", "int32", p(5, 2), indices(5, N, 3, dtype="int32")),
    case("Gather", "vector", p(5, 2), indices(5, N)),
    case("Gather", "first_token", x(N, 3, 2), k(0), axis=1),
    case("Gather", "last_axis", x(N, 3, 4), indices(4, 2, 3), axis=-1),
    case("Gather", "middle_axis", x(N, 3, 2), indices(3, N), axis=1),
    case("Gather", "single_example", x(N, 3), k(-1)),
    case("Gather", "scalar_on_the_last_axis", x(N, 2, 3), k(-2), axis=-1),
    case("Gather", "one_of_a_vector", p(4), k(3)),
    case("GatherElements", "last_axis", x(N, 4), indices(4, N, 6), axis=-1),
    case("GatherElements", "first_axis", p(4, 3), indices(4, N, 2)),
    case("GatherND", "elements", p(3, 4), indices(3, N, 2)),
    case("GatherND", "rows", p(3, 4), indices(3, N, 2, 1)),
    case("GatherND", "batched", x(N, 4, 2), indices(4, N, 1), batch_dims=1),
    case("GatherND", "two_batch_axes", x(N, 2, 4, 3), indices(4, N, 2, 1), batch_dims=2),
    case("GatherND", "grid_of_a_batch", x(N, 4, 3), indices(3, N, 2, 2), batch_dims=1),
    case("ScatterElements", "replace", x(N, 4), k([[3, 1]]), p(1, 2), axis=1),
    case("ScatterElements", "add", x(N, 4), k([[3, 3]]), p(1, 2), axis=1, reduction="add"),
    case("ScatterND", "replace", p(4, 2), k([[3], [0]]), p(2, 2)),
    case("ScatterND", "add", p(4, 2), k([[3], [3]]), p(2, 2), reduction="add"),
    case("TopK", "last_axis", x(N, 5, draw=distinct), k([2]), outputs=2),
    case("TopK", "smallest", x(4, N, draw=distinct), k([2]), outputs=2, axis=0, largest=0),
    case("TopK", "middle_axis", x(N, 4, 2, draw=distinct), k([3]), outputs=2, axis=-2),
]

_DRAWS = {"ReduceLogSum": positive, "ReduceL1": distinct, "ReduceMax": distinct,
          "ReduceMin": distinct}  # fmt: skip
_REDUCED = [
    *(
        case(op, label, x(N, 2, 3, draw=_DRAWS.get(op, normal)), *axes, **attributes)
        for op in (
            "ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin", "ReduceProd", "ReduceL1",
            "ReduceL2", "ReduceSumSquare", "ReduceLogSum", "ReduceLogSumExp",
        )
        for label, axes, attributes in (
            ("last", (k([-1]),), {}),
            ("two_dropped", (k([0, 2]),), {"keepdims": 0}),
            ("all", (), {"keepdims": 0}),
            ("no_axes", (_NONE,), {}),
        )
    ),
    *(
        case(op, label, x(N, 3), *axes, noop_with_empty_axes=1)
        for op in ("ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin", "ReduceProd")
        for label, axes in (("noop", ()), ("noop_with_no_axes", (_NONE,)))
    ),
    case("ReduceSum", "noop_with_axes", x(N, 3), k([1]), noop_with_empty_axes=1),
    case("ReduceSum", "of_a_scalar", p()),
    case("ReduceMax", "of_a_scalar", p(), keepdims=0),
    case("ReduceMean", "five_axes", x(N, 2, 2, 1, 3), k([-1, 1]), keepdims=0),
    case("ReduceSum", "fed_axes", x(N, 2, 3), _given(lambda *_: np.array([1]), 1), keepdims=0),
    case("ReduceMean", "fed_axes", x(N, 2, 3), _given(lambda *_: np.array([1, 2]), 2)),
    case("ReduceProd", "one_zero", x(3, draw=lambda *_: np.array([2.0, 0.0, 3.0]))),
    case("ReduceProd", "two_zeros", x(3, draw=lambda *_: np.array([0.0, 0.0, 3.0]))),
]  # fmt: skip

CASES = (*_RELABELLED, *_JOINED, *_CUT, *_PICKED, *_REDUCED)
