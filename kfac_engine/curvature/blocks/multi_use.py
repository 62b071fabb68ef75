"""Kronecker blocks of layers used several times, the uses taken as independent.

``F ≈ u·t · A ⊗ G`` with means over all uses (Martens, Ba & Johnson 2018, section 3.2): the general
Kronecker block, with uses among its rows. The tensors of a tower are given as a list over uses, or
as one tensor that holds them all, ``(u·n, …)`` or ``(u, n, …)``; inputs, outputs and gradients may
differ in that.
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
        form: How the tensors and parameters of one use are laid out.
        num_uses: Uses; may be left out if a tower lists them.
        input_side: How ``A`` is kept.
        output_side: How ``G`` is kept.
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
        """Uses of the layer.

        Raises:
            InputError: Nobody said how many there are.
        """
        return count_uses(self._num_uses)

    def register_additional_tower(self, inputs: TowerNames, outputs: TowerNames) -> None:
        """Add a mini-batch shard.

        Args:
            inputs: Names of the layer's input over uses, or one name of all of them.
            outputs: Names of its output before any nonlinearity, likewise.
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
    """The number of uses that everything given agrees on.

    Args:
        num_uses: As a caller said; None if not.
        tensors: Names; a list has one for each use.

    Returns:
        At least one.

    Raises:
        InputError: Neither a number nor a list was given, or it is below one.
        RegistrationError: They differ.
    """
    given = {len(names) for names in tensors if not isinstance(names, str)}
    if num_uses is not None:
        given.add(num_uses)
    if not given:
        raise InputError(
            "You must supply a value for the num_uses argument when the uses of a layer are not "
            "given as a list."
        )
    if len(given) > 1:
        raise RegistrationError(
            f"the uses of one layer are counted differently: {sorted(given)}; num_uses and the "
            f"lengths of all lists must be equal."
        )
    (uses,) = given
    if uses < 1:
        raise InputError(f"a layer must be used at least once, got num_uses={uses}.")
    return uses
