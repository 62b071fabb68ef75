"""Defines factors, which average a statistic over batches and compute powers of the average.

Life cycle of a factor: construct, register powers, ``update`` by each batch, ``refresh`` the
powers, multiply.

An update has three steps: a factor measures a batch, the measurements of its parts and of several
processes are joined, and the average moves (``FisherFactor.measure``, ``Measurement.share``,
``FisherFactor.commit``). A whole batch is measured straight into the average (``to_measure``).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from math import isfinite, prod, sqrt
from typing import Any, TypedDict

import numpy as np

from kfac_engine._types import Array, DType, OfValues, Values
from kfac_engine.backend.namespace import recordable
from kfac_engine.backend.protocol import Backend
from kfac_engine.backend.select import select
from kfac_engine.curvature.config import CollectionConfig
from kfac_engine.curvature.factors.average import MovingAverage
from kfac_engine.curvature.factors.measurement import Measurement, Part, ToMeasure, type_of_mean
from kfac_engine.curvature.factors.refresh import (
    UNDIVIDED,
    Damping,
    Division,
    RefreshTask,
    begin_requests,
)
from kfac_engine.curvature.factors.statistics import Count, Sizes, Statistic
from kfac_engine.distributed.shards import RowRange
from kfac_engine.errors import (
    InputError,
    NonFiniteError,
    NotReadyError,
    ShapeError,
    UnknownNameError,
)
from kfac_engine.losses.checks import Named
from kfac_engine.printable import shortened
from kfac_engine.summary import dimensions

_WIDE = np.dtype(np.float64)
_MOST_CHARACTERS = 80


# -- the values of a batch ------------------------------------------------------------------------


def named_arrays(values: Named, names: Iterable[str], backend: Backend) -> dict[str, Array]:
    """Return values of a batch as arrays of the backend, which are views where possible.

    ``UnknownNameError`` is raised if a value is missing.
    """
    arrays: dict[str, Array] = {}
    for name in names:
        try:
            arrays[name] = backend.asarray(values[name])
        except KeyError as missing:
            raise UnknownNameError(
                f"the statistics read '{name}', but the batch has no value of that name."
            ) from missing
    return arrays


def check_examples(
    updated: tuple[str, Statistic],
    others: Iterable[tuple[str, Statistic]],
    values: Values,
    backend: Backend,
) -> None:
    """Raise ``InputError`` if a batch has different numbers of examples for different factors.

    ``updated`` is the name and the statistic of the factor that is updated. It is compared with the
    first of ``others`` whose values are all in the batch.
    """
    expected = _examples(updated[1], values, backend)
    for name, statistic in others:
        examples = _examples(statistic, values, backend)
        if examples is not None and examples != expected:
            raise InputError(
                f"{updated[0]} reads {expected} examples, but {name} reads {examples}; give both "
                f"the values of one batch."
            )
        if examples is not None:
            return


def _examples(statistic: Statistic, values: Values, backend: Backend) -> int | None:
    """Return the number of examples; None if values that determine it are missing."""
    names = statistic.names()
    values = {name: values[name] for name in (*names, *statistic.lengths()) if name in values}
    arrays = {n: v if hasattr(v, "shape") else backend.asarray(v) for n, v in values.items()}
    shapes = {n: np.broadcast_to(np.zeros(()), tuple(a.shape)) for n, a in arrays.items()}
    if not shapes.keys() >= set(names):
        return None
    try:
        return statistic.batch_size(shapes)
    except UnknownNameError:
        return None


@dataclass(frozen=True, slots=True)
class TensorStats:
    """Norms of the values of a batch, computed once for all factors.

    A sum of squares is not finite if it overflows the type of its value.
    """

    squared_norms: Mapping[str, float]

    @property
    def all_finite(self) -> bool:
        """Whether the sums of squares of all values are finite."""
        return all(map(isfinite, self.squared_norms.values()))

    def is_finite(self, name: str) -> bool:
        """Return whether the sum of squares of a value is finite."""
        return isfinite(self.squared_norms[name])

    def norm_bound(self, name: str, x: Array) -> float:
        """Return an upper bound of the norm of ``x`` with a one appended to each entry."""
        if self.is_finite(name):
            return sqrt(self.squared_norms[name] + x.size)
        return (float(abs(x).max()) + 1.0) * sqrt(x.size)


def tensor_stats(names: Sequence[str], values: Values, backend: Backend) -> TensorStats:
    """Return the norms of values of a batch, where ``values`` is the result of ``take``."""
    norms = backend.squared_norms([values[name] for name in names])
    return TensorStats(dict(zip(names, norms, strict=True)))


class FactorOptions(TypedDict, total=False):
    """The keyword arguments of every factor."""

    backend: Backend | None  # array library; NumPy by default
    config: CollectionConfig | None  # options of averages and powers; the defaults if omitted


class FisherFactor(ABC):
    """The moving average of a statistic over batches, multiplied as a matrix.

    Args:
        statistic: Formula that is measured on each batch.
        backend: Array library; NumPy by default.
        config: Options of averages and powers; the defaults if omitted.

    Attributes:
        statistic: The statistic.
        sources: The statistics of several parts of the batch whose tensors have names of their own,
            ``[source][part]``; empty for one. They differ from ``statistic`` in the names only.
        average: The moving average; ``update`` and ``commit`` change it.
        narrowest: Least exact element type that the average may have.
        companions: Factors of the same collection, by any key.
        partners: The factors of all blocks that use this factor. Dampings depend on their traces.
        traces_of_average: Result of ``traces`` for the current average; None if it is unknown.
        registrations_closed: Whether the set of registered powers is fixed.
        measures_with_results: Whether measurements read results of refreshes, such as a basis.
        is_symmetric: Whether the average and its inverses are symmetric matrices.
        is_diagonal: Whether the matrix is diagonal.
        damped_by_feature: Returns whether each feature is damped in units of its own moment.
    """

    damped_by_feature: Callable[[], bool] = staticmethod(lambda: False)
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
        self.sources: tuple[tuple[Statistic, ...], ...] = ()
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
        return f"{type(self.statistic).__name__}({', '.join(dict.fromkeys(self.names()))})"

    def set_sources(self, sources: Sequence[Sequence[Statistic]]) -> None:
        """Set ``sources``; a single part of a single source is the statistic itself."""
        several = len(sources) > 1 or len(sources[0]) > 1
        self.sources = tuple(map(tuple, sources)) if several else ()
        self.average.name = self.name

    def names(self) -> tuple[str, ...]:
        """Return the names of all values that measurements read."""
        if not self.sources:
            return self.statistic.names()
        return tuple(name for part in chain(*self.sources) for name in part.names())

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
            InputError: The parts of the batch differ in size, or the batch has no example.
        """
        known = known or tensor_stats(self.names(), values, self.backend)
        for name in self.names():
            if not known.is_finite(name):
                self._check_large(name, values[name])
        statistics, old = self._statistics(), self.average.value
        sizes = Sizes.of_parts(statistics, values)
        if old is not None and old.shape != sizes.shape:
            raise ShapeError(f"{self.name} has shape {old.shape}, this batch gives {sizes.shape}.")
        if not sizes.count.examples:
            raise InputError(f"the batch for {self.name} holds no example.")
        for statistic in chain(*statistics):
            for pair in statistic.products():
                self._check_product(pair, values, known)
        return sizes

    def read(self, values: Values) -> dict[str, Array]:
        """Return the checked values of a batch that the statistic reads, as arrays of the backend.

        Args:
            values: Arrays by value name, of any library.

        Raises:
            KfacError: As ``check``. Factors of one collection must read equal numbers of examples.
        """
        lengths = (name for name in self.statistic.lengths() if name in values)
        arrays = named_arrays(values, (*self.names(), *lengths), self.backend)
        self.check(arrays)
        others = ((f.name, f.statistic) for f in self.companions.values() if f is not self)
        check_examples((self.name, self.statistic), others, values, self.backend)
        return arrays

    def measure(
        self,
        values: Values,
        sizes: Sizes | None = None,
        *,
        joined: bool = False,
        before: Measurement | None = None,
    ) -> Measurement:
        """Return the measurement of a batch in a new array; the average does not change.

        Args:
            values: Checked values of the batch, or of its first source.
            sizes: Result of ``check``; computed here if omitted.
            joined: Whether the batch is a part of another one, or a shard of a process. If the
                statistic squares sums over a batch, the array then has the sums.
            before: The measurement of earlier parts; the result then measures all parts so far,
                in the same array.
        """
        if not self.sources:
            sizes = sizes or Sizes.of(self.statistic, values)
            return self._measured(self.statistic, values, sizes, before, joined=joined)
        measured: Measurement | None = None
        for source in self._statistics():
            mean: Measurement | None = None
            for part in source:
                mean = self._measured(part, values, Sizes.of(part, values), mean)
            assert mean is not None, "a source has a part"
            measured = mean if measured is None else self._with_source(measured, mean.array)
        assert measured is not None, "there is a source"
        return measured if before is None else self.join(before, measured)

    def _measured(
        self,
        statistic: Statistic,
        values: Values,
        sizes: Sizes,
        before: Measurement | None,
        *,
        joined: bool = True,
    ) -> Measurement:
        """Measure one part of one source; see ``measure``."""
        backend = self.backend
        square = joined and statistic.of_sums
        dtype = np.result_type(self.narrowest, type_of_mean(values, statistic.names()))
        if square:
            array, count = statistic.sums(values, dtype, backend), sizes.count
            part = Measurement(array, count, sizes.shape)
            return part if before is None else self.join(before, part)
        if before is None:
            array, count, alpha, beta = backend.xp.zeros(sizes.shape, dtype), sizes.count, 1.0, 0.0
        else:
            count = before.count + sizes.count
            array = before.array.astype(np.result_type(before.array.dtype, dtype), copy=False)
            alpha = statistic.share(sizes.count, count)
            beta = statistic.share(before.count, count) if alpha else 1.0
        # Entries that statistics do not write (an upper triangle) are scaled and added as well.
        statistic.add_to(array, values, backend, alpha, beta)
        return Measurement(array, count)

    def to_measure(self, values: Values, sizes: Sizes | None = None) -> ToMeasure:
        """Return a checked batch, which ``commit`` measures into the average; see ``measure``."""
        sizes = sizes or Sizes.of(self.statistic, values)
        return ToMeasure(values, sizes, sizes.count, self.statistic.names())

    def add_source(self, measurement: Measurement, values: Values) -> Measurement:
        """Add a further source of the batch to a measurement; its array is reused."""
        if self.sources:
            return self._with_source(measurement, self.measure(values).array)
        array = self.widened(measurement.array)
        if measurement.squared is not None:
            sums = self.statistic.sums(values, array.dtype, self.backend)
            return self._with_source(replace(measurement, array=array), sums)
        self.statistic.add_to(array, values, self.backend, 1.0, 1.0)
        return replace(measurement, array=array)

    def _with_source(self, measurement: Measurement, source: Array) -> Measurement:
        """Return a measurement to which another source is added: its mean, or sums to square."""
        if measurement.squared is None:
            return replace(measurement, array=measurement.array + source)
        joined = self.backend.xp.concatenate([measurement.array, source])
        return replace(measurement, array=joined)

    def _statistics(self) -> list[list[Statistic]]:
        """Return the statistic with the names of each part, ``[source][part]``."""
        if not self.sources:
            return [[self.statistic]]
        return [[self.statistic.renamed(part) for part in source] for source in self.sources]

    def join(self, first: Measurement, second: Measurement) -> Measurement:
        """Return the measurement of two parts of a batch; the arrays are reused."""
        count = first.count + second.count
        dtype = np.result_type(first.array.dtype, second.array.dtype)
        array = first.array.astype(dtype, copy=False)
        part = self.statistic.share(second.count, count)
        array *= self.statistic.share(first.count, count) if part else 1.0
        array += part * second.array
        return replace(first, array=array, count=count)

    def share(self, part: Part, total: Count) -> Part:
        """Scale a part to its share in a batch of the count ``total``; its array is reused."""
        return part.share(self.statistic.share(part.count, total), total, self.narrowest)

    def widened(self, array: Array) -> Array:
        """Return ``array`` in its own type, or in ``narrowest`` if that is more exact."""
        return array.astype(np.result_type(array.dtype, self.narrowest), copy=False)

    def prepare(self, values: Values) -> None:
        """Prepare for the first batch, whose tensors are ``values``. Default: do nothing."""
        del values

    def set_rows(self, rows: RowRange | None) -> None:
        """Set the rows of the batch that this process measures; None for all. Default: nothing."""
        del rows

    def commit(
        self,
        measurement: Measurement | ToMeasure,
        decay: float,
        weight: float = 1.0,
        *,
        counts: bool = True,
    ) -> None:
        """Update the average by a measurement, in place.

        Args:
            measurement: Result of ``measure`` or ``to_measure``; cannot be used again.
            decay: Weight of the old average, in [0, 1].
            weight: Weight of the measurement.
            counts: Whether the average receives the measurement.
        """
        self.wait()
        average, room = self.average, self.average.value
        if room is None:  # identity or zeros before the first batch
            room = self.backend.xp.zeros(measurement.shape, measurement.dtype)
            if self.config.initial_covariance == "identity" and not self.config.debias:
                room[...] = self._identity(room)
        average.value = room = self.widened(room)
        rows = measurement.count.rows / measurement.count.examples
        if counts:
            beta, alpha = average.coefficients(
                decay, weight, self.config, rows, over_rows=self.statistic.over_rows
            )
            measurement.enter(room, self.statistic, self.backend, alpha, beta)
        elif average.repeats is None:
            average.repeats = rows or 1.0  # a number until rows count
        self._advance()

    def update(self, values: Values, decay: float, weight: float = 1.0) -> None:
        """Measure a batch with all its sources, and update the average.

        Args:
            values: Checked values.
            decay: Weight of the old average, in [0, 1].
            weight: Weight of the measurement.
        """
        self.wait()
        self.prepare(values)
        measure = self.measure if self.sources else self.to_measure
        self.commit(measure(values), decay, weight)

    def complete(self, value: Array) -> None:
        """Complete an average in place, such as its upper triangle. Default: do nothing."""
        del value

    def _advance(self) -> None:
        """Record that the average has received a measurement."""
        self.average.rest = self.complete
        self.traces_of_average = None

    def _check_large(self, name: str, x: Array) -> None:
        """Accept numbers whose squares need float64; refuse NaN and infinity."""
        if not self.backend.download([self.backend.are_finite([x])])[0].all():
            raise NonFiniteError(
                f"'{name}' holds NaN or infinity, so the batch was not added to {self.name}. "
                f"Lower the learning rate or check the data."
            )
        if x.dtype.itemsize >= _WIDE.itemsize:
            raise NonFiniteError(
                f"'{name}' holds numbers up to {float(abs(x).max()):.3g}, whose squares overflow, "
                f"so the batch was not added to {self.name}."
            )
        self.narrowest = _WIDE

    def _check_product(self, pair: tuple[str, str], values: Values, known: TensorStats) -> None:
        """Widen the average, or raise, if squares of products of two tensors overflow."""
        # The sum of products of an example is at most the product of its norms (Cauchy-Schwarz),
        # and the sum of their squares at most the product of the norms of all examples.
        bound = prod(known.norm_bound(name, values[name]) for name in pair)
        dtypes = (values[name].dtype for name in pair)
        dtype = np.result_type(self.narrowest, *(dtype for dtype in dtypes if dtype.kind == "f"))
        if bound < float(np.finfo(dtype).max) ** 0.5:
            return
        if bound >= float(np.finfo(_WIDE).max) ** 0.5:
            raise NonFiniteError(
                f"the products of '{pair[0]}' and '{pair[1]}' are so large that their squares "
                f"overflow, so the batch was not added to {self.name}."
            )
        self.narrowest = _WIDE

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
        """Return the trace of each matrix of a stack, or of a single matrix, as a host array.

        One read of a device measures the traces of all companions that dampings will need.
        """
        if self.traces_of_average is None:
            others = (factor for factor in self.companions.values() if factor.partners)
            stale = [f for f in dict.fromkeys((self, *others)) if f is self or f.is_stale]
            traces = self.backend.download([factor.measured_traces() for factor in stale])
            for factor, of_factor in zip(stale, traces, strict=True):
                factor.traces_of_average = of_factor
            return traces[0]
        return self.traces_of_average

    @property
    def is_stale(self) -> bool:
        """Whether this process has the whole average but has not computed its traces."""
        is_here = self.average.value is not None and not self.average.divided
        return is_here and self.traces_of_average is None

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

    def matrix_side(self, shape: tuple[int, ...]) -> int:
        """Return the number of rows of the matrix, or of each matrix of a stack."""
        return int(shape[-1])

    def blocks(self, shape: tuple[int, ...]) -> int:
        """Return into how many blocks an average of this shape divides the matrix."""
        del shape
        return 1

    @recordable
    def times(self, power: Array, x: Array) -> Array:
        """Return the product of a power, in the form of the average, and a matrix or stack."""
        product: Array = power[:, None] * x if power.ndim == 1 else power @ x
        return product

    def shrinkage(self, examples: float) -> float:
        """Return the relative damping by which an average of few rows shrinks.

        ``examples`` is their number in an update of the average.
        """
        del examples
        return 0.0

    def moments(self, average: Any, xp: Any = np) -> Any:
        """Return the second moments of features, to which a damping by feature is proportional.

        Args:
            average: The average, or a recorded one.
            xp: Its array module.

        Returns:
            The diagonal; larger numbers replace entries far below the median.
        """
        raise NotImplementedError  # of factors that are ``damped_by_feature`` only

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
        """Have the inverse Cholesky factor of ``C + damping·I`` computed at each refresh."""

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

    def make_covariance_update_op(
        self, ema_decay: float, ema_weight: float = 1.0
    ) -> OfValues[Array]:
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


