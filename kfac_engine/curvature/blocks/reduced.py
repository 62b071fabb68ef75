"""KFAC-reduce: a Kronecker block of a layer whose positions are averaged.

A layer with positions has two Kronecker approximations. ``kron`` (KFAC-expand) treats each position
as an example, which is exact if the loss sums over positions. KFAC-reduce replaces the gradient of
an example, ``Σ_t a_t ds_tᵀ``, by ``(mean_t a_t) (Σ_t ds_t)ᵀ``, which is exact if the network
averages over positions before its loss. Without positions both are K-FAC.

Source: Eschenhagen et al. 2023, arXiv:2311.00636, section 3.3.
"""

from functools import partial

from kfac_engine.curvature.blocks.base import FactorOwner
from kfac_engine.curvature.blocks.kronecker import KroneckerProductFB, Side
from kfac_engine.curvature.factors.dense import DenseSquareMatrixFactor
from kfac_engine.curvature.factors.reduced import ReducedMoment
from kfac_engine.layers.layer_forms import LayerForm

_MEAN = Side(partial(ReducedMoment, mean=True), DenseSquareMatrixFactor)
_SUM = Side(ReducedMoment, DenseSquareMatrixFactor)


class ReducedKroneckerFB(KroneckerProductFB):
    """``F ≈ A ⊗ G`` with A of mean inputs and G of summed gradients.

    Args:
        collection: Owner of the factors.
        form: Layout of the tensors and parameters of the layer.
    """

    def __init__(self, collection: FactorOwner, form: LayerForm) -> None:
        super().__init__(collection, form, input_side=_MEAN, output_side=_SUM)

    @property
    def repeats(self) -> float:
        """Number of rows for each example, 1: positions are reduced."""
        return 1
