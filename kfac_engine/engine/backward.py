"""The backward pass of a batch: gradients of parameters and of the values that statistics read.

In the mode ``empirical`` statistics read gradients of the reported loss, times a number. One
backward pass then serves both. It computes the gradients with this number, because statistics read
more of them; the gradients of parameters are divided by it in place.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from math import isfinite

from kfac_engine._types import Array
from kfac_engine.errors import KfacError, NonFiniteError
from kfac_engine.losses.objective import Objective, Observation, Residuals
from kfac_engine.runtime.model import OnnxModel
from kfac_engine.runtime.nonfinite import first_nonfinite
from kfac_engine.runtime.trace import Trace


@dataclass(frozen=True, slots=True)
class BackwardResult:
    """Loss and gradients of a batch.

    Attributes:
        loss: The reduced loss.
        gradients: Parameter to gradient of the loss, in new arrays.
        outputs: Value to the gradient that statistics of the mode ``empirical`` read; None if
            statistics need a separate backward pass.
        buffers: New running statistics, if they are computed.
        notes: Notes on the axes of the batch.
    """

    loss: float
    gradients: dict[str, Array]
    outputs: dict[str, Array] | None = None
    buffers: Mapping[str, Array] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def plus(self, other: "BackwardResult") -> "BackwardResult":
        """Return the sum of the losses and gradients of two parts; the arrays are reused."""
        for name, gradient in other.gradients.items():
            self.gradients[name] += gradient
        return BackwardResult(self.loss + other.loss, self.gradients)

    def times(self, factor: float) -> "BackwardResult":
        """Return the product of loss and gradients with a number; the arrays are reused."""
        for gradient in self.gradients.values():
            gradient *= factor
        return BackwardResult(self.loss * factor, self.gradients)


def reported_loss(trace: Trace, objective: Objective, observation: Observation) -> float:
    """Return the reduced loss of a batch; a loss that is NaN or infinite raises NonFiniteError."""
    return _finite(objective.value(trace, observation))


def _finite(loss: float) -> float:
    if not isfinite(loss):
        raise NonFiniteError(
            f"the loss of the batch is {loss:g}; check the targets, the inputs and the parameters "
            f"for huge numbers."
        )
    return loss


def run_backward(
    trace: Trace,
    objective: Objective,
    observation: Observation,
    parameters: Sequence[str],
    outputs: Sequence[str] | None = None,
    residuals: Residuals | None = None,
) -> BackwardResult:
    """Compute the loss of a batch and its gradients.

    Args:
        trace: The batch.
        objective: The loss.
        observation: The targets of the batch.
        parameters: Names.
        outputs: Values whose gradients statistics of the mode ``empirical`` read; None in other
            modes, and if no statistics are due.
        residuals: Receives the squares of the gradients of the predictions.

    Returns:
        Gradients of the parameters. Gradients of the outputs are included if the ratio between
        the two is the same for all losses and predictions.
    """
    ratio = None if outputs is None else objective.fisher_ratio(observation)
    times = ratio or 1.0
    loss, cotangents = objective.value_and_cotangents(trace, times, observation, residuals)
    _finite(loss)
    if outputs is None or ratio is None:
        return BackwardResult(loss, trace.writable_vjp(cotangents, parameters))
    gradients, read = trace.vjp_pair(cotangents, parameters, outputs)
    for gradient in gradients.values():
        gradient *= 1 / ratio
    return BackwardResult(loss, gradients, read)


@contextmanager
def origin_named(model: OnnxModel, trace: Trace, objective: Objective) -> Iterator[None]:
    """Name the first node that is not finite in a ``NonFiniteError`` of the block.

    The error does not change if no node is found.
    """
    try:
        yield
    except NonFiniteError as error:
        origin, cotangents = "", None
        with suppress(KfacError):
            cotangents = objective.cotangents(trace)
        with suppress(KfacError):
            origin = first_nonfinite(model, trace, cotangents, tuple(model.parameters))
        if not origin:
            raise
        raise NonFiniteError(f"{error} {origin}") from error
