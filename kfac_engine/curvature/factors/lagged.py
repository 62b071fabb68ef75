"""Defines factors of layers used at successive steps, with moments of one and of two uses."""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import ClassVar, TypeAlias, Unpack

import numpy as np

from kfac_engine._types import Array, Values
from kfac_engine.backend.protocol import Backend
from kfac_engine.curvature.factors.base import FactorOptions
from kfac_engine.curvature.factors.dense import DenseSquareMatrixFactor
from kfac_engine.curvature.factors.refresh import Damping, RefreshTask, Request, Result, damping_id
from kfac_engine.curvature.factors.statistics import KroneckerMoment, scale
from kfac_engine.curvature.linalg.lags import (
    Infinite,
    Symmetric,
    Whitened,
    infinite,
    symmetric,
    whiten,
    whiten_undamped,
)
from kfac_engine.errors import InputError, NotReadyError, UnknownNameError, UnsupportedError

_Side: TypeAlias = Symmetric | Infinite

# The two closed forms of the inverse: see ``curvature.linalg.lags``.
_SIDES: Mapping[int, tuple[Callable[[Whitened, Backend], _Side], type[_Side]]] = {
    1: (symmetric, Symmetric),
    2: (infinite, Infinite),
}


@dataclass(frozen=True, slots=True)
class LagMoment(KroneckerMoment):
    """Second moments ``C₀`` of a use and ``C₁`` of two successive uses, ``(2, d, d)``.

    ``C₁ = Σ x_{τ+1} x_τᵀ / (u·n)``: future × present, summed over the ``u − 1`` pairs of uses. The
    divisor is the number of uses, not of pairs: it is the moment of a sequence padded with zeros,
    whose block is positive semi-definite.
    """

    moment: ClassVar[str] = ""

    def shape(self, values: Values) -> tuple[int, ...]:
        d = self.features(values) + self.homogeneous
        return 2, d, d

    def add_to(
        self, out: Array, values: Values, backend: Backend, alpha: float, beta: float
    ) -> None:
        if self._row_weights(values) is not None:
            raise UnsupportedError(
                "'kron_series_1' and 'kron_series_2' cannot leave out uses whose targets do not "
                "count; choose 'kron_indep'."
            )
        KroneckerMoment.add_to(self, out[0], values, backend, alpha, beta)
        scale(out[1], beta)
        rows = [self.view.rows(x, backend) for x in self._arrays(values, backend)]
        total = sum(x.shape[0] * x.shape[1] for x in rows)
        flat = [x.reshape(-1, x.shape[-1]).astype(out.dtype, copy=False) for x in rows]
        for present, future in self._pairs(flat):
            self._add_pair(out[1], present, future, alpha / total)

    def _pairs(self, rows: Sequence[Array]) -> Iterator[tuple[Array, Array]]:
        """Yield the rows of each use with the rows of the next use."""
        if len(rows) > 1:
            yield from pairwise(rows)
            return
        (folded,) = rows
        one_use = len(folded) // self.num_uses
        yield folded[:-one_use], folded[one_use:]

    def _add_pair(self, out: Array, present: Array, future: Array, alpha: float) -> None:
        d = present.shape[1]
        out[:d, :d] += alpha * (future.T @ present)
        if self.homogeneous:
            out[:d, d] += alpha * future.sum(axis=0)
            out[d, :d] += alpha * present.sum(axis=0)
            out[d, d] += alpha * len(present)


