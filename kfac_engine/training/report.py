"""The report of a training step."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class StepReport:
    """The result of ``step`` of an optimizer.

    Attributes:
        loss: Loss of the batch before the update, with ``penalty``; NaN if the batch was skipped.
        learning_rate: Learning rate of the step, times ``scale``.
        momentum: Momentum of the step; None for an optimizer without momentum.
        damping: Damping λ of the step; None for optimizers without curvature.
        reduction_ratio: Change of the loss divided by the change that the quadratic model
            predicts; None in steps without an adaptation of the damping.
        predicted_change: Change of the loss that the quadratic model predicts; None in steps
            without a quadratic model.
        penalty: The part ``½ l2 ‖θ‖²`` of the loss.
        refreshed: Names of the factors whose inverses the step recomputed, such as
            ``"fc0.weight: A"``; ``seconds["inverses"]`` is the time of the refresh.
        skipped: Whether the batch had no effect, because it yields NaN or infinity.
        burn_in: Whether the batch updated statistics only.
        rolled_back: Whether ``fit`` restored earlier parameters after the step.
        seconds: Stage of the step to its wall time: ``"gradients"``, ``"statistics"``,
            ``"inverses"``, ``"precondition"``, ``"curvature"`` (products of the quadratic model),
            ``"damping"`` (a second loss), and ``"update"`` for the arithmetic of the optimizer.
    """

    loss: float
    learning_rate: float
    momentum: float | None = None
    damping: float | None = None
    reduction_ratio: float | None = None
    predicted_change: float | None = None
    penalty: float = 0.0
    refreshed: tuple[str, ...] = ()
    skipped: bool = False
    burn_in: bool = False
    rolled_back: bool = False
    seconds: Mapping[str, float] = field(default_factory=dict)
