"""Defines the options of a layer collection: averages, damping and inverses."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import inf
from numbers import Real
from operator import add, mul, sub, truediv
from types import MappingProxyType
from typing import Any, Literal

from kfac_engine.arguments import (
    check_bool,
    check_choice,
    check_int,
    check_number,
    check_positive,
    check_seed,
)
from kfac_engine.layers.layer_forms import Sampling

PiType = Literal["tracenorm", "off"]

# Floor of the mean eigenvalue that a relative damping multiplies: a layer without gradients has a
# factor of zeros, whose damped inverse must not overflow.
LEAST_EIGENVALUE = 1e-12

_FLAGS = (
    "debias",
    "assume_zero_mean_activations",
    "subtract_mean_contrib_from_cov",
    "sub_sample_inputs",
    "sub_sample_patches",
)


class RelativeDamping(float):
    """A damping in units of the mean eigenvalue of each block.

    A block ``F`` of ``n`` rows is damped by ``ε·tr(F)/n``, with its current average. The damped
    block then has the same condition number whatever the scale of the loss, of the inputs and of
    the other layers. Each factor of a Kronecker block is damped by ``√ε`` times its own mean
    eigenvalue. If the features of an input factor are an input of the model, each feature is damped
    by ``√ε`` times its own second moment. Parameters without a block are damped by ``ε`` times the
    mean over all blocks.

    Sums, products, quotients and powers with numbers are relative as well, so that
    ``engine.damping *= 2`` doubles ε. ``float`` returns ε itself.
    """

    __array_priority__ = 1.0  # scalars of NumPy leave their operators to this class
    # What is added to ε for single blocks, by their ``params``; arithmetic leaves it out.
    more: Mapping[Any, float] = MappingProxyType({})
    # Number of examples of an update of the statistics, from which the averages of inputs shrink
    # (``DenseSquareMatrixFactor.shrinkage``); infinite for no shrinkage. Arithmetic leaves it out.
    examples: float = inf

    def __repr__(self) -> str:
        return f"{type(self).__name__}({float(self)!r})"

    def of(self, mean_eigenvalue: float) -> float:
        """Return the damping of a block with this mean eigenvalue, in units of the block."""
        return float(self) * mean_eigenvalue

    def of_block(self, params: Any) -> "RelativeDamping":
        """Return the damping of the block with these parameters."""
        if params not in self.more:
            return self
        return RelativeDamping(self + self.more[params]).with_more({}, self.examples)

    def with_more(self, more: Mapping[Any, float], examples: float) -> "RelativeDamping":
        """Return this damping with additions for single blocks, and ``examples``."""
        result = RelativeDamping(self)
        result.more, result.examples = more, examples
        return result

    def __mul__(self, other: Any) -> Any:
        return self._with(mul, other)

    def __truediv__(self, other: Any) -> Any:
        return self._with(truediv, other)

    def __add__(self, other: Any) -> Any:
        return self._with(add, other)

    def __sub__(self, other: Any) -> Any:
        return self._with(sub, other)

    def __pow__(self, other: Any, modulus: None = None) -> Any:
        return self._with(pow, other)

    __rmul__, __radd__ = __mul__, __add__

    def _with(self, operation: Callable[[float, Any], Any], other: Any) -> Any:
        """Return the result of an operation: relative for a number, unchanged for an array."""
        if isinstance(other, Real):
            return RelativeDamping(operation(float(self), float(other)))
        return operation(float(self), other)


def as_damping(value: float) -> float:
    """Return a number of any type as a damping of its kind: relative, or a plain ``float``."""
    return value if isinstance(value, RelativeDamping) else float(value)


def show_damping(damping: float) -> str:
    """Return a damping as text: ``0.001``, or ``0.1 of the mean eigenvalue``."""
    relative = " of the mean eigenvalue" if isinstance(damping, RelativeDamping) else ""
    return f"{float(damping):.4g}{relative}"


@dataclass(frozen=True, slots=True)
class CollectionConfig:
    """Options of a ``LayerCollection``: averages, damping and inverses.

    Attributes:
        debias: Whether averages are debiased (value = decayed sum / decayed weight). False is the
            classical ``decay·c + (1 − decay)·new``.
        initial_covariance: Initial value of a classical average. A debiased average has none.
        pi_type: How a Kronecker block splits its damping: by the factors' mean traces, or evenly.
        normalize_damping_power: ``p`` in ``λ' = λ / N**p`` for a block whose parameters are used
            ``N`` times per example; 0 turns the normalization off.
        eigenvalue_clipping_threshold: Lower bound of eigenvalues before damping, in
            eigendecompositions.
        eigendecomposition_threshold: Number of inverses of a factor, with different dampings, from
            which an eigendecomposition replaces the Cholesky factors.
        assume_zero_mean_activations: Kronecker factors without spatial correlation (SUA): whether
            activations count as centred.
        subtract_mean_contrib_from_cov: SUA with centred activations: whether the outer product
            of the mean is subtracted from the second moment.
        sub_sample_inputs: Whether input factors of convolutions read a part of the examples.
        inputs_to_extract_patches_factor: Fraction of the examples in the subset.
        sub_sample_patches: Whether input factors of convolutions read a part of the patches.
        max_num_patches: Largest number of patches.
        max_num_patches_per_dimension: Largest number of patches per row of the factor.
        seed: Seed of the sub-sampling.
    """

    debias: bool = True
    initial_covariance: Literal["zeros", "identity"] = "zeros"
    pi_type: PiType = "tracenorm"
    normalize_damping_power: float = 1.0
    eigenvalue_clipping_threshold: float = 0.0
    eigendecomposition_threshold: int = 4
    assume_zero_mean_activations: bool = False
    subtract_mean_contrib_from_cov: bool = True
    sub_sample_inputs: bool = False
    inputs_to_extract_patches_factor: float = 0.2
    sub_sample_patches: bool = False
    max_num_patches: int = 10_000_000
    max_num_patches_per_dimension: float = 3.0
    seed: int = 0

    def __post_init__(self) -> None:
        """Raise ``InputError`` if a value is outside its range."""
        check_choice("initial_covariance", self.initial_covariance, ("zeros", "identity"))
        check_choice("pi_type", self.pi_type, ("tracenorm", "off"))
        for name in _FLAGS:
            check_bool(name, getattr(self, name))
        check_number("normalize_damping_power", self.normalize_damping_power)
        check_number("eigenvalue_clipping_threshold", self.eigenvalue_clipping_threshold)
        factor = self.inputs_to_extract_patches_factor
        check_number("inputs_to_extract_patches_factor", factor, "(0, 1]")
        check_int("eigendecomposition_threshold", self.eigendecomposition_threshold, least=1)
        check_int("max_num_patches", self.max_num_patches, least=1)
        check_seed(self.seed)
        check_positive("max_num_patches_per_dimension", self.max_num_patches_per_dimension)

    def sampling(self, inputs: bool | None = None, patches: bool | None = None) -> Sampling:
        """Return the sub-sampling of the input factor of a convolution.

        Args:
            inputs: Whether the factor reads a part of the examples; ``sub_sample_inputs`` if None.
            patches: Whether the factor reads a part of the patches; ``sub_sample_patches`` if None.

        Returns:
            The sub-sampling; it is inactive if the factor reads everything.
        """
        some_inputs = self.sub_sample_inputs if inputs is None else inputs
        some_patches = self.sub_sample_patches if patches is None else patches
        return Sampling(
            self.inputs_to_extract_patches_factor if some_inputs else None,
            self.max_num_patches if some_patches else None,
            self.max_num_patches_per_dimension,
        )
