"""The table of approximations: (kind of layer, approximation) → how its block is made."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

from kfac_engine.blocks.base import FactorOwner, FisherBlock
from kfac_engine.blocks.convolution import patches_side, uncorrelated_side
from kfac_engine.blocks.eigenbasis import EigenbasisFB
from kfac_engine.blocks.embedding import EmbeddingKroneckerFB
from kfac_engine.blocks.grouped import GroupedDiagonalFB, GroupedKroneckerFB
from kfac_engine.blocks.kronecker import DENSE, DIAGONAL, KroneckerProductFB, Side
from kfac_engine.blocks.multi import MultiUseKroneckerFB
from kfac_engine.blocks.reduced import ReducedKroneckerFB
from kfac_engine.blocks.scale_shift import ScaleShiftFB
from kfac_engine.blocks.series import USES, SeriesFB
from kfac_engine.blocks.single import LayerDiagonalFB, NaiveDiagonalFB, NaiveFullFB
from kfac_engine.factors.diagonal import DiagonalFactor
from kfac_engine.factors.scale_shift import ScaleShiftSquare
from kfac_engine.layers.forms import LayerForm
from kfac_engine.layers.ids import Ids

# Takes the collection and the form of the kind's layers.
LayerRecipe: TypeAlias = Callable[..., FisherBlock]


@dataclass(frozen=True, slots=True)
class Approximation:
    """A row of the table.

    Attributes:
        build: Makes the block.
        formula: The block, in a few symbols.
        source: Where it is derived.
    """

    build: LayerRecipe
    formula: str
    source: str


def _kronecker(input_side: Side, output_side: Side) -> LayerRecipe:
    def build(collection: FactorOwner, form: LayerForm) -> FisherBlock:
        if isinstance(form.input_view, Ids):
            return EmbeddingKroneckerFB(collection, form, output_side=output_side)
        return KroneckerProductFB(collection, form, input_side=input_side, output_side=output_side)

    return build


def _patches_kronecker(collection: FactorOwner, form: LayerForm) -> FisherBlock:
    return KroneckerProductFB(collection, form, input_side=patches_side(form))


def _uncorrelated(collection: FactorOwner, form: LayerForm) -> FisherBlock:
    side = uncorrelated_side(form, collection.config)
    return KroneckerProductFB(collection, form, input_side=side)


def _multi(input_side: Side, output_side: Side) -> LayerRecipe:
    def build(collection: FactorOwner, form: LayerForm) -> FisherBlock:
        if isinstance(form.input_view, Ids):
            return EmbeddingKroneckerFB(collection, form, form.num_uses, output_side=output_side)
        return MultiUseKroneckerFB(
            collection, form, form.num_uses, input_side=input_side, output_side=output_side
        )

    return build


def _series(option: int) -> LayerRecipe:
    def build(collection: FactorOwner, form: LayerForm) -> FisherBlock:
        return SeriesFB(collection, form, form.num_uses, option)

    return build


def _multi_patches(collection: FactorOwner, form: LayerForm) -> FisherBlock:
    return MultiUseKroneckerFB(collection, form, form.num_uses, input_side=patches_side(form))


_KFAC = "Martens & Grosse 2015, arXiv:1503.05671, section 3"
_KFC = "Grosse & Martens 2016, arXiv:1602.01407, equation 23"
_SUA = "Grosse & Martens 2016, arXiv:1602.01407, theorem 4"
_USES = "Martens, Ba & Johnson 2018, section 3.2"
_SERIES = "Martens, Ba & Johnson 2018, section 3.5"
_DIAGONAL = "mean of squared per-example gradients"

_SQUARES = partial(ScaleShiftFB, statistic=ScaleShiftSquare, factor=DiagonalFactor)
_GROUPS = {
    "kron": Approximation(GroupedKroneckerFB, "⊕ t · A_g ⊗ G_g", _KFC),
    "diagonal": Approximation(GroupedDiagonalFB, "diag(F)", _DIAGONAL),
}
_REDUCE = Approximation(
    ReducedKroneckerFB, "A(mean a) ⊗ G(Σ ds)", "Eschenhagen et al. 2023, arXiv:2311.00636"
)
_EKFAC = Approximation(EigenbasisFB, "U diag(s) Uᵀ", "George et al. 2018, arXiv:1806.03884")
_PATCHES = Approximation(_patches_kronecker, "t · A ⊗ G", _KFC)

APPROXIMATIONS: Mapping[str, Mapping[str, Approximation]] = {
    "fully_connected": {
        "kron": Approximation(_kronecker(DENSE, DENSE), "A ⊗ G", _KFAC),
        "kron_in_diag": Approximation(_kronecker(DIAGONAL, DENSE), "diag(A) ⊗ G", _KFAC),
        "kron_out_diag": Approximation(_kronecker(DENSE, DIAGONAL), "A ⊗ diag(G)", _KFAC),
        "kron_both_diag": Approximation(_kronecker(DIAGONAL, DIAGONAL), "diag(A) ⊗ diag(G)", _KFAC),
        "kron_reduce": _REDUCE,
        "ekfac": _EKFAC,
        "diagonal": Approximation(LayerDiagonalFB, "diag(F)", _DIAGONAL),
    },
    "conv2d": {
        "kron": _PATCHES,
        "kron_reduce": _REDUCE,
        "ekfac": _EKFAC,
        "diagonal": Approximation(LayerDiagonalFB, "diag(F)", _DIAGONAL),
        "kron_sua": Approximation(_uncorrelated, "t · (I ⊗ C + m mᵀ) ⊗ G", _SUA),
    },
    "conv1d": {"kron": _PATCHES},
    "convolution": {"kron": _PATCHES},
    "conv_transpose": {"kron": Approximation(_kronecker(DENSE, DENSE), "t · A ⊗ G", _KFC)},
    "fully_connected_multi": {
        "kron_indep": Approximation(_multi(USES, USES), "u · A ⊗ G", _USES),
        "kron_indep_in_diag": Approximation(_multi(DIAGONAL, USES), "u · diag(A) ⊗ G", _USES),
        "kron_indep_out_diag": Approximation(_multi(USES, DIAGONAL), "u · A ⊗ diag(G)", _USES),
        "kron_indep_both_diag": Approximation(
            _multi(DIAGONAL, DIAGONAL), "u · diag(A) ⊗ diag(G)", _USES
        ),
        "kron_series_1": Approximation(_series(1), "Σ_d (u − |d|) · A_d ⊗ G_d", _SERIES),
        "kron_series_2": Approximation(_series(2), "Σ_d u · A_d ⊗ G_d", _SERIES),
    },
    "conv2d_multi": {"kron_indep": Approximation(_multi_patches, "u·t · A ⊗ G", _USES)},
    "convolution_multi": {"kron_indep": Approximation(_multi_patches, "u·t · A ⊗ G", _USES)},
    "conv_transpose_multi": {
        "kron_indep": Approximation(_multi(DENSE, DENSE), "u·t · A ⊗ G", _USES)
    },
    "grouped_convolution": _GROUPS,
    "grouped_convolution_multi": {
        "kron_indep": Approximation(GroupedKroneckerFB, "⊕ u·t · A_g ⊗ G_g", _USES)
    },
    "depthwise_conv2d": _GROUPS,
    "stacked_dense": _GROUPS,
    "embedding": {"kron": Approximation(_kronecker(DIAGONAL, DENSE), "diag(A) ⊗ G", _KFAC)},
    "embedding_multi": {
        "kron_indep": Approximation(_multi(DIAGONAL, DENSE), "u · diag(A) ⊗ G", _USES)
    },
    "scale_and_shift": {
        "full": Approximation(ScaleShiftFB, "F", "second moment of per-example gradients"),
        "diagonal": Approximation(_SQUARES, "diag(F)", _DIAGONAL),
    },
}

# Blocks of parameters without a layer: made from names, not from a layer's form.
GENERIC: Mapping[str, type[NaiveFullFB]] = {"full": NaiveFullFB, "diagonal": NaiveDiagonalFB}

DEFAULTS: Mapping[str, str] = {
    "fully_connected": "kron",
    "conv2d": "kron",
    "conv1d": "kron",
    "convolution": "kron",
    "conv_transpose": "kron",
    "fully_connected_multi": "kron_indep",
    "conv2d_multi": "kron_indep",
    "convolution_multi": "kron_indep",
    "conv_transpose_multi": "kron_indep",
    "grouped_convolution": "kron",
    "grouped_convolution_multi": "kron_indep",
    "depthwise_conv2d": "diagonal",
    "stacked_dense": "kron",
    "embedding": "kron",
    "embedding_multi": "kron_indep",
    "scale_and_shift": "full",
    "generic": "diagonal",
}


def formula(kind: str, approximation: str) -> str:
    """A block in a few symbols."""
    if kind == "generic":
        return {"full": "g gᵀ", "diagonal": "diag(g²)"}[approximation]
    return APPROXIMATIONS[kind][approximation].formula


def accepted(kind: str) -> tuple[str, ...]:
    """Names of the approximations that a kind of layer accepts."""
    return tuple(GENERIC if kind == "generic" else APPROXIMATIONS[kind])
