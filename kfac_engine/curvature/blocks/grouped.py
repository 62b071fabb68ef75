"""Computes the blocks of a grouped convolution together, with one block for each group.

``F ≈ ⊕_g t · A_g ⊗ G_g``: each group is a convolution, and the parameters of different groups are
assumed to be uncorrelated. Each group splits its damping by the traces of its own factors. The
packed order is group by group.
"""

from collections.abc import Sequence
from functools import partial

import numpy as np

from kfac_engine._types import Array, Params
from kfac_engine.curvature.blocks.kronecker import KroneckerProductFB, Side
from kfac_engine.curvature.blocks.single import LayerDiagonalFB
from kfac_engine.curvature.factors.owner import FactorOwner
from kfac_engine.curvature.factors.refresh import Level
from kfac_engine.curvature.factors.stacked import GroupedMoment, GroupedSquare, StackedSquareFactor
from kfac_engine.curvature.factors.statistics import Statistic, Uses
from kfac_engine.curvature.linalg.kronecker import pi_correction
from kfac_engine.errors import UnsupportedError
from kfac_engine.layers.grouped import GroupedForm


class GroupedKroneckerFB(KroneckerProductFB):
    """A Kronecker block for each group of a convolution."""

    def __init__(self, collection: FactorOwner, form: GroupedForm) -> None:
        groups = form.groups
        a, ds = (
            Side(partial(GroupedMoment, groups=groups, taps=taps), StackedSquareFactor)
            for taps in (form.taps, 1)
        )
        super().__init__(collection, form, input_side=a, output_side=ds)
        self._stack = form.shape

    def factor_shapes(self, shapes: Sequence[tuple[int, ...]]) -> tuple[tuple[int, ...], ...]:
        del shapes  # the form has the shape of the filter
        groups, d_in, d_out = self._stack
        return (groups, d_in, d_in), (groups, d_out, d_out)

    def _absolute_split(self) -> tuple[Level, Level]:
        """Return ``(λ_A, λ_G)``, each with a number for each group."""
        root = float(np.sqrt(self.damping))
        A, G = self.input_factor, self.output_factor
        assert isinstance(A, StackedSquareFactor)
        assert isinstance(G, StackedSquareFactor)
        _, d_in, d_out = self._stack
        if self._collection.config.pi_type == "off":
            pi = np.ones(len(A.traces()))
        else:
            traces = zip(A.traces().tolist(), G.traces().tolist(), strict=True)
            pi = np.array([pi_correction(a, d_in, g, d_out) for a, g in traces])
        return root * pi, root / pi

    def full_fisher_block(self) -> Array:
        xp = self._collection.backend.xp
        groups, d_in, d_out = self._stack
        size = d_in * d_out
        A, G = (factor.average.read() for factor in self.factors)
        block: Array = xp.zeros((groups * size, groups * size), A.dtype)
        for group in range(groups):
            where = slice(group * size, (group + 1) * size)
            block[where, where] = self.repeats * xp.kron(A[group], G[group])
        return block


class GroupedDiagonalFB(LayerDiagonalFB):
    """The diagonal of the block of a convolution in groups."""

    form: GroupedForm

    def _square(self, x: Uses, ds: Uses) -> Statistic:
        form = self.form
        return GroupedSquare(
            x, ds, form.input_view, form.output_view, form.packing.has_bias, groups=form.groups,
            taps=form.taps,
        )  # fmt: skip


def single_filter(params: Params) -> str:
    """Return the filter of a depthwise convolution; an UnsupportedError if it has a bias."""
    if isinstance(params, str):
        return params
    raise UnsupportedError(
        f"a depthwise convolution is registered without a bias, got {params}; with one, register "
        f"it as a 'grouped_convolution' with its form."
    )
