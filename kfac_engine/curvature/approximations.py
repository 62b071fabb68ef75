"""Maps each layer kind and approximation to the function that creates its block."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

from kfac_engine.curvature.blocks.base import FisherBlock
from kfac_engine.curvature.blocks.embedding import EmbeddingKroneckerFB, TiedTableFB
from kfac_engine.curvature.blocks.grouped import GroupedDiagonalFB, GroupedKroneckerFB
from kfac_engine.curvature.blocks.kronecker import (
    BY_SIZE,
    DENSE,
    DIAGONAL,
    LARGEST_DIVIDED,
    LARGEST_OF_DATA,
    KroneckerProductFB,
    ReducedKroneckerFB,
    Side,
    patches_side,
    uncorrelated_side,
)
from kfac_engine.curvature.blocks.series import USES, SeriesFB
from kfac_engine.curvature.blocks.single import (
    EigenbasisFB,
    LayerDiagonalFB,
    NaiveDiagonalFB,
    NaiveFullFB,
    ScaleShiftDiagonalFB,
    ScaleShiftFB,
)
from kfac_engine.curvature.factors.divided import LARGEST_BLOCK, LARGEST_PART
from kfac_engine.curvature.factors.owner import FactorOwner
from kfac_engine.layers.layer_forms import LayerForm, ScaleShiftForm
from kfac_engine.registry import Registry

# Creates a block from the collection and the form of a layer.
LayerRecipe: TypeAlias = Callable[..., FisherBlock]


@dataclass(frozen=True, slots=True)
class Approximation:
    """A row of the table."""

    build: LayerRecipe  # creates the block
    formula: str  # formula of the block
    source: str  # publication that derives it
    # Whether statistics separate examples by the first axis of the layer's tensors, which must then
    # contain examples only.
    examples_first: bool = False
    # Whether statistics compute gradients of examples, which use all scratch memory.
    fills_scratch: bool = False
    eigenvectors: bool = False  # whether refreshes decompose factors for every power


@dataclass(frozen=True, slots=True)
class LayerKind:
    """A kind of layer."""

    approximations: Mapping[str, Approximation]  # rows by name; the first row is the default
    # Default of layers that have a matrix of more than ``largest`` rows; empty for the same
    # default.
    large: str = ""
    # Largest number of rows of the matrices of a layer with the first default; features of the data
    # have ``LARGEST_OF_DATA``.
    largest: int = LARGEST_BLOCK
    # The kind of the same layers if they are used several times; empty for this kind.
    several: str = ""

    @property
    def default(self) -> str:
        """The default approximation of a layer without large matrices."""
        return next(iter(self.approximations))

    def default_for(
        self, form: LayerForm | ScaleShiftForm, shapes: Sequence[tuple[int, ...]], of_data: bool
    ) -> str:
        """Return the default approximation of a layer with parameters of these shapes.

        ``of_data`` says whether the layer reads features of the data.
        """
        *inputs, last = form.sides(shapes)
        most = LARGEST_OF_DATA if of_data else self.largest
        large = last > self.largest or any(side > most for side in inputs)
        return self.large or self.default if large else self.default


def _kronecker(input_side: Side, output_side: Side) -> LayerRecipe:
    def build(collection: FactorOwner, form: LayerForm) -> FisherBlock:
        if not form.input_view.has_rows:  # token ids
            return EmbeddingKroneckerFB(collection, form, output_side=output_side)
        return KroneckerProductFB(collection, form, input_side=input_side, output_side=output_side)

    return build


def _patches_kronecker(collection: FactorOwner, form: LayerForm, side: Side = DENSE) -> FisherBlock:
    return KroneckerProductFB(
        collection, form, input_side=patches_side(form, side), output_side=side
    )


def _uncorrelated(collection: FactorOwner, form: LayerForm) -> FisherBlock:
    side = uncorrelated_side(form, collection.config)
    return KroneckerProductFB(collection, form, input_side=side)


def _series(option: int) -> LayerRecipe:
    def build(collection: FactorOwner, form: LayerForm) -> FisherBlock:
        return SeriesFB(collection, form, option)

    return build


_KFAC = "Martens & Grosse 2015, arXiv:1503.05671, section 3"
_KFC = "Grosse & Martens 2016, arXiv:1602.01407, equation 23"
_SUA = "Grosse & Martens 2016, arXiv:1602.01407, theorem 4"
_USES = "Martens, Ba & Johnson 2018, section 3.2"
_SERIES = "Martens, Ba & Johnson 2018, section 3.5"
_DIVIDED = "Shi et al. 2023, arXiv:2309.06497, section 3.3"
_TRACES = "Gao et al. 2020, arXiv:2011.10741, partial traces"
_DIAGONAL = "mean of squared per-example gradients"

# Approximations that measure the gradient of each example.
_of_examples = partial(Approximation, examples_first=True, fills_scratch=True)
_AFFINE = {
    "full": Approximation(ScaleShiftFB, "F", "second moment of per-example gradients"),
    "diagonal": Approximation(ScaleShiftDiagonalFB, "diag(F)", _DIAGONAL),
}
_GROUPS = {
    "kron": Approximation(GroupedKroneckerFB, "⊕ t · A_g ⊗ G_g", _KFC),
    "diagonal": _of_examples(GroupedDiagonalFB, "diag(F)", _DIAGONAL),
}
_REDUCE = _of_examples(
    ReducedKroneckerFB, "A(mean a) ⊗ G(Σ ds)", "Eschenhagen et al. 2023, arXiv:2311.00636"
)
_EKFAC = _of_examples(
    EigenbasisFB, "U diag(s) Uᵀ", "George et al. 2018, arXiv:1806.03884", eigenvectors=True
)
_LAYER_DIAGONAL = _of_examples(LayerDiagonalFB, "diag(F)", _DIAGONAL)
_PATCHES = Approximation(_patches_kronecker, "t · A ⊗ G", _KFC)
_PATCH_BLOCKS = {
    "kron_blocks": Approximation(
        partial(_patches_kronecker, side=BY_SIZE), "t · blocks(A) ⊗ blocks(G)", _DIVIDED
    )
}
_CONVOLUTION = LayerKind(
    {"kron": _PATCHES, **_PATCH_BLOCKS}, large="kron_blocks", several="convolution_multi"
)
_CONVOLUTION_USES = LayerKind(
    {
        "kron_indep": Approximation(_patches_kronecker, "u·t · A ⊗ G", _USES),
        "kron_indep_blocks": Approximation(
            partial(_patches_kronecker, side=BY_SIZE), "u·t · blocks(A) ⊗ blocks(G)", _DIVIDED
        ),
    },
    large="kron_indep_blocks",
)

# A refresh of a full block of scales and shifts takes cubic time: 2048 channels of a normalization
# would cost as much as the largest layer of a ResNet-50. This is the size of 256 channels with
# scale and shift.
LARGEST_FULL_SIDE = 512

KINDS: Registry[LayerKind] = Registry(
    "kind of layer",
    {
        "fully_connected": LayerKind(
            {
                "kron": Approximation(_kronecker(DENSE, DENSE), "A ⊗ G", _KFAC),
                "kron_in_diag": Approximation(_kronecker(DIAGONAL, DENSE), "diag(A) ⊗ G", _KFAC),
                "kron_out_diag": Approximation(_kronecker(DENSE, DIAGONAL), "A ⊗ diag(G)", _KFAC),
                "kron_both_diag": Approximation(
                    _kronecker(DIAGONAL, DIAGONAL), "diag(A) ⊗ diag(G)", _KFAC),
                "kron_reduce": _REDUCE,
                "ekfac": _EKFAC,
                "diagonal": _LAYER_DIAGONAL,
                "kron_blocks": Approximation(
                    _kronecker(BY_SIZE, BY_SIZE), "blocks(A) ⊗ blocks(G)", _DIVIDED),
            },
            large="kron_blocks",
            several="fully_connected_multi",
        ),
        "conv2d": LayerKind(
            {
                "kron": _PATCHES,
                "kron_reduce": _REDUCE,
                "ekfac": _EKFAC,
                "diagonal": _LAYER_DIAGONAL,
                "kron_sua": Approximation(_uncorrelated, "t · (I ⊗ C + m mᵀ) ⊗ G", _SUA),
                **_PATCH_BLOCKS,
            },
            large="kron_blocks",
            several="conv2d_multi",
        ),
        "conv1d": _CONVOLUTION,
        "convolution": _CONVOLUTION,
        "conv_transpose": LayerKind(
            {
                "kron": Approximation(_kronecker(DENSE, DENSE), "t · A ⊗ G", _KFC),
                "kron_blocks": Approximation(
                    _kronecker(BY_SIZE, BY_SIZE), "t · blocks(A) ⊗ blocks(G)", _DIVIDED
                ),
            },
            large="kron_blocks",
            several="conv_transpose_multi",
        ),
        "fully_connected_multi": LayerKind(
            {
                "kron_indep": Approximation(_kronecker(USES, USES), "u · A ⊗ G", _USES),
                "kron_indep_in_diag": Approximation(
                    _kronecker(DIAGONAL, USES), "u · diag(A) ⊗ G", _USES),
                "kron_indep_out_diag": Approximation(
                    _kronecker(USES, DIAGONAL), "u · A ⊗ diag(G)", _USES),
                "kron_indep_both_diag": Approximation(
                    _kronecker(DIAGONAL, DIAGONAL), "u · diag(A) ⊗ diag(G)", _USES),
                "kron_series_1": Approximation(
                    _series(1), "Σ_d (u − |d|) · A_d ⊗ G_d", _SERIES, eigenvectors=True),
                "kron_series_2": Approximation(
                    _series(2), "Σ_d u · A_d ⊗ G_d", _SERIES, eigenvectors=True),
                "kron_indep_blocks": Approximation(
                    _kronecker(BY_SIZE, BY_SIZE), "u · blocks(A) ⊗ blocks(G)", _DIVIDED),
            },
            large="kron_indep_blocks",
        ),
        "conv2d_multi": _CONVOLUTION_USES,
        "convolution_multi": _CONVOLUTION_USES,
        "conv_transpose_multi": LayerKind(
            {
                "kron_indep": Approximation(_kronecker(DENSE, DENSE), "u·t · A ⊗ G", _USES),
                "kron_indep_blocks": Approximation(
                    _kronecker(BY_SIZE, BY_SIZE), "u·t · blocks(A) ⊗ blocks(G)", _DIVIDED
                ),
            },
            large="kron_indep_blocks",
        ),
        "grouped_convolution": LayerKind(_GROUPS, several="grouped_convolution_multi"),
        "grouped_convolution_multi": LayerKind(
            {"kron_indep": Approximation(GroupedKroneckerFB, "⊕ u·t · A_g ⊗ G_g", _USES)},
        ),
        "depthwise_conv2d": LayerKind(dict(reversed(_GROUPS.items()))),
        "stacked_dense": LayerKind(_GROUPS),
        "embedding": LayerKind(
            {
                "kron": Approximation(_kronecker(DIAGONAL, DENSE), "diag(A) ⊗ G", _KFAC),
                "kron_blocks": Approximation(
                    _kronecker(DIAGONAL, BY_SIZE),
                    "diag(A) ⊗ blocks(G)",
                    _DIVIDED,
                ),
            },
            large="kron_blocks",
            several="embedding_multi",
        ),
        "embedding_multi": LayerKind(
            {
                "kron_indep": Approximation(_kronecker(DIAGONAL, DENSE), "u · diag(A) ⊗ G", _USES),
                "kron_indep_blocks": Approximation(
                    _kronecker(DIAGONAL, BY_SIZE),
                    "u · diag(A) ⊗ blocks(G)",
                    _DIVIDED,
                ),
            },
            large="kron_indep_blocks",
        ),
        "tied_embedding": LayerKind(
            {
                "kron": _of_examples(TiedTableFB, "H ⊗ diag(V)", _TRACES),
                "kron_both_diag": _of_examples(
                    partial(TiedTableFB, input_side=DIAGONAL), "diag(H) ⊗ diag(V)", _TRACES
                ),
            },
            large="kron_both_diag",
            largest=LARGEST_OF_DATA,
        ),
        "scale_and_shift": LayerKind(_AFFINE, large="diagonal", largest=LARGEST_FULL_SIDE),
        "shift": LayerKind(_AFFINE, large="diagonal", largest=LARGEST_FULL_SIDE),
        # Parameters without a layer: blocks are created from names.
        "generic": LayerKind(
            {
                "diagonal": Approximation(NaiveDiagonalFB, "diag(g²)", _DIAGONAL),
                "full": Approximation(
                    NaiveFullFB, "g gᵀ", "second moment of per-example gradients"
                ),
            }
        ),
    },
)  # fmt: skip

# Symbols of the formulas, with their meanings.
NOTATION: Mapping[str, str] = {
    "A": "second moment of inputs, a mean over uses, examples and positions",
    "G": "second moment of output gradients, a mean over uses, examples and positions",
    "⊗": "Kronecker product",
    "diag": "diagonal of a matrix, or matrix with this diagonal",
    "t": "number of positions (output pixels, tokens)",
    "u": "number of uses of the parameters (time steps)",
    "F": "second moment of the gradients of single examples",
    "U": "eigenbasis of the factors A and G",
    "s": "variances of the gradients of single examples in the eigenbasis",
    "mean a": "mean of the inputs over the positions of an example",
    "Σ ds": "sum of the output gradients over the positions of an example",
    "I": "identity matrix",
    "C": "covariance of the channels of a pixel",
    "m": "mean of the channels of a pixel",
    "⊕": "one block for each group g, with the factors A_g and G_g",
    "Σ_d": "sum over lags d between uses, with the moments A_d and G_d of uses at this lag",
    "blocks": f"a matrix of up to {LARGEST_BLOCK:,} rows, or {LARGEST_OF_DATA:,} features of the "
    f"data, is complete; a larger one has diagonal blocks of at most {LARGEST_PART:,} rows; one "
    f"of more than {LARGEST_DIVIDED:,} rows has only its diagonal",
    "H": "a sum of F over rows and uses, reduced by a partial trace over the vocabulary",
    "V": "the same sum, reduced by a partial trace over the features and divided by its trace",
    "g": "gradient of an example, or of the batch in blocks without an engine",
}


def explained(formulas: Iterable[str]) -> dict[str, str]:
    """Return the meanings of the symbols in formulas of blocks, by symbol."""
    text = " ".join(formulas)
    # ``A_g`` contains A and no g, ``mᵀ`` contains m.
    return {
        symbol: meaning
        for symbol, meaning in NOTATION.items()
        if re.search(rf"(?<!\w){re.escape(symbol)}(?![a-zA-Z0-9])", text)
    }


def row(kind: str, approximation: str) -> Approximation:
    """Return the row of the table for a layer kind and an approximation."""
    return KINDS[kind].approximations[approximation]


def accepted(kind: str) -> tuple[str, ...]:
    """Return the names of the approximations that a kind of layer accepts."""
    return tuple(KINDS[kind].approximations)