def refresh(factors: Sequence[FisherFactor], backend: Backend) -> None:
    """Recompute everything registered with factors from their averages and dampings.

    Results are stored after all of them were computed. A factor that stores nothing is skipped.

    Raises:
        NotReadyError: A factor has no average yet.
        NonFiniteError: An average contains NaN or infinity.
        InputError: A damping is wrong, or a damped matrix has no such power.
    """
    begin_refresh(factors, backend)()


def begin_refresh(
    factors: Sequence[FisherFactor], backend: Backend, division: Division = UNDIVIDED
) -> Callable[[], None]:
    """Begin a refresh, so that a device computes inverses while the host continues.

    The returned function waits for the results and stores them at its first call. A factor calls it
    before its average changes. Errors are as for ``refresh``; the returned function raises
    ``InputError``.
    """
    due = [factor for factor in factors if factor.has_inverses]
    if not due:
        return lambda: None
    for factor in due:
        factor.wait()
    due = list(division.hand_over(due))
    if not due:
        return lambda: None
    _measure_traces(due, backend)
    tasks = [factor.refresh_task() for factor in due]
    results = division.compute(due, tasks, partial(begin_requests, backend))

    def finish() -> None:
        for factor in due:
            factor.set_pending(None)
        computed = results()
        for task in tasks:
            task.store([*map(computed.__getitem__, task.requests)])

    for factor in due:
        factor.set_pending(finish)
    return due[0].wait


def _measure_traces(due: Sequence[FisherFactor], backend: Backend) -> None:
    """Check that averages are finite, and measure the traces that dampings depend on.

    One transfer from a device serves all averages and traces. ``NonFiniteError`` is raised if an
    average contains NaN or infinity.
    """
    averages = list({id(a): a for factor in due for a in factor.averages}.values())
    partners = list({id(p): p for factor in due for p in factor.partners}.values())
    lower = [average.lower() for average in averages]
    partners = [factor for factor in partners if factor.traces_of_average is None]
    traces = [factor.measured_traces() for factor in partners]
    finite, *traces = backend.download([backend.are_finite(lower), *traces])
    for average, is_finite in zip(averages, finite, strict=True):
        # Entries above the diagonal are not defined before ``read``.
        if not is_finite and not _is_finite(average.read(), backend):
            raise NonFiniteError(f"the average of {average.name} holds NaN or infinity.")
    for factor, of_factor in zip(partners, traces, strict=True):
        factor.traces_of_average = of_factor


def _is_finite(array: Array, backend: Backend) -> bool:
    return bool(backend.download([backend.are_finite([array])])[0].all())
