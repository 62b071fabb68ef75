"""Defines the results of an engine's calls."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import sqrt

import numpy as np

from kfac_engine._types import Array
from kfac_engine.arguments import check_positive
from kfac_engine.errors import InputError
from kfac_engine.graph.analysis.exporter_changes import Tie
from kfac_engine.summary import Summarized, Summary, Table, counted, dimensions

KL_CLIP = 0.003
_PART = 1 << 20  # numbers


@dataclass(frozen=True, slots=True)
class Stage:
    """Time and memory of one part of a step."""

    # ``"forward"``, ``"backward"``, ``"statistics"``, ``"inverses"`` or ``"precondition"``.
    name: str
    seconds: float  # wall time
    # Largest increase of the resident memory, in bytes; 0 if the system does not report it.
    nbytes: int


@dataclass(frozen=True, slots=True, repr=False)
class Result(Summarized):
    """Gradients of one batch; the arrays belong to the caller.

    Attributes:
        loss: The loss under the engine's reduction; by default the mean over the batch.
        gradients: Gradients of ``loss`` by parameter name, in the parameter's shape; under the
            distribution ``"shard"``, only gradients that the process owns, unless ``step`` has
            gathered all.
        natural_gradients: Preconditioned gradients by parameter name; empty after ``gradients``.
        notes: Sentences on the values that losses read in place of outputs, on parameters that are
            not trained because of rounding, and on interpretations that may be wrong.
        stages: Time and memory of each part of the step; empty without ``profile=True``.
        ties: Weights that are trained as one, with ``tie_weights=True``. The arrays of a copy
            repeat the arrays of the weight.
    """

    loss: float
    gradients: dict[str, Array]
    natural_gradients: dict[str, Array]
    notes: tuple[str, ...] = ()
    stages: tuple[Stage, ...] = ()
    ties: tuple[Tie, ...] = ()

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
            InputError: An argument is not positive, or the result lacks natural gradients or, under
                the distribution ``"shard"``, gradients.
        """
        check_positive("learning_rate", learning_rate)
        check_positive("kl_clip", kl_clip)
        if not self.natural_gradients:
            raise InputError(
                "the result has no natural gradients; use one of engine.step or precondition."
            )
        natural_gradients = self._without_copies(self.natural_gradients)
        if not natural_gradients.keys() <= self.gradients.keys():
            raise InputError(
                "the result has only the gradients that this process owns; call "
                'engine.step with gradients="all".'
            )
        product = sum(
            float((self.gradients[name].astype(np.float64) * natural).sum())
            for name, natural in natural_gradients.items()
        )
        return min(learning_rate, sqrt(kl_clip / product)) if product > 0 else learning_rate

    def _summary(self) -> Summary:
        facts = {
            "loss": f"{self.loss:.6g}",
            "gradients": _total(self._without_copies(self.gradients)),
            "natural gradients": _total(self._without_copies(self.natural_gradients)),
            "notes": len(self.notes),
        }
        names = self.gradients or self.natural_gradients
        heads = ("parameter", "shape", "norm of gradient", "norm of natural gradient")
        rows = ((name, dimensions(names[name].shape), *self._norms(name)) for name in names)
        shown = {name: fact for name, fact in facts.items() if fact}
        return Summary("Result", shown, Table(heads, rows, len(names), "parameters"))

    def _without_copies(self, arrays: Mapping[str, Array]) -> dict[str, Array]:
        copies = {tie.copy for tie in self.ties}
        return {name: array for name, array in arrays.items() if name not in copies}

    def _norms(self, name: str) -> tuple[str, str]:
        sides = (self.gradients, self.natural_gradients)
        first, second = (
            f"{sqrt(_square(side[name])):.4g}" if name in side else "–" for side in sides
        )
        return first, second


def _total(arrays: Mapping[str, Array]) -> str:
    """Return number, size and norm of arrays; empty for none."""
    if not arrays:
        return ""
    size, norm = sum(a.size for a in arrays.values()), sqrt(sum(map(_square, arrays.values())))
    return f"{counted(len(arrays), 'array')} of {counted(size, 'number')}, norm {norm:.4g}"


def _square(array: Array) -> float:
    """Return the sum of squares in float64, converted in parts of bounded size."""
    flat, total = array.reshape(-1), 0.0
    for start in range(0, len(flat), _PART):
        part = flat[start : start + _PART].astype(np.float64)
        total += float(part @ part)
    return total
