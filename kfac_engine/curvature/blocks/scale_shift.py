"""Blocks of parameters that scale and shift the data, as in normalisation layers."""

from collections.abc import Sequence
from math import prod

from kfac_engine.curvature.blocks.base import (
    ExampleReader,
    FactorOwner,
    Found,
    GradsList,
    TowerNames,
    uses,
)
from kfac_engine.curvature.blocks.single import SingleLayerFB
from kfac_engine.curvature.factors.base import FisherFactor
from kfac_engine.curvature.factors.dense import DenseSquareMatrixFactor
from kfac_engine.curvature.factors.diagonal import DiagonalFactor
from kfac_engine.curvature.factors.scale_shift import (
    ScaleShiftMoment,
)
from kfac_engine.errors import RegistrationError
from kfac_engine.layers.broadcast import ScaleShiftForm


class ScaleShiftFB(SingleLayerFB):
    """The block of a scale, a shift or both; vectors are ``[scale, shift]``, each row-major.

    A tower lists the data of each use of the parameters.

    Args:
        collection: Owner of the factor.
        form: Broadcast of the parameters.
        statistic: Statistic of the per-example gradients.
        factor: Class of the factor.
    """

    def __init__(
        self,
        collection: FactorOwner,
        form: ScaleShiftForm,
        *,
        statistic: type[ScaleShiftMoment] = ScaleShiftMoment,
        factor: type[FisherFactor] = DenseSquareMatrixFactor,
    ) -> None:
        super().__init__(collection)
        self.form = form
        self._statistic = statistic
        self._factor_class = factor

    def register_additional_tower(self, inputs: TowerNames, outputs: TowerNames) -> None:
        """Add a tower.

        Args:
            inputs: Names of the data before scaling, for each use; empty without a scale.
            outputs: Names of the scaled and shifted data, for each use.

        Raises:
            RegistrationError: Inputs and outputs list different numbers of uses.
        """
        counts = len(uses(inputs)), len(uses(outputs))
        if counts[0] != (counts[1] if self.form.scale else 0):
            raise RegistrationError(
                f"the block of {self.params} takes an input for each of {counts[1]} output(s) of a "
                f"scale, and none without a scale; got {counts[0]}."
            )
        self._towers.add(inputs, outputs)

    def tensors_to_compute_grads(self) -> tuple[TowerNames, ...]:
        return tuple(names if len(names) > 1 else names[0] for names in self._towers.outputs)

    def read_examples(self, reader: ExampleReader[Found]) -> Found:
        return reader.sums(self.form)

    def factor_shapes(self, shapes: Sequence[tuple[int, ...]]) -> tuple[tuple[int, ...], ...]:
        size = sum(prod(shape) for shape in shapes)
        return ((size,) if issubclass(self._factor_class, DiagonalFactor) else (size, size),)

    def _make_factors(self, grads_list: GradsList) -> None:
        statistic = self._statistic(
            tuple(self._towers.inputs),
            self._towers.gradients(grads_list),
            self.form.scale,
            self.form.shift,
        )
        self._factor = self._collection.make_or_get_factor(self._factor_class, (statistic,))
