"""Defines the input factor of a convolution whose pixels are uncorrelated (SUA).

Single pixels determine the second moment of a patch. With ``κ`` taps, and the mean ``μ`` and the
covariance ``C`` of a pixel, it is

    ``M = (I_κ ⊗ C) + m mᵀ``,  ``m = (μ, …, μ)``

in the order ``(*kernel, channels)`` of a patch's features. A bias appends a one to ``m`` and a zero
to the first term. Damping adds ``δ·I``; the inverse follows from the Sherman–Morrison formula.

Source: Grosse & Martens 2016, arXiv:1602.01407, section 4.2 and theorem 4.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Unpack

from kfac_engine._types import Array, DType, Values
from kfac_engine.backend.protocol import Backend
from kfac_engine.curvature.config import CollectionConfig
from kfac_engine.curvature.factors.base import FactorOptions, FisherFactor
from kfac_engine.curvature.factors.refresh import Damping, RefreshTask, Request, Result, damping_id
from kfac_engine.curvature.factors.statistics import KroneckerMoment, Uses, scale
from kfac_engine.errors import (
    InputError,
    NotReadyError,
    ShapeError,
    UnknownNameError,
    UnsupportedError,
)
from kfac_engine.layers.views import View


@dataclass(frozen=True, slots=True)
class PixelCovariance(KroneckerMoment):
    """Covariance of pixels over examples and positions, ``(C, C)``, with the mean as last row."""

    of_sums: ClassVar[bool] = True
    moment: ClassVar[str] = ""

    taps: int = 1  # number of pixels in a patch
    centred: bool = True  # whether ``μ μᵀ`` is subtracted from the second moment
    with_mean: bool = True  # whether the mean is measured: ``(C + 1, C)``

    @classmethod
    def configured(  # noqa: PLR0913 (the fields of a statistic)
        cls,
        config: CollectionConfig,
        tensors: Uses,
        *,
        view: View,
        homogeneous: bool,
        taps: int,
        num_uses: int = 1,
        batch: str | None = None,
        exact: bool = False,
    ) -> "PixelCovariance":
        """Return the statistic for a configuration.

        The configuration decides whether the mean is modelled and whether it is subtracted. The
        view reads images as rows of channels. A patch has ``taps`` pixels, and ends with a one if
        ``homogeneous``. The other arguments are as in ``KroneckerMoment``.
        """
        modelled = not config.assume_zero_mean_activations
        centred = modelled or config.subtract_mean_contrib_from_cov
        return cls(tensors, view, homogeneous, num_uses, batch, exact, taps, centred, modelled)

    def shape(self, values: Values) -> tuple[int, ...]:
        channels = self.features(values)
        return channels + self.with_mean, channels

    def add_to(
        self, out: Array, values: Values, backend: Backend, alpha: float, beta: float
    ) -> None:
        self.add_sums(out, self.sums(values, out.dtype, backend), 1, backend, alpha, beta)

    def sums(self, values: Values, dtype: DType, backend: Backend) -> Array:
        """Return the second moment of pixels with a one, ``(1, C + 1, C + 1)``."""
        if self._row_weights(values) is not None:
            raise UnsupportedError(
                "'kron_sua' measures pixels, not patches, so that it cannot leave out the patches "
                "of targets that do not count; choose another approximation."
            )
        channels = self.features(values)
        moment: Array = backend.xp.empty((1, channels + 1, channels + 1), dtype)
        second_moment = KroneckerMoment(
            self.tensors, self.view, homogeneous=True, num_uses=self.num_uses, batch=self.batch
        )
        second_moment.add_to(moment[0], values, backend, alpha=1.0, beta=0.0)
        backend.mirror(moment[0])
        return moment

    def add_sums(
        self, out: Array, sums: Array, examples: int, backend: Backend, alpha: float, beta: float
    ) -> None:
        """Add the covariance and the mean of pixels from the second moment of all pixels."""
        del examples
        (moment,) = sums
        channels = out.shape[1]
        mean = moment[-1, :-1]
        scale(out, beta)
        out[:channels] += alpha * moment[:-1, :-1]
        if self.centred:
            # After the mean over parts of a batch: two parts then equal one of both.
            out[:channels] -= alpha * backend.xp.outer(mean, mean)
        if self.with_mean:
            out[-1] += alpha * mean


@dataclass(frozen=True, slots=True)
class _Matrix:
    """The matrix ``blockdiag(I_κ ⊗ kernel, corner) + weight · update updateᵀ``, never formed."""

    kernel: Array  # ``(C, C)``
    update: Array  # ``(κ·C (+ 1),)``
    scalars: Array  # ``corner`` and ``weight``, float64

    def times(self, x: Array) -> Array:
        """Multiply the matrix by ``x``, ``(κ·C (+ 1), k)``."""
        channels = len(self.kernel)
        taps = len(self.update) // channels
        corner, weight = self.scalars
        product: Array = corner.astype(x.dtype) * x
        blocks = self.kernel @ x[: taps * channels].reshape(taps, channels, -1)
        product[: taps * channels] = blocks.reshape(taps * channels, -1)
        rank_one: Array = self.update[:, None] * (self.update @ x)
        product += weight.astype(rank_one.dtype) * rank_one
        return product


class SpatiallyUncorrelatedFactor(FisherFactor):
    """The second moment ``M`` of patches, computed from the statistics of pixels.

    It has the powers 1 and −1 only. The average holds ``C`` and, if the mean is modelled, ``μ`` as
    a further row.

    Attributes:
        stored: Inverses of the last refresh, by damping id.
    """

    def __init__(self, statistic: PixelCovariance, **options: Unpack[FactorOptions]) -> None:
        super().__init__(statistic, **options)
        self._pixels = statistic
        self._registered: dict[Hashable, Damping] = {}
        self.stored: dict[Hashable, _Matrix] = {}

    # -- the matrix ---------------------------------------------------------------------------

    @property
    def cov(self) -> Array:
        """A copy of the covariance of a pixel, ``(C, C)``."""
        return self._covariance().copy()

    @property
    def mean(self) -> Array:
        """A copy of the mean of a pixel, ``(C,)``; zeros if the factor assumes a mean of zero."""
        average = self.average.read()
        channels = average.shape[1]
        mean: Array = average[channels:].sum(axis=0)  # no row or one row
        return mean

    @property
    def side(self) -> int:
        return self._pixels.taps * len(self._covariance()) + self._pixels.homogeneous

    def measured_traces(self) -> Array:
        update = self._mean_patch()
        pixels = self._pixels.taps * self.backend.xp.trace(self._covariance())
        trace: Array = pixels + update @ update
        return trace

    def get_cov(self) -> Array:
        eye = self.backend.xp.eye(self.side, dtype=self._covariance().dtype)
        return self._damped(0.0).times(eye)

    # -- registration -------------------------------------------------------------------------

    @property
    def has_inverses(self) -> bool:
        return bool(self._registered)

    def stored_numbers(self, shape: tuple[int, ...]) -> int:
        # Each inverse is a matrix over channels, a vector over patches and two numbers.
        pixels, channels = self._pixels, shape[1]
        patch = pixels.taps * channels + pixels.homogeneous
        return len(self._registered) * (channels * channels + patch + 2)

    def register_matpower(self, exp: float, damping_func: Damping) -> None:
        self._check_power(exp)
        if exp == 1:
            return
        if self.registrations_closed:
            raise InputError(f"register powers of {self.name} before instantiate_inv_variables.")
        self._registered[damping_id(damping_func)] = damping_func

    def register_cholesky(self, damping_func: Damping) -> None:
        raise UnsupportedError(_NO_CHOLESKY)

    def register_cholesky_inverse(self, damping_func: Damping) -> None:
        raise UnsupportedError(_NO_CHOLESKY)

    def refresh_task(self) -> RefreshTask:
        levels = {key: float(damping()) for key, damping in self._registered.items()}
        if 0.0 in levels.values() and self._pixels.homogeneous:
            raise InputError(f"{self.name} has a bias: its inverse needs a positive damping.")
        cov, m = self._covariance(), self._mean_patch()

        def store(kernels: Sequence[Result]) -> None:
            self.stored = {
                key: self._inverse(kernel, m, damping)
                for (key, damping), (kernel,) in zip(levels.items(), kernels, strict=True)
            }

        return RefreshTask([Request("inverse", cov, level) for level in levels.values()], store)

    def _inverse(self, kernel: Array, m: Array, damping: float) -> _Matrix:
        """Return ``(M + δ·I)⁻¹`` from ``(C + δ·I)⁻¹``."""
        # (M + δ·I)⁻¹ = D⁻¹ − D⁻¹m (D⁻¹m)ᵀ / (1 + mᵀD⁻¹m), D the block diagonal part.
        scalars = self.backend.xp.array([1.0 / damping if damping else 0.0, 0.0])
        update = _Matrix(kernel, m, scalars).times(m[:, None])[:, 0]
        scalars[1] = -1.0 / (1.0 + (m @ update).astype(scalars.dtype))
        return _Matrix(kernel, update, scalars)

    # -- products -----------------------------------------------------------------------------

    def left_multiply_matpower(self, x: Array, exp: float, damping_func: Damping) -> Array:
        if x.ndim != 2 or len(x) != self.side:
            raise ShapeError(
                f"{self.name} is {self.side} × {self.side}; it cannot multiply an array of shape "
                f"{x.shape}."
            )
        self._check_power(exp)
        if exp == 1:
            return self._damped(float(damping_func())).times(x)
        key = damping_id(damping_func)
        if key not in self._registered:
            raise UnknownNameError(
                f"the inverse of {self.name} with this damping was not registered."
            )
        if key not in self.stored:
            raise NotReadyError(f"the inverse of {self.name} was not computed yet: refresh it.")
        return self.stored[key].times(x)

    def right_multiply_matpower(self, x: Array, exp: float, damping_func: Damping) -> Array:
        # M is symmetric.
        return self.left_multiply_matpower(x.T, exp, damping_func).T

    def left_multiply_cholesky(
        self, x: Array, damping_func: Damping, *, transpose: bool, inverse: bool
    ) -> Array:
        raise UnsupportedError(_NO_CHOLESKY)

    def right_multiply_cholesky(
        self, x: Array, damping_func: Damping, *, transpose: bool, inverse: bool
    ) -> Array:
        raise UnsupportedError(_NO_CHOLESKY)

    # -- state --------------------------------------------------------------------------------

    @property
    def operations(self) -> tuple[str, ...]:
        return ("-1.0",) * len(self._registered)

    def arrays(self) -> dict[str, Array]:
        inverses = {
            f"inverse/{index}/{part}": self.backend.to_numpy(getattr(self.stored[key], part))
            for index, key in enumerate(self._registered)
            if key in self.stored
            for part in _PARTS
        }
        return super().arrays() | inverses

    def restore(self, arrays: Mapping[str, Array], weight: float, repeats: float | None) -> None:
        super().restore(arrays, weight, repeats)
        self.stored = {
            key: _Matrix(*(self.backend.asarray(arrays[f"inverse/{index}/{p}"]) for p in _PARTS))
            for index, key in enumerate(self._registered)
            if f"inverse/{index}/kernel" in arrays
        }

    # -- private ------------------------------------------------------------------------------

    def _identity(self, like: Array) -> Array:
        eye: Array = self.backend.xp.eye(*like.shape, dtype=like.dtype)
        return eye  # C = I, μ = 0

    def _covariance(self) -> Array:
        average = self.average.read()
        return average[: average.shape[1]]

    def _mean_patch(self) -> Array:
        """Return ``m``, the mean of a patch, with 1 for a bias; zeros if the factor has no mean."""
        patch: Array = self.backend.xp.zeros(self.side, self._covariance().dtype)
        if self._pixels.with_mean:
            patch[...] = 1.0
            tiled = self.backend.xp.tile(self.mean, self._pixels.taps)
            patch[: len(tiled)] = tiled
        return patch

    def _damped(self, damping: float) -> _Matrix:
        """Return ``M + δ·I``."""
        C = self._covariance()
        eye = self.backend.xp.eye(len(C), dtype=C.dtype)
        return _Matrix(C + damping * eye, self._mean_patch(), self.backend.xp.array([damping, 1.0]))

    def _check_power(self, exp: float) -> None:
        if exp not in (1, -1):
            raise InputError(f"{self.name} has the powers 1 and -1 only, not {exp}.")


_PARTS = ("kernel", "update", "scalars")
_NO_CHOLESKY = (
    "approximation 'kron_sua' has no Cholesky factor; use 'kron', or products with powers 1 and -1."
)
