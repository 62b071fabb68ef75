"""The backward pass of a batch: gradients of parameters, and with them what statistics read.

In mode ``empirical`` statistics read the gradient of the reported loss, times one number. Then one
backward pass serves both. It carries the gradients as statistics read them, which are the many;
those of parameters are divided by the number in place.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite

from kfac_engine._types import Array
from kfac_engine.errors import NonFiniteError
from kfac_engine.losses.objective import Objective
from kfac_engine.runtime.trace import Trace


@dataclass(frozen=True, slots=True)
class BackwardResult:
    """What a backward pass brings.

    Attributes:
        loss: The reduced loss.
        gradients: Parameter to gradient of the loss, the caller's own.
        outputs: Value to the gradient that statistics of mode ``empirical`` read; None where that
            takes a backward pass of its own.
    """

    loss: float
    gradients: dict[str, Array]
    outputs: dict[str, Array] | None = None


def reported_loss(trace: Trace, objective: Objective) -> float:
    """The reduced loss of a batch on its targets, both checked.

    Args:
        trace: The batch.
        objective: The loss.

    Returns:
        The loss, finite.

    Raises:
        InputError: Targets are missing, or not possible observations.
        NonFiniteError: The loss is NaN or infinite.
    """
    loss = objective.value(trace)
    if not isfinite(loss):
        raise NonFiniteError(
            f"the loss of the batch is {loss:g}; check the targets, the inputs and the parameters "
            f"for huge numbers."
        )
    return loss


def run_backward(
    trace: Trace,
    objective: Objective,
    parameters: Sequence[str],
    outputs: Sequence[str] | None = None,
) -> BackwardResult:
    """Differentiate the loss of a batch.

    Args:
        trace: The batch.
        objective: The loss.
        parameters: Names.
        outputs: Values whose gradients statistics of mode ``empirical`` read; None in other modes,
            and where no statistics are due.

    Returns:
        Gradients of the parameters; those of the outputs too if one number relates them.

    Raises:
        NonFiniteError: The loss is NaN or infinite.
    """
    loss = reported_loss(trace, objective)
    ratio = None if outputs is None else objective.fisher_ratio(trace)
    if outputs is None or ratio is None:
        return BackwardResult(loss, trace.writable_vjp(objective.cotangents(trace), parameters))
    cotangents = objective.cotangents(trace, times=ratio)
    gradients, found = trace.vjp_pair(cotangents, parameters, outputs)
    for gradient in gradients.values():
        gradient *= 1 / ratio
    return BackwardResult(loss, gradients, found)
