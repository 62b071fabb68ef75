"""Cases for what places, selects and counts elements, and for whole numbers with a scale."""

import numpy as np

from tests.autodiff.harness import N, Operand, case, distinct, flags, k, p, x


def _given(value: object, dtype: str = "int64") -> Operand:
    return Operand(value=np.asarray(value, dtype), active=False)


def _between(rng: np.random.Generator, sides: tuple[int, ...]) -> np.ndarray:
    """Ties neither with itself nor with ``distinct``."""
    return distinct(rng, sides) + 0.05


_SCATTERED = [
    *(
        case("ScatterElements", f"{how}_{label}", x(N, 4, draw=distinct), places,
             Operand(sides, _between), axis=axis, reduction=how)
        for how in ("mul", "max", "min")
        for label, sides, places, axis in (
            ("twice", (1, 3), k([[3, 3, 1]]), 1),
            ("negative", (1, 2), k([[-1, 0]]), -1),
            ("first_axis", (2, 4), _given([[0, -1, 0, 0], [0, 0, -1, 0]]), 0),
        )
    ),
    *(
        case("ScatterND", f"{how}_{label}", p(4, 2, draw=distinct), places,
             Operand(sides, _between), reduction=how)
        for how in ("mul", "max", "min")
        for label, sides, places in (
            ("rows", (3, 2), k([[3], [3], [-4]])),
            ("elements", (2,), k([[3, 0], [1, -1]])),
        )
    ),
    case("ScatterElements", "mul_zeros", x(draw=lambda *_: np.array([0.0, 0.0, 2.0, 0.0, 3.0])),
         k([0, 1, 2, 3, 4, 4]), x(draw=lambda *_: np.array([0.0, 2.0, 0.0, 3.0, 0.0, 0.0])),
         reduction="mul"),
    *(
        case("TensorScatter", f"{label}_{mode}", x(N, 2, 4, 2), x(N, 2, *sides), *start, opset=24,
             mode=mode, **attributes)
        for label, sides, start, attributes, modes in (
            ("start_of_each", (2, 2), (Operand((N,), lambda _, s: np.arange(s[0]) % 3,
                                               active=False),), {}, ("linear", "circular")),
            ("wrapped", (2, 2), (Operand((N,), lambda _, s: np.full(s, 3), active=False),), {},
             ("circular",)),
            ("no_start", (3, 2), (), {}, ("linear",)),
            ("axis", (4, 1), (), {"axis": -1}, ("linear",)),
        )
        for mode in modes
    ),
]  # fmt: skip

_SELECTED = [
    case("Compress", "flat", x(N, 3), k([True, False, True], "bool")),
    case("Compress", "axis", x(N, 3), k([False, True, True], "bool"), axis=1),
    case("Compress", "negative_axis", x(N, 2, 3), k([False, True], "bool"), axis=-2),
    case("Compress", "fed", x(4, N), flags(4), axis=0),
    case("ReverseSequence", "default", x(4, N, 2), Operand((N,), lambda _, s: 4 - np.arange(s[0]),
         active=False)),
    case("ReverseSequence", "batch_first", x(N, 4), Operand((N,), lambda _, s: 1 + np.arange(s[0]),
         active=False), batch_axis=0, time_axis=1),
    case("Unique", "flat", x(N, 3, draw=distinct)),
    case("Unique", "unsorted", x(N, 3, draw=distinct), outputs=4, seen=(0,), sorted=0),
    case("Unique", "repeated_column", x(N, 3, draw=distinct), axis=1),
    case("Unique", "rows", x(N, 3, draw=distinct), axis=-2, sorted=0),
    case("OneHot", "last_axis", _given([[0, 2], [-1, 5]]), k(3), p(2)),
    case("OneHot", "first_axis", Operand((N,), lambda _, s: np.arange(s[0]), active=False), k(4),
         p(2), axis=0),
    case("Range", "steps", *(Operand(draw=lambda *_, v=v: v) for v in (0.5, 2.3, 0.25))),
    case("Range", "downwards", Operand(draw=lambda *_: 1.0), k(-1, "float32"),
         Operand(draw=lambda *_: -0.3)),
]  # fmt: skip

_WHOLE = k(np.arange(-7, 8).reshape(3, 5), "int8")
_QUANTISED = [
    case("DequantizeLinear", "one_scale", _WHOLE, p(), opset=19),
    case("DequantizeLinear", "one_scale_in_a_row", _WHOLE, p(1), k([2], "int8"), opset=19),
    case("DequantizeLinear", "fed_images", Operand((N, 2, 3), lambda r, s:
         r.integers(0, 256, s, "uint8"), active=False), p(2), k([3, 128], "uint8"),
         opset=19),
    case("DequantizeLinear", "first_axis", _WHOLE, p(3), k([1, -2, 3], "int8"), axis=0, opset=19),
    case("DequantizeLinear", "last_axis", _WHOLE, p(5), axis=-1, opset=19),
    case("DequantizeLinear", "int32", k([[5, -70000]], "int32"), p(2), opset=19),
    case("DequantizeLinear", "blocks", _WHOLE, p(3, 3), k(np.ones((3, 3)), "int8"), axis=1,
         block_size=2, opset=21),
    case("DequantizeLinear", "whole_blocks", Operand((N, 4, 2), lambda r, s:
         r.integers(-9, 9, s, "int8"), active=False), x(N, 2, 2), axis=-2, block_size=2, opset=21),
]  # fmt: skip

CASES = (*_SCATTERED, *_SELECTED, *_QUANTISED)
