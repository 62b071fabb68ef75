"""The base class of factors: the moving average of a statistic, and powers of it.

Life cycle: construct, register powers, ``update`` by each batch, ``refresh`` the powers, multiply.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from math import prod

import numpy as np

from kfac_engine._types import Array, DType, Thunk, Values
from kfac_engine.backend.protocol import Backend
from kfac_engine.backend.select import select
from kfac_engine.curvature.config import CollectionConfig
from kfac_engine.curvature.factors.average import MovingAverage
from kfac_engine.curvature.factors.measurement import (
    Combine,
    Measurement,
    TensorStats,
    check_examples,
    take,
    tensor_stats,
)
from kfac_engine.curvature.factors.refresh import Damping, RefreshTask, refresh
from kfac_engine.curvature.factors.statistics import Sizes, Statistic
from kfac_engine.distributed.shards import Rows
from kfac_engine.errors import InputError, NonFiniteError, NotReadyError, ShapeError
from kfac_engine.printable import shortened
from kfac_engine.summary import dimensions

_WIDE = np.dtype(np.float64)
_MOST_CHARACTERS = 80


class FisherFactor(ABC):
    """The moving average of a statistic over batches, multiplied as a matrix.

    Args:
        statistic: Formula that is measured on each batch.
        backend: Array library; NumPy by default.
        config: Options of averages and powers; the defaults if omitted.

    Attributes:
        statistic: The statistic.
        average: The moving average; ``update`` and ``commit`` change it.
        narrowest: Least exact element type that the average may have.
        companions: Factors of the same collection, by any key.
        partners: The factors of all blocks that use this factor. Dampings depend on their traces.
        traces_of_average: Result of ``traces`` for the current average; None if it is unknown.
        registrations_closed: Whether the set of registered powers is fixed.
        measures_with_results: Whether measurements read results of refreshes, such as a basis.
        is_symmetric: Whether the average and its inverses are symmetric matrices.
        is_diagonal: Whether the matrix is diagonal.
    """

    measures_with_results = False
    is_symmetric = False
    is_diagonal = False

    def __init__(
        self,
        statistic: Statistic,
        *,
        backend: Backend | None = None,
        config: CollectionConfig | None = None,
    ) -> None:
        self.statistic = statistic
        self.backend = backend or select("numpy")
        self.config = config or CollectionConfig()
        self.average = MovingAverage(name=self.name)
        self.traces_of_average: Array | None = None
        self.partners: tuple[FisherFactor, ...] = ()
        self.companions: Mapping[tuple[object, ...], FisherFactor] = {}
        self._finish: Callable[[], None] | None = None
        self.narrowest: DType = np.dtype(np.float32)
        self.registrations_closed = False
        self._averages_created = False

    @property
    def name(self) -> str:
        """Name of the statistic and of the tensors that it reads, for messages and tables."""
        names = ", ".join(dict.fromkeys(self.statistic.names()))
        return f"{type(self.statistic).__name__}({names})"

    @property
    def repeats(self) -> float | None:
        """Mean number of uses × positions of an example; None before the first batch."""
        return self.average.repeats

    def __repr__(self) -> str:
        """Return class, shape and name."""
        value = self.average.value
        shape = "without statistics" if value is None else dimensions(value.shape)
        return f"<{type(self).__name__} {shape}: {shortened(self.name, _MOST_CHARACTERS)}>"

    # -- statistics -----------------------------------------------------------------------------

    @property
    def cov(self) -> Array:
        """A copy of the current average, in the shape of the statistic.

        Raises:
            NotReadyError: No batch was averaged yet.
        """
        return self.average.read().copy()

    def check(self, values: Values, known: TensorStats | None = None) -> Sizes:
        """Check that a batch is finite and has the shape of the average.

        An update by a checked batch raises no error. Numbers whose squares overflow float32 are
        accepted: the average is float64 from this batch on.

        Args:
            values: Result of ``take``; holds every tensor of the statistic.
            known: Norms of the values; computed here if omitted.

        Returns:
            The sizes of the measurement, for ``measure``.

        Raises:
            NonFiniteError: A tensor holds NaN, infinity, or numbers whose squares, or the squares
                of whose products, overflow float64.
            ShapeError: The shapes of the tensors do not fit each other, or the measurement and the
                average have different shapes.
            InputError: The towers differ in size, or the batch has no example.
        """
        known = known or tensor_stats(self.statistic.names(), values, self.backend)
        for name in self.statistic.names():
            if not known.is_finite(name):
                self._check_large(name, values[name])
        shape, old = self.statistic.shape(values), self.average.value
        if old is not None and old.shape != shape:
            raise ShapeError(f"{self.name} has shape {old.shape}, this batch gives {shape}.")
        examples = self.statistic.batch_size(values)
        if not examples:
            raise InputError(f"the batch for {self.name} holds no example.")
        for pair in self.statistic.products():
            self._check_product(pair, values, known)
        return Sizes(shape, examples, self.statistic.repeats(values))

    def read(self, values: Values) -> dict[str, Array]:
        """Return the checked values of a batch that the statistic reads, as arrays of the backend.

        Args:
            values: Value name to array, of any library.

        Raises:
            KfacError: As ``check``. Factors of one collection must read equal numbers of examples.
        """
        lengths = (name for name in self.statistic.lengths() if name in values)
        arrays = take(values, (*self.statistic.names(), *lengths), self.backend)
        self.check(arrays)
        others = ((f.name, f.statistic) for f in self.companions.values() if f is not self)
        check_examples((self.name, self.statistic), others, values, self.backend)
        return arrays

    def measure(
        self, values: Values, sizes: Sizes | None = None, *, combined: bool = False
    ) -> Measurement:
        """Return the measurement of a batch; the average does not change.

        Args:
            values: Checked values of the batch, or of its first source. The measurement reads them
                later, unless its ``array`` is accessed.
            sizes: Result of ``check``; computed here if omitted.
            combined: Whether the measurement is combined with other parts of the batch.
        """
        sizes = sizes or Sizes.of(self.statistic, values)
        return Measurement(self, values, sizes, combined=combined)

    def prepare(self, values: Values, combine: Combine | None = None) -> None:
        """Prepare the first measurement, of a batch with all its sources. Default: do nothing."""
        del values, combine

    def set_rows(self, rows: Rows | None) -> None:
        """Set the rows of the batch that this process measures; None for all. Default: nothing."""
        del rows

    def commit(self, measurement: Measurement, decay: float, weight: float = 1.0) -> None:
        """Update the average by a measurement, in place.

        Args:
            measurement: Result of ``measure``; cannot be used again.
            decay: Weight of the old average, in [0, 1].
            weight: Weight of the measurement.
        """
        self.wait()
        beta, alpha = self.average.coefficients(
            decay, weight, self.config, measurement.rows, over_rows=self.statistic.over_rows
        )
        measurement.add_to(self._room(measurement), alpha, beta)
        self._advance(measurement)

    def update(
        self,
        values: Values,
        decay: float,
        weight: float = 1.0,
        combine: Combine | None = None,
    ) -> None:
        """Measure a batch with all its sources, and update the average.

        Args:
            values: Checked values.
            decay: Weight of the old average, in [0, 1].
            weight: Weight of the measurement.
            combine: Combines the measurements of several processes; None in one process.
        """
        self.wait()
        self.prepare(values, combine)
        measurement = self.measure(values, combined=combine is not None)
        if combine is not None:
            combine([measurement])
        self.commit(measurement, decay, weight)

    def complete(self, value: Array) -> None:
        """Complete an average in place, such as its upper triangle. Default: do nothing."""
        del value

    def _advance(self, measurement: Measurement) -> None:
        """Record a measurement that the average has received."""
        self.average.rest = self.complete
        self.traces_of_average = None

    def _check_large(self, name: str, x: Array) -> None:
        """Accept numbers whose squares need float64; refuse NaN and infinity."""
        if not self.backend.download([self.backend.are_finite([x])])[0].all():
            raise NonFiniteError(
                f"'{name}' holds NaN or infinity; the batch was not taken into {self.name}. "
                f"Lower the learning rate or check the data."
            )
        if x.dtype.itemsize >= _WIDE.itemsize:
            raise NonFiniteError(
                f"'{name}' holds numbers up to {float(abs(x).max()):.3g}, whose squares overflow; "
                f"the batch was not taken into {self.name}."
            )
        self.narrowest = _WIDE

    def _check_product(self, pair: tuple[str, str], values: Values, known: TensorStats) -> None:
        """Widen the average, or raise, if squares of products of two tensors overflow."""
        # The sum of products of an example is at most the product of its norms (Cauchy-Schwarz),
        # and the sum of their squares at most the product of the norms of all examples.
        bound = prod(known.norm_bound(name, values[name]) for name in pair)
        dtype = np.result_type(self.narrowest, *(values[n].dtype for n in pair if _real(values[n])))
        if bound < float(np.finfo(dtype).max) ** 0.5:
            return
        if bound >= float(np.finfo(_WIDE).max) ** 0.5:
            raise NonFiniteError(
                f"the products of '{pair[0]}' and '{pair[1]}' are so large that their squares "
                f"overflow; the batch was not taken into {self.name}."
            )
        self.narrowest = _WIDE

    def _room(self, measurement: Measurement) -> Array:
        """The average's own array; before the first batch, identity or zero."""
        value = self.average.value
        if value is None:
            value = measurement.zeros()
            if self.config.initial_covariance == "identity" and not self.config.debias:
                value[...] = self._identity(value)
        self.average.value = measurement.widened(value)
        return self.average.value

    @property
    def operations(self) -> tuple[str, ...]:
        """Names of the results of a refresh, in the order in which ``arrays`` numbers them."""
        return ()

    def arrays(self) -> dict[str, Array]:
        """Return the state for a checkpoint: host arrays by name."""
        if self.average.value is None:
            return {}
        return {"average": self.backend.to_numpy(self.average.read())}

    def restore(self, arrays: Mapping[str, Array], weight: float, repeats: float | None) -> None:
        """Restore the state that ``arrays`` returned."""
        self.wait()
        average = arrays.get("average")
        value = None if average is None else self.backend.asarray(average).copy()
        self.average = MovingAverage(value, weight, repeats, name=self.name)
        self.traces_of_average = None

    @abstractmethod
    def _identity(self, like: Array) -> Array:
        """Return the identity in the shape of the average."""

    # -- powers -----------------------------------------------------------------------------------

    @property
    @abstractmethod
    def has_inverses(self) -> bool:
        """Whether ``refresh`` computes anything."""

    @property
    def only_refreshes_read(self) -> bool:
        """Whether products use results of refreshes only, and the average is linear in batches."""
        return False

    def stored_numbers(self, shape: tuple[int, ...]) -> int:
        """Return how many numbers a refresh stores next to an average of this shape."""
        del shape
        return 0

    @property
    @abstractmethod
    def side(self) -> int:
        """Number of rows of the matrix that the factor represents."""

    def trace(self) -> float:
        """Return the trace of the undamped matrix."""
        return float(self.traces().sum())

    def traces(self) -> Array:
        """Return the trace of each matrix of a stack, or of a single matrix, as a host array."""
        if self.traces_of_average is None:
            self.traces_of_average = self.backend.download([self.measured_traces()])[0]
        return self.traces_of_average

    @abstractmethod
    def measured_traces(self) -> Array:
        """Compute ``traces`` as an array of the backend."""

    @abstractmethod
    def get_cov(self) -> Array:
        """Return the undamped matrix as a dense array ``(side, side)``."""

    def diagonal(self) -> Array:
        """Return the diagonal of the undamped matrix."""
        diagonal: Array = self.backend.xp.diagonal(self.get_cov())
        return diagonal

    def matrices(self) -> Array:
        """Return the diagonal blocks of the undamped matrix, ``(g, d, d)``, in lower triangles."""
        stack: Array = self.get_cov()[None]
        return stack

    def multiplications(self, shape: tuple[int, ...]) -> int:
        """Return the multiplications of a product for each entry of a vector."""
        del shape
        return 0

    def eigenvalues(self) -> Array:
        """Return the eigenvalues of the undamped matrix, ascending: a float64 host array ``(d,)``.

        A block-diagonal matrix of ``g`` groups has ``(g, d)`` eigenvalues.
        """
        return np.linalg.eigvalsh(self.backend.to_numpy(self.get_cov()).astype(_WIDE))

    @abstractmethod
    def register_matpower(self, exp: float, damping_func: Damping) -> None:
        """Have ``(C + damping·I)**exp`` computed at each refresh."""

    @abstractmethod
    def register_cholesky(self, damping_func: Damping) -> None:
        """Have the lower Cholesky factor of ``C + damping·I`` computed at each refresh."""

    @abstractmethod
    def register_cholesky_inverse(self, damping_func: Damping) -> None:
        """Have the inverse of that Cholesky factor computed at each refresh."""

    def refresh(self) -> None:
        """Recompute everything registered from the current average and dampings."""
        refresh((self,), self.backend)

    def wait(self) -> None:
        """Complete a pending refresh: wait for its results and store them."""
        if self._finish is not None:
            self._finish()

    def set_pending(self, finish: Callable[[], None] | None) -> None:
        """Set the function that completes a pending refresh; None if no refresh is pending."""
        self._finish = finish

    @property
    def averages(self) -> tuple[MovingAverage, ...]:
        """The averages that a refresh reads."""
        return (self.average,)

    @abstractmethod
    def refresh_task(self) -> RefreshTask:
        """Return the refresh of everything registered, for the current average and dampings."""

    def stored_power(self, exp: float, damping_func: Damping) -> Array | None:
        """Return ``(C + damping·I)**exp`` if it is stored as a matrix, else None."""
        return None

    @abstractmethod
    def left_multiply_matpower(self, x: Array, exp: float, damping_func: Damping) -> Array:
        """Return ``(C + damping·I)**exp · x``.

        Power 1 reads the current average, other powers read the last refresh.
        """

    @abstractmethod
    def right_multiply_matpower(self, x: Array, exp: float, damping_func: Damping) -> Array:
        """Return ``x · (C + damping·I)**exp``; see ``left_multiply_matpower``."""

    @abstractmethod
    def left_multiply_cholesky(
        self, x: Array, damping_func: Damping, *, transpose: bool, inverse: bool
    ) -> Array:
        """Return ``L·x``, ``Lᵀ·x``, ``L⁻¹·x`` or ``L⁻ᵀ·x`` with ``L Lᵀ = C + damping·I``."""

    @abstractmethod
    def right_multiply_cholesky(
        self, x: Array, damping_func: Damping, *, transpose: bool, inverse: bool
    ) -> Array:
        """Return ``x·L``, ``x·Lᵀ``, ``x·L⁻¹`` or ``x·L⁻ᵀ``; see ``left_multiply_cholesky``."""

    # -- variables and operations ---------------------------------------------------------------

    def instantiate_cov_variables(self) -> None:
        """Allow covariance updates.

        Raises:
            InputError: This method was called before.
        """
        if self._averages_created:
            raise InputError(
                f"the covariance variables of {self.name} exist already; call this method once."
            )
        self._averages_created = True

    def instantiate_inv_variables(self) -> None:
        """Prevent the registration of further powers.

        Raises:
            InputError: This method was called before.
        """
        if self.registrations_closed:
            raise InputError(
                f"the inverse variables of {self.name} exist already; call this method once."
            )
        self.registrations_closed = True

    def make_covariance_update_op(self, ema_decay: float, ema_weight: float = 1.0) -> Thunk[Array]:
        """Return a function that updates the average by a batch and returns the new average.

        Args:
            ema_decay: Weight of the old average, in [0, 1].
            ema_weight: Weight of the new measurement.

        Returns:
            A function of the values of a batch by name. All factors of a collection must read the
            same number of examples.

        Raises:
            NotReadyError: ``instantiate_cov_variables`` was not called.
        """
        if not self._averages_created:
            raise NotReadyError(f"call instantiate_cov_variables of {self.name} first.")

        def update(values: Values) -> Array:
            self.update(self.read(values), ema_decay, ema_weight)
            return self.cov

        return update

    def make_inverse_update_ops(self) -> Sequence[Callable[[], None]]:
        """Return functions that recompute all registered inverses and powers."""
        return [self.refresh] if self.has_inverses else []

    def get_cov_var(self) -> Array:
        """Return the average in its stored form; ``get_cov`` returns the dense matrix."""
        return self.cov


def _real(array: Array) -> bool:
    return bool(array.dtype.kind == "f")
