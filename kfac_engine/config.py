"""Choices a user makes, as frozen records that check themselves."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from math import inf, isfinite
from numbers import Integral, Real
from typing import Literal

from kfac_engine.errors import InputError

PiType = Literal["tracenorm", "off"]

_FLAGS = (
    "debias",
    "assume_zero_mean_activations",
    "subtract_mean_contrib_from_cov",
    "sub_sample_inputs",
    "sub_sample_patches",
)


@dataclass(frozen=True, slots=True)
class CollectionConfig:
    """How statistics are averaged, damped and inverted; given to ``LayerCollection``.

    Attributes:
        debias: Whether averages are debiased (value = decayed sum / decayed weight). False is the
            classical ``decay·c + (1 − decay)·new``.
        initial_covariance: Where a classical average starts. A debiased one forgets its start.
        pi_type: How a Kronecker block splits its damping: by the factors' mean traces, or evenly.
        normalize_damping_power: ``p`` in ``λ' = λ / N**p`` for a block whose parameters are used
            ``N`` times per example; 0 turns the normalization off.
        eigenvalue_clipping_threshold: Floor of eigenvalues before damping, on the eigen path.
        eigendecomposition_threshold: So many inverses of one factor (with different dampings) are
            taken from one eigendecomposition rather than from Cholesky factors.
        assume_zero_mean_activations: Kronecker factors without spatial correlation (SUA): whether
            activations count as centred.
        subtract_mean_contrib_from_cov: SUA with centred activations: whether the mean's outer
            product is taken off the second moment.
        sub_sample_inputs: Whether convolution input factors see a random part of the examples.
        inputs_to_extract_patches_factor: That part.
        sub_sample_patches: Whether convolution input factors see a random part of the patches.
        max_num_patches: At most so many patches.
        max_num_patches_per_dimension: At most so many patches per row of the factor.
        seed: Of the sub-sampling.
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
        """Check the values.

        Raises:
            InputError: A value is outside its range.
        """
        one_of("initial_covariance", self.initial_covariance, ("zeros", "identity"))
        one_of("pi_type", self.pi_type, ("tracenorm", "off"))
        for name in _FLAGS:
            flag(name, getattr(self, name))
        number("normalize_damping_power", self.normalize_damping_power)
        number("eigenvalue_clipping_threshold", self.eigenvalue_clipping_threshold)
        number("inputs_to_extract_patches_factor", self.inputs_to_extract_patches_factor)
        if not 0 < self.inputs_to_extract_patches_factor <= 1:
            raise InputError(
                f"inputs_to_extract_patches_factor must lie in (0, 1], got "
                f"{self.inputs_to_extract_patches_factor}."
            )
        whole("eigendecomposition_threshold", self.eigendecomposition_threshold, least=1)
        whole("max_num_patches", self.max_num_patches, least=1)
        whole("seed", self.seed, least=0)
        positive("max_num_patches_per_dimension", self.max_num_patches_per_dimension)


# -- checks, shared by all records of choices ------------------------------------------------------


def one_of(name: str, value: object, allowed: Collection[str]) -> None:
    """Refuse a value that is not an allowed name, with an InputError."""
    if not isinstance(value, str) or value not in allowed:
        raise InputError(f"{name} must be one of {', '.join(allowed)}; got {value!r}.")


def whole(name: str, value: object, *, least: int | None) -> None:
    """Refuse a value that is not a whole number, or too small, with an InputError."""
    fits = isinstance(value, Integral) and not isinstance(value, bool)
    if not fits or (least is not None and value < least):  # type: ignore[operator] # a number
        bound = "" if least is None else f" of at least {least}"
        raise InputError(f"{name} must be a whole number{bound}, got {value!r}.")


def number(name: str, value: object) -> None:
    """Refuse a value that is not a finite real number, with an InputError."""
    fits = isinstance(value, Real) and not isinstance(value, bool)
    if not fits or not isfinite(value):  # type: ignore[arg-type] # a number
        raise InputError(f"{name} must be a finite number, got {value!r}.")


def positive(name: str, value: object) -> None:
    """Refuse a value that is no positive finite number, with an InputError."""
    fits = isinstance(value, Real) and not isinstance(value, bool)
    if not fits or not 0 < value < inf:  # type: ignore[operator] # a number
        raise InputError(f"{name} must be a positive number, got {value!r}.")


def flag(name: str, value: object) -> None:
    """Refuse a value that is neither True nor False, with an InputError."""
    if value is not True and value is not False:
        raise InputError(f"{name} must be True or False, got {value!r}.")


def listed(name: str, value: object, like: str) -> Sequence[object]:
    """The entries of a list; an InputError with an example where the value is not a list."""
    if isinstance(value, str | bytes) or not isinstance(value, Sequence):
        raise InputError(f"{name} must be a list, such as {like}, got {value!r}.")
    return value


def texts(name: str, value: object, like: str) -> None:
    """Refuse a value that is not a list of strings, with an InputError that shows an example."""
    if not all(isinstance(entry, str) for entry in listed(name, value, like)):
        raise InputError(f"{name} must be a list of names, such as {like}, got {value!r}.")
