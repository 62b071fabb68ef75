"""Defines losses that the file computes, as losses on the file's output.

An output with one number for each example is a loss whose predictions are the examples. A single
number for the whole batch can be minimized only.
"""

from collections.abc import Mapping
from math import prod
from typing import ClassVar, NoReturn

import numpy as np

from kfac_engine._types import Array, Values
from kfac_engine.backend.namespace import array_module
from kfac_engine.errors import InputError, UnsupportedError
from kfac_engine.losses.base import LossWithoutProducts
from kfac_engine.losses.checks import Named, read_input, require_predictions
from kfac_engine.losses.observed import Observed


class OutputLoss(LossWithoutProducts):
    """The sum of the entries of an output; it has no targets and no distribution.

    The mode ``empirical`` estimates its curvature from the gradients of single examples. The mode
    ``gradients`` gives the gradient of each entry a random sign, which makes it independent of the
    samples of the other losses: the estimate is that of single entries. All other modes need a
    distribution of targets. The arguments of a loss after ``output`` are not used.
    """

    min_rank: ClassVar[int] = 0
    ggn_equals_fisher: ClassVar[bool] = False

    def __init__(
        self,
        output: str,
        targets: str | None = None,
        seed: int | None = None,
        *,
        class_axis: int = -1,
    ) -> None:
        super().__init__((output,), None, seed, -1)

    def observe(self, values: Values, *, targets: bool = True) -> Observed:
        array = read_input(values, self.inputs[0])
        if array.ndim:
            require_predictions(self.inputs[0], array, 1, -1)
        return self.weigh(values, None, None)

    def weigh(self, values: Values, labels: Array | None, counts: Array | None) -> Observed:
        array = read_input(values, self.inputs[0])
        return Observed(array, None, array, None, prod(array.shape))

    def read(self, values: Named, *, targets: bool = False) -> dict[str, Array]:
        return {self.inputs[0]: read_input(values, self.inputs[0])}

    def positions(self, values: Values) -> int:
        shape = values[self.inputs[0]].shape
        return prod(shape[1:])

    def negative_log_probs(self, values: Values, targets: Array) -> Array:
        return values[self.inputs[0]]

    def gradient_of(self, values: Values, targets: Array) -> dict[str, Array]:
        array = values[self.inputs[0]]
        return {self.inputs[0]: array_module(array).ones_like(array)}

    def expected_squares(self, values: Values, weights: Array | None = None) -> float:
        return 0.0  # unknown without a distribution

    def check_target_array(self, values: Values, targets: Array) -> None:
        raise InputError(
            f"the file computes the loss '{self.inputs[0]}' itself, so the loss takes no targets; "
            f"pass the labels among the inputs."
        )

    def hessian(self, values: Values, v: Mapping[str, Array]) -> dict[str, Array]:
        return {name: array_module(array).zeros_like(array) for name, array in v.items()}

    def sampled_gradient(self, values: Values, rng: np.random.Generator) -> dict[str, Array]:
        array = values[self.inputs[0]]
        signs = rng.integers(0, 2, array.shape) * 2 - 1
        return {self.inputs[0]: array_module(array).asarray(signs, dtype=array.dtype)}

    def sample(self, values: Values, rng: np.random.Generator) -> Array:
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise self.without_distribution()

    def without_distribution(self) -> UnsupportedError:
        """Return the error of a method that needs a distribution of targets."""
        return UnsupportedError(
            f"the loss is the output '{self.inputs[0]}' of the file, which has no distribution of "
            f"targets. Choose estimation_mode 'empirical' for an output with a number for each "
            f"example, or an optimizer without curvature, such as 'adamw'."
        )
