"""Cases for Fourier transforms, with the axis as attribute and as operand."""

from itertools import product

from tests.autodiff.harness import N, case, k, x

_KINDS = {
    "real": ((4,), 1, {}),
    "complex": ((5,), 2, {}),
    "inverse_real": ((5,), 1, {"inverse": 1}),
    "inverse": ((4,), 2, {"inverse": 1}),
    "onesided_even": ((4,), 1, {"onesided": 1}),
    "onesided_odd": ((5,), 1, {"onesided": 1}),
    "real_result": ((4,), 2, {"onesided": 1, "inverse": 1}),
}
_LENGTHS = {"as_it_is": None, "cut": 3, "filled": 7, "filled_even": 8}


def _transforms(name, length, opset):
    sides, parts, attributes = _KINDS[name]
    points = None if _LENGTHS[length] is None else k(_LENGTHS[length])
    operands = (x(N, *sides, 2, parts), points)
    label = f"{name}_{length}_opset{opset}"
    if opset < 20:
        return case("DFT", label, *operands, newest=19, axis=1, **attributes)
    return case("DFT", label, *operands, k(1), opset=20, **attributes)


CASES = (
    *(
        _transforms(name, length, opset)
        for name, length, opset in product(_KINDS, _LENGTHS, (18, 20))
        # ONNX Runtime cannot leave out frequencies on the way to a real signal.
        if (name, length) != ("real_result", "cut")
    ),
    case("DFT", "default_axis_opset18", x(N, 3, 2), newest=19),
    case("DFT", "default_axis_opset20", x(N, 3, 2), opset=20),
    case("DFT", "last_axis", x(N, 2, 3, 1), None, k(-2), opset=20, onesided=1),
    case("DFT", "first_axis", x(3, N, 2), axis=-3, newest=19, inverse=1),
    case("DFT", "one_point", x(N, 1, 2), k(1), axis=1, newest=19, inverse=1, onesided=1),
)
