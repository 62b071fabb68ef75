"""What the engine gives back."""

from dataclasses import dataclass

from kfac_engine._types import Array


@dataclass(frozen=True, slots=True)
class Stage:
    """What one part of a step took.

    Attributes:
        name: ``"forward"``, ``"backward"``, ``"statistics"``, ``"inverses"`` or
            ``"precondition"``.
        seconds: Wall time.
        nbytes: Resident memory at its highest above that before; 0 where the system does not tell.
    """

    name: str
    seconds: float
    nbytes: int


@dataclass(frozen=True, slots=True)
class Result:
    """Gradients of one batch; the arrays belong to the caller.

    Attributes:
        loss: The loss under the engine's reduction; by default the mean over the batch.
        gradients: Parameter name to gradient of ``loss``, in the parameter's shape.
        natural_gradients: Parameter name to preconditioned gradient; empty where none was asked
            for.
        notes: What a loss reads in place of the output that it was put on, in words.
        stages: What each part of the step took; empty unless that was asked for.
    """

    loss: float
    gradients: dict[str, Array]
    natural_gradients: dict[str, Array]
    notes: tuple[str, ...] = ()
    stages: tuple[Stage, ...] = ()
