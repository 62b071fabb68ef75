"""The results of the engine's calls."""

from dataclasses import dataclass
from math import sqrt

import numpy as np

from kfac_engine._types import Array
from kfac_engine.arguments import positive
from kfac_engine.errors import InputError

KL_CLIP = 0.003


@dataclass(frozen=True, slots=True)
class Stage:
    """Time and memory of one part of a step.

    Attributes:
        name: ``"forward"``, ``"backward"``, ``"statistics"``, ``"inverses"`` or
            ``"precondition"``.
        seconds: Wall time.
        nbytes: Largest increase of the resident memory, in bytes; 0 if the system does not report
            it.
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
        natural_gradients: Parameter name to preconditioned gradient; empty after ``gradients``.
        notes: Sentences on the values that losses read in place of outputs, on parameters that are
            not trained because of rounding, and on interpretations that may be wrong.
        stages: Time and memory of each part of the step; empty without ``profile=True``.
    """

    loss: float
    gradients: dict[str, Array]
    natural_gradients: dict[str, Array]
    notes: tuple[str, ...] = ()
    stages: tuple[Stage, ...] = ()

    def clipped_rate(self, learning_rate: float = 1.0, kl_clip: float = KL_CLIP) -> float:
        """Return the learning rate, or a smaller one that bounds the change of the predictions.

        The step ``−η Δ`` along the natural gradient ``Δ = F⁻¹ g`` changes the model's predictions
        by a Kullback–Leibler divergence of ``½ η² Δᵀ F Δ = ½ η² ⟨Δ, g⟩``, to second order.
        The largest ``η`` with ``η² ⟨Δ, g⟩ ≤ kl_clip`` bounds the step (Ba, Grosse & Martens 2017,
        "Distributed second-order optimization using Kronecker-factored approximations",
        section 5). ``F`` is the damped Fisher matrix under the engine's reduction: with ``"sum"``
        the divergence of all examples is bounded, otherwise their mean.

        Args:
            learning_rate: The largest learning rate.
            kl_clip: Bound of ``η² ⟨Δ, g⟩``.

        Returns:
            ``min(learning_rate, sqrt(kl_clip / ⟨Δ, g⟩))``.

        Raises:
            InputError: An argument is not positive, or the result has no natural gradients.
        """
        positive("learning_rate", learning_rate)
        positive("kl_clip", kl_clip)
        if not self.natural_gradients:
            raise InputError(
                "the result has no natural gradients; use one of engine.step or precondition."
            )
        product = sum(
            float((self.gradients[name].astype(np.float64) * natural).sum())
            for name, natural in self.natural_gradients.items()
        )
        return min(learning_rate, sqrt(kl_clip / product)) if product > 0 else learning_rate
