"""Kronecker blocks of layers with several uses, which are assumed to be independent.

``F ≈ u·t · A ⊗ G`` with means over all uses (Martens, Ba & Johnson 2018, section 3.2). The tensors
of a tower are a list over uses, or one tensor of all uses, ``(u·n, …)`` or ``(u, n, …)``. Inputs,
outputs and gradients may have different forms.
"""

from dataclasses import replace

from kfac_engine.curvature.blocks.base import FactorOwner, GradsList, TowerNames
from kfac_engine.curvature.blocks.kronecker import DENSE, KroneckerProductFB, Side
from kfac_engine.errors import InputError, RegistrationError
from kfac_engine.layers.layer_forms import LayerForm


class MultiUseKroneckerFB(KroneckerProductFB):
    """A Kronecker block of a layer used several times.

    Args:
        collection: Owner of the factors.
        form: Layout of the tensors and parameters of one use.
        num_uses: Number of uses; optional if a tower lists them.
        input_side: Form of ``A``.
        output_side: Form of ``G``.
    """

    def __init__(
        self,
        collection: FactorOwner,
        form: LayerForm,
        num_uses: int | None = None,
        *,
        input_side: Side = DENSE,
        output_side: Side = DENSE,
    ) -> None:
        super().__init__(collection, form, input_side=input_side, output_side=output_side)
        self._num_uses = num_uses

    @property
    def num_uses(self) -> int:
        """Number of uses of the layer.

        Raises:
            InputError: The number was not given.
        """
        return count_uses(self._num_uses)

    def register_additional_tower(self, inputs: TowerNames, outputs: TowerNames) -> None:
        """Add a tower.

        Args:
            inputs: Names of the layer's input over uses, or the name of a tensor of all uses.
            outputs: Names of the layer's output before any nonlinearity, in either form.
        """
        if not isinstance(inputs, str) or not isinstance(outputs, str):
            self._num_uses = count_uses(self._num_uses, inputs, outputs)
        super().register_additional_tower(inputs, outputs)

    def _make_factors(self, grads_list: GradsList) -> None:
        for source in grads_list:
            count_uses(self.num_uses, *source)
        self.form = replace(self.form, num_uses=self.num_uses)
        super()._make_factors(grads_list)


def count_uses(num_uses: int | None, *tensors: TowerNames) -> int:
    """Return the number of uses, from a number and from lists of names.

    Args:
        num_uses: The number that the caller gave; None if omitted.
        tensors: Names; a list has a name for each use.

    Returns:
        The number of uses, at least one.

    Raises:
        InputError: Neither a number nor a list was given, or the number is below one.
        RegistrationError: The number and the lengths of lists differ.
    """
    counts = {len(names) for names in tensors if not isinstance(names, str)}
    if num_uses is not None:
        counts.add(num_uses)
    if not counts:
        raise InputError(
            "You must supply a value for the num_uses argument when the uses of a layer are not "
            "given as a list."
        )
    if len(counts) > 1:
        raise RegistrationError(
            f"the uses of one layer are counted differently: {sorted(counts)}; num_uses and the "
            f"lengths of all lists must be equal."
        )
    (uses,) = counts
    if uses < 1:
        raise InputError(f"a layer must be used at least once, got num_uses={uses}.")
    return uses
