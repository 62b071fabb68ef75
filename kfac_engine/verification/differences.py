"""Computes directional derivatives by central differences, with an adaptive step."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from kfac_engine.verification.specimen import FloatCopy, Floats

# Steps relative to the size of the entries of a parameter, in the order in which they are tried.
# Short steps cross few kinks, long steps lose few digits.
_DOUBLE_STEPS = (2.0**-17, 2.0**-20, 2.0**-13, 2.0**-10)
_SINGLE_STEPS = (2.0**-7, 2.0**-9, 2.0**-5)
# Size of the entries of a parameter that is zero.
_SMALL = 1e-2


@dataclass(frozen=True, slots=True)
class Difference:
    """A derivative by differences."""

    value: Floats  # the derivative, in the shape of the function's value
    # Difference between the derivatives with the step and with half of it, or the jump of the
    # derivative at the parameters if that is larger.
    doubt: float
    step: float  # the step, relative to the size of the entries


def sizes(parameters: Mapping[str, Floats]) -> dict[str, float]:
    """Return the root mean square of each parameter; a small number for a parameter of zeros."""
    return {n: float(np.sqrt(np.mean(np.square(a)))) or _SMALL for n, a in parameters.items()}


def differentiate_along(
    copy: FloatCopy,
    function: Callable[[Mapping[str, Floats]], Floats],
    parameters: Mapping[str, Floats],
    direction: Mapping[str, Floats],
    *,
    absolute: float = 0.0,
    relative: float = 0.0,
) -> Difference:
    """Return the derivative of a function of the parameters along a direction of least doubt.

    The type of the copy that the function evaluates determines the steps. The entries of
    ``direction`` are as large as those of the parameter. The derivative is accepted if a step and
    half of it differ by less than ``absolute``, or by less than ``relative`` times its norm.
    """
    center = function(parameters)

    def slopes(step: float) -> tuple[Floats, Floats]:
        """Return the central difference, and the difference of the one-sided ones."""
        ahead, behind = (
            function({**parameters, **{n: parameters[n] + s * direction[n] for n in direction}})
            for s in (step, -step)
        )
        return (ahead - behind) / (2 * step), (ahead - 2 * center + behind) / step

    best: Difference | None = None
    for step in _DOUBLE_STEPS if copy.is_double else _SINGLE_STEPS:
        (long, bend), (short, half) = slopes(step), slopes(step / 2)
        # If the step is halved, the gap between the two one-sided differences halves for a smooth
        # function, and stays the same at a kink.
        jump = half - bend / 2
        doubt = max(float(np.linalg.norm(long - short)), float(np.linalg.norm(jump)))
        if best is None or doubt < best.doubt:
            best = Difference(np.asarray(short), doubt, step / 2)
        if best.doubt <= absolute + relative * float(np.linalg.norm(best.value)):
            break
    assert best is not None, "there are steps"
    return best