class LaggedFactor(DenseSquareMatrixFactor):
    """A dense factor that can average the moment of successive uses as well."""

    is_symmetric = False  # the moment of successive uses is not

    def __init__(self, statistic: KroneckerMoment, **options: Unpack[FactorOptions]) -> None:
        super().__init__(statistic, **options)
        self._moment = statistic
        self._series: dict[tuple[int, Hashable], Damping] = {}
        self._solvers: dict[tuple[int, Hashable], _Side] = {}

    # -- statistics ---------------------------------------------------------------------------

    def register_cov_dt1(self) -> None:
        """Have the moment of two successive uses averaged as well.

        Raises:
            InputError: A batch was averaged before.
        """
        if self.has_lag:
            return
        if self.average.value is not None:
            raise InputError(f"call register_cov_dt1 of {self.name} before its first batch.")
        arguments = (field.name for field in fields(self._moment) if field.init)
        values = {name: getattr(self._moment, name) for name in arguments}
        self.statistic = LagMoment(**values)
        self.average.name = self.name

    @property
    def has_lag(self) -> bool:
        """Whether the moment of two successive uses is averaged."""
        return isinstance(self.statistic, LagMoment)

    @property
    def cov(self) -> Array:
        """A copy of ``C₀``, ``(d, d)``."""
        return self._matrix().copy()

    @property
    def cov_dt1(self) -> Array:
        """A copy of ``C₁``, ``(d, d)``, future × present.

        Raises:
            InputError: ``register_cov_dt1`` was not called.
        """
        if not self.has_lag:
            raise InputError(f"call register_cov_dt1 of {self.name} before its first batch.")
        lag: Array = self.average.read()[1].copy()
        return lag

    def _within(self, average: Array) -> Array:
        return average[0] if self.has_lag else average

    def _identity(self, like: Array) -> Array:
        eye: Array = self.backend.xp.eye(like.shape[-1], dtype=like.dtype)
        if not self.has_lag:
            return eye
        both: Array = self.backend.xp.stack([eye, self.backend.xp.zeros_like(eye)])
        return both

    # -- inverses of sums over lags -------------------------------------------------------------

    def register_series(self, option: int, damping_func: Damping) -> None:
        """Register what an inverse in closed form needs of this factor, for each refresh.

        ``option`` is 1 or 2; see ``curvature.linalg.lags``.

        Raises:
            InputError: The option is neither 1 nor 2, or the set of registered powers is fixed.
        """
        if option not in _SIDES:
            raise InputError(f"option must be 1 or 2, got {option}.")
        if self.registrations_closed:
            raise InputError(f"register option {option} before instantiate_inv_variables.")
        self.register_cov_dt1()
        self._series[option, damping_id(damping_func)] = damping_func

    def series(self, option: int, damping_func: Damping) -> _Side:
        """Return what the last refresh has computed for an inverse in closed form.

        Raises:
            UnknownNameError: The option was not registered with this damping.
            NotReadyError: No refresh has computed it.
        """
        key = option, damping_id(damping_func)
        if key not in self._series:
            raise UnknownNameError(
                f"option {option} of {self.name} was not registered with this damping."
            )
        if key not in self._solvers:
            raise NotReadyError(
                f"option {option} of {self.name} was not computed yet: update the statistics, then "
                f"refresh the inverses."
            )
        return self._solvers[key]

    def whitened(self, damping: float) -> Whitened:
        """Return the factor that products with the block use, from the current averages."""
        values, vectors = self.backend.linalg.eighs([self._matrix()])[0]
        lag = self.cov_dt1.astype(values.dtype)
        if damping == 0.0:
            rounding = len(values) * float(np.finfo(self._matrix().dtype).eps)
            return whiten_undamped(values, vectors, lag, rounding)
        clip = self.config.eigenvalue_clipping_threshold
        return whiten(values, vectors, lag, damping, clip)

    @property
    def has_inverses(self) -> bool:
        return bool(self._series) or super().has_inverses

    @property
    def only_refreshes_read(self) -> bool:
        return super().only_refreshes_read and not self.has_lag

    def stored_numbers(self, shape: tuple[int, ...]) -> int:
        sides = (sum(1 for _ in fields(_SIDES[option][1])) for option, _ in self._series)
        return super().stored_numbers(shape) + shape[-1] ** 2 * sum(sides)

    def refresh_task(self) -> RefreshTask:
        powers = super().refresh_task()
        if not self._series:
            return powers
        levels = {key: float(damping()) for key, damping in self._series.items()}

        def store(results: Sequence[Result]) -> None:
            powers.store(results[:-1])
            values, vectors = results[-1]
            lag = self.cov_dt1.astype(values.dtype)
            clip = self.config.eigenvalue_clipping_threshold
            solvers = {}
            for (option, identity), damping in levels.items():
                side = whiten(values, vectors, lag, damping, clip)
                make, _ = _SIDES[option]
                solvers[option, identity] = self._stored(make(side, self.backend))
            self._solvers = solvers

        return RefreshTask([*powers.requests, Request("eigh", self._matrix())], store)

    def _stored(self, side: _Side) -> _Side:
        """Convert the arrays of a closed form to the element type of the average."""
        arrays = {field.name: getattr(side, field.name) for field in fields(side)}
        dtype = self._matrix().dtype
        return replace(side, **{k: array.astype(dtype) for k, array in arrays.items()})

    # -- state --------------------------------------------------------------------------------

    @property
    def operations(self) -> tuple[str, ...]:
        return (*super().operations, *(f"series {option}" for option, _ in self._series))

    def arrays(self) -> dict[str, Array]:
        series = {
            f"series/{index}/{field.name}": self.backend.to_numpy(getattr(side, field.name))
            for index, key in enumerate(self._series)
            if (side := self._solvers.get(key)) is not None
            for field in fields(side)
        }
        return super().arrays() | series

    def restore(self, arrays: Mapping[str, Array], weight: float, repeats: float | None) -> None:
        super().restore(arrays, weight, repeats)
        self._solvers = {}
        for index, key in enumerate(self._series):
            _, side = _SIDES[key[0]]
            names = [field.name for field in fields(side)]
            if f"series/{index}/{names[0]}" in arrays:
                self._solvers[key] = side(
                    *(self.backend.asarray(arrays[f"series/{index}/{name}"]) for name in names)
                )
