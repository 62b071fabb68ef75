"""Choices a user makes, as frozen records that check themselves."""

from dataclasses import dataclass
from math import inf, isfinite
from numbers import Integral
from typing import Literal

from kfac_engine.errors import InputError

PiType = Literal["tracenorm", "off"]
RefreshPolicy = Literal["all_at_once", "round_robin", "balanced"]


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
        _one_of("initial_covariance", self.initial_covariance, ("zeros", "identity"))
        _one_of("pi_type", self.pi_type, ("tracenorm", "off"))
        for name in ("normalize_damping_power", "eigenvalue_clipping_threshold"):
            if not isfinite(getattr(self, name)):
                raise InputError(f"{name} must be finite, got {getattr(self, name)}.")
        if not 0 < self.inputs_to_extract_patches_factor <= 1:
            raise InputError(
                f"inputs_to_extract_patches_factor must lie in (0, 1], got "
                f"{self.inputs_to_extract_patches_factor}."
            )
        _whole("eigendecomposition_threshold", self.eigendecomposition_threshold, least=1)
        _whole("max_num_patches", self.max_num_patches, least=1)
        _whole("seed", self.seed, least=0)
        if not 0 < self.max_num_patches_per_dimension < inf:
            raise InputError(
                f"max_num_patches_per_dimension must be positive, got "
                f"{self.max_num_patches_per_dimension}."
            )


@dataclass(frozen=True, slots=True)
class Schedule:
    """When covariances and inverses move; the counter counts calls of ``observe`` and ``step``.

    Call 0 updates the covariances and refreshes everything.

    Attributes:
        covariance_every: Covariances are updated when ``counter % covariance_every == 0``.
        refresh_every: Each factor is refreshed once in so many calls.
        policy: ``"all_at_once"`` (all when ``counter % refresh_every == 0``), ``"round_robin"`` (an
            equal number each call) or ``"balanced"`` (an equal cost each call).
        overlap: Whether inverses begun in one call are used from the next one on: a GPU then works
            on them while the next batch runs. Those of call 0 are used at once. On a CPU the
            numbers are the same, and nothing is gained.
    """

    covariance_every: int = 1
    refresh_every: int = 10
    policy: RefreshPolicy = "all_at_once"
    overlap: bool = False

    def __post_init__(self) -> None:
        """Check the values.

        Raises:
            InputError: A period is no positive whole number or the policy unknown.
        """
        _whole("covariance_every", self.covariance_every, least=1)
        _whole("refresh_every", self.refresh_every, least=1)
        _one_of("policy", self.policy, ("all_at_once", "round_robin", "balanced"))


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise InputError(f"{name} must be one of {', '.join(allowed)}; got '{value}'.")


def _whole(name: str, value: int, *, least: int) -> None:
    if not isinstance(value, Integral) or value < least:
        raise InputError(f"{name} must be a whole number of at least {least}, got {value!r}.")
