"""Defines the factor of EKFAC: a diagonal in the eigenbasis of a Kronecker product.

With ``A = U_A Λ_A U_Aᵀ`` and ``G = U_G Λ_G U_Gᵀ``, ``A ⊗ G`` has the eigenvectors ``U_A ⊗ U_G``.
EKFAC uses these eigenvectors, and replaces the eigenvalues by the mean of squared per-example
gradients in their basis. Among all matrices with these eigenvectors, the result is nearest to the
second moment of the gradients in Frobenius norm.

Source: George et al. 2018, arXiv:1806.03884, section 3.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias, Unpack

from kfac_engine._types import Array, Values
from kfac_engine.backend.protocol import Accumulation, Backend
from kfac_engine.curvature.factors.average import MovingAverage
from kfac_engine.curvature.factors.base import FactorOptions, FisherFactor
from kfac_engine.curvature.factors.dense import DenseSquareMatrixFactor
from kfac_engine.curvature.factors.diagonal import DiagonalFactor
from kfac_engine.curvature.factors.measurement import Measurement
from kfac_engine.curvature.factors.refresh import Damping, RefreshTask, Request, Result
from kfac_engine.curvature.factors.statistics import LayerSquare
from kfac_engine.errors import NotReadyError, ShapeError
from kfac_engine.layers.views import rows_as_images

# Returns means over all processes, from the measurements of this one.
OverRanks: TypeAlias = Callable[
    [Mapping[FisherFactor, Measurement]], Mapping[FisherFactor, Measurement]
]


@dataclass(frozen=True, slots=True)
class Bases:
    """Orthonormal eigenvectors as columns, ``U_A`` and ``U_G``.

    Their shapes are ``(d_in, d_in)`` and ``(d_out, d_out)``.
    """

    input: Array
    output: Array

    def into(self, V: Array, backend: Backend) -> Array:
        """Return ``U_Aᵀ V U_G``: packed gradients ``(…, d_in, d_out)`` in the basis."""
        return backend.matmul(backend.matmul(self.input.T, V), self.output)

    def back(self, V: Array, backend: Backend) -> Array:
        """Return ``U_A V U_Gᵀ``: the inverse of ``into``."""
        return backend.matmul(backend.matmul(self.input, V), self.output.T)


@dataclass(frozen=True, slots=True)
class RotatedSquare(LayerSquare):
    """Mean over examples of the squared per-example gradient in a basis, ``(d_in, d_out)``.

    The factor sets the basis.
    """

    bases: Bases | None = field(default=None, compare=False, repr=False)

    def _add_squares(self, out: Array, a: Array, ds: Array, backend: Backend, scale: float) -> None:
        assert self.bases is not None  # the factor sets it before it measures
        u_in, u_out = self.bases.input, self.bases.output
        positions = self.input_view.count(a.shape) // len(a)
        # Examples in chunks: the rows and the gradient of one example are as large as the layer.
        numbers = max(out.size, positions * sum(out.shape))
        step = max(1, backend.scratch_bytes // (numbers * out.itemsize))
        for start in range(0, len(ds), step):
            rows = self.input_view.rows(a[start : start + step], backend)
            weights = rows.shape[2]  # without the homogeneous coordinate
            x = backend.matmul(rows, u_in[:weights])
            if self.homogeneous:
                x += u_in[-1]
            g = backend.matmul(self.output_view.rows(ds[start : start + step], backend), u_out)
            how = Accumulation(alpha=scale, beta=1.0)
            backend.squared_gradients(*rows_as_images(x), g.swapaxes(1, 2), out[None], how)


class EigenbasisFactor(DiagonalFactor):
    """A matrix that is diagonal in the eigenbasis of ``A ⊗ G``.

    Each refresh computes the basis from the averages of ``A`` and ``G``. The average is then
    transformed to its diagonal in the new basis. The first basis comes from the first batch with
    all its sources: ``set_bases`` sets it before the first measurement. The statistic contains
    squares of per-example gradients.
    """

    measures_with_results = True

    def __init__(
        self,
        statistic: RotatedSquare,
        input_factor: DenseSquareMatrixFactor,
        output_factor: DenseSquareMatrixFactor,
        **options: Unpack[FactorOptions],
    ) -> None:
        super().__init__(statistic, **options)
        self._square = statistic
        self.kronecker_factors = input_factor, output_factor
        self.bases: Bases | None = None
        self._is_given = False

    @property
    def wants_basis(self) -> bool:
        """Whether the basis comes from the next batch."""
        return not (self.average.weight or self._is_given)

    @property
    def has_inverses(self) -> bool:
        return True

    def stored_numbers(self, shape: tuple[int, ...]) -> int:
        return sum(size * size for size in shape)

    def get_cov(self) -> Array:
        bases = self._basis()
        columns = self.backend.xp.kron(bases.input, bases.output)
        eigenvalues = self.average.read()
        dense: Array = (columns * eigenvalues.reshape(-1)) @ columns.T
        return dense

    def prepare(self, values: Values) -> None:
        set_bases([self], values)

    def begin(self, moments: Sequence[Array]) -> None:
        """Set the basis to the eigenvectors of the moments of the first batch."""
        self._set_eigenvectors(moments, self.backend.linalg.eighs(moments))

    def restart(self, bases: tuple[Array, Array]) -> None:
        """Set the basis, and forget the batches so far: the next batch is the first in the basis.

        ``bases`` are the eigenvectors of the input factor and of the output factor, on the host.
        """
        dtype = self.kronecker_factors[0].average.read().dtype
        self._set(Bases(*(self.backend.asarray(basis.astype(dtype)) for basis in bases)))
        zeros = self.backend.xp.zeros(tuple(map(len, bases)), dtype)
        self.average = MovingAverage(zeros, 0.0, name=self.name)
        self.traces_of_average, self._is_given = None, True

    @property
    def averages(self) -> tuple[MovingAverage, ...]:
        return tuple(factor.average for factor in self.kronecker_factors)

    def refresh_task(self) -> RefreshTask:
        averages = [average.read() for average in self.averages]

        def store(pairs: Sequence[Result]) -> None:
            old, value = self.bases, self.average.value
            new = self._set_eigenvectors(averages, pairs)
            self.traces_of_average = None
            if old is not None and value is not None:
                # diag(Uᵀ (W diag(s) Wᵀ) U) = (Uᵀ W)² s, and U, W are Kronecker products themselves.
                matmul = self.backend.matmul
                left = matmul(new.input.T, old.input) ** 2
                right = matmul(new.output.T, old.output) ** 2
                self.average.value = matmul(matmul(left, value), right.T).astype(value.dtype)

        return RefreshTask([Request("eigh", average) for average in averages], store)

    def left_multiply_matpower(self, x: Array, exp: float, damping_func: Damping) -> Array:
        shape = self.average.read().shape
        if x.shape != shape:
            columns = self._matrices(x, axis=0)
            product = self._multiplied(columns.T.reshape(-1, *shape), exp, damping_func)
            return product.reshape(columns.T.shape).T.reshape(x.shape)
        return self._multiplied(x, exp, damping_func)

    def right_multiply_matpower(self, x: Array, exp: float, damping_func: Damping) -> Array:
        shape = self.average.read().shape
        rows = self._matrices(x, axis=1)
        return self._multiplied(rows.reshape(-1, *shape), exp, damping_func).reshape(x.shape)

    def arrays(self) -> dict[str, Array]:
        if self.bases is None or self.average.value is None:
            return super().arrays()
        to_numpy = self.backend.to_numpy
        bases = {"basis/input": self.bases.input, "basis/output": self.bases.output}
        return super().arrays() | {name: to_numpy(basis) for name, basis in bases.items()}

    def restore(self, arrays: Mapping[str, Array], weight: float, repeats: float | None) -> None:
        super().restore(arrays, weight, repeats)
        self.bases = None
        if "basis/input" in arrays:
            bases = (arrays["basis/input"], arrays["basis/output"])
            self._set(Bases(*(self.backend.asarray(basis).copy() for basis in bases)))

    def _set_eigenvectors(
        self, moments: Sequence[Array], pairs: Sequence[Sequence[Array]]
    ) -> Bases:
        """Set the basis to the eigenvectors of two moments, the second array of each pair."""
        # Row-major, as a checkpoint restores them: products then have the same bits.
        vectors = (
            pair[1].astype(moment.dtype, order="C")
            for moment, pair in zip(moments, pairs, strict=True)
        )
        bases = Bases(*vectors)
        self._set(bases)
        return bases

    def _set(self, bases: Bases) -> None:
        self.bases = bases
        self.statistic = replace(self._square, bases=bases)

    def _basis(self) -> Bases:
        if self.bases is None:
            raise NotReadyError(f"{self.name} has no basis yet: update its statistics first.")
        return self.bases

    def _multiplied(self, V: Array, exp: float, damping_func: Damping) -> Array:
        bases = self._basis()
        power = self._power(self.average.read(), exp, damping_func)
        return bases.back(power * bases.into(V, self.backend), self.backend)

    def _matrices(self, x: Array, axis: int) -> Array:
        """Return vectors as the columns or rows of a matrix."""
        matrix = x.reshape(-1, 1) if x.ndim == 1 and axis == 0 else x
        if matrix.ndim != 2 or matrix.shape[axis] != self.side:
            raise ShapeError(
                f"{self.name} is {self.side} × {self.side}; it cannot multiply an array of shape "
                f"{x.shape} from the {'left' if axis == 0 else 'right'}."
            )
        return matrix


def without_basis(factors: Iterable[FisherFactor]) -> list[EigenbasisFactor]:
    """Return the factors whose basis comes from the next batch."""
    chosen = (factor for factor in factors if isinstance(factor, EigenbasisFactor))
    return [factor for factor in chosen if factor.wants_basis]


def set_bases(
    factors: Iterable[FisherFactor],
    values: Values,
    over_ranks: OverRanks = lambda measured: measured,
) -> None:
    """Set the bases of factors whose average has no batch yet, from the first factor's moments.

    ``over_ranks`` returns means over all processes. Errors are as for ``FisherFactor.check``; then
    no average has moved.
    """
    new = without_basis(factors)
    parts = dict.fromkeys(part for factor in new for part in factor.kronecker_factors)
    measured: dict[FisherFactor, Measurement] = {
        part: part.measure(values, part.check(values), joined=True) for part in parts
    }
    if new:
        begin_bases(new, over_ranks(measured))


def begin_bases(
    factors: Iterable[EigenbasisFactor], measured: Mapping[FisherFactor, Measurement]
) -> None:
    """Set the bases of factors to the eigenvectors of moments.

    ``measured`` has the measurement of each of their Kronecker factors.
    """
    for part, measurement in measured.items():
        part.complete(measurement.array)
    for factor in factors:
        factor.begin([measured[part].array for part in factor.kronecker_factors])
