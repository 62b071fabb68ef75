"""Short-time Fourier transforms, rewritten: the same values, and true gradients."""

import pytest

from tests.autodiff.harness import N, case, k, p, x
from tests.autodiff.lowering_checks import BATCHES, check_gradients, check_values

_FORMS = [
    case("STFT", f"{name}_{'half' if half else 'whole'}_opset{opset}", *operands, onesided=half,
         opset=opset)
    for name, operands in (
        ("window", (x(N, 7, 1), k(2), p(4))),
        ("odd_window", (x(N, 8, 1), k(3, "int32"), p(5), k(5, "int32"))),
        ("no_window", (x(N, 7, 1), k(1), None, k(3))),
        ("complex", (x(N, 6, 2), k(2), p(4), k(4))),
    )
    for half in (0, 1)
    for opset in (18, 20)
]  # fmt: skip
# The reference does not know signals without an axis for their parts.
_FLAT = [case("STFT", "flat", x(N, 7), k(2), p(4))]


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("tested", [*_FORMS, *_FLAT], ids=str)
def test_lowered_transform_has_values_of_transform(tested, batch):
    check_values(tested, batch)


@pytest.mark.parametrize("tested", _FORMS, ids=str)
def test_lowered_transform_gradients_equal_finite_differences(tested):
    check_gradients(tested)
