"""The measurement of a batch before an average receives it.

An update has three steps: a factor measures a batch, the measurements of several processes are
combined, and the average moves (``FisherFactor.measure``, ``Combine``, ``FisherFactor.commit``).
A measurement is deferred until its array is needed. A deferred measurement is accumulated directly
into the average, so that an update in one process allocates no second matrix.
"""

from collections.abc import Callable, Sequence
from typing import Protocol, TypeAlias

import numpy as np

from kfac_engine._types import Array, DType, Values
from kfac_engine.backend.protocol import Backend
from kfac_engine.curvature.factors.statistics import Statistic


class Measurable(Protocol):
    """The part of a factor that a measurement reads; see ``FisherFactor``."""

    statistic: Statistic
    backend: Backend
    narrowest: DType


class Measurement:
    """A statistic of one batch: the sum over its sources of means over its examples.

    Args:
        factor: The factor that measures.
        values: Checked values of the first source. A deferred measurement refers to them.

    Attributes:
        shape: Shape of the array.
        examples: Number of examples of the batch, the weight of the measurement in a mean over
            processes; 0 while the measurement is deferred.
        repeats: Uses × positions for each example.
    """

    def __init__(self, factor: Measurable, values: Values) -> None:
        statistic = factor.statistic
        # Integers are token ids or counts: they do not determine the precision of the statistic.
        types = [values[name].dtype for name in statistic.names()]
        self._dtypes = [dtype for dtype in types if dtype.kind == "f"]
        self._factor = factor
        self._values: Values | None = values
        self._array: Array | None = None
        self.shape = statistic.shape(values)
        self.repeats = statistic.repeats(values)
        self.examples = 0

    @property
    def factor(self) -> Measurable:
        """The factor that measures."""
        return self._factor

    @property
    def deferred(self) -> bool:
        """Whether the array is not computed yet."""
        return self._array is None

    @property
    def array(self) -> Array:
        """The measurement as an array, which may be changed in place.

        The first access computes the array and releases the values.
        """
        if self._array is None:
            assert self._values is not None, "a measurement enters one average"
            self.examples = self._factor.statistic.batch_size(self._values)
            array = self.zeros()
            self._accumulate(array, 1.0, 0.0)
            self._array = array
        return self._array

    def add(self, values: Values) -> None:
        """Add a further source of the same batch.

        Args:
            values: Checked values of the source; no reference to them remains.
        """
        array = self.widened(self.array)
        self._factor.statistic.add_to(array, values, self._factor.backend, 1.0, 1.0)
        self._array = array

    def add_to(self, average: Array, alpha: float, beta: float) -> None:
        """Compute ``average ← beta·average + alpha·measurement`` in place.

        Args:
            average: Array of the measurement's shape.
            alpha: Coefficient of the measurement, which is empty afterwards.
            beta: Coefficient of the average.
        """
        if self._array is None:
            self._accumulate(average, alpha, beta)
            return
        average *= beta
        self._array *= alpha
        average += self._array
        self._array = None

    def zeros(self) -> Array:
        """Return a new array of zeros with the measurement's shape and element type."""
        # Entries that statistics do not write (an upper triangle) are scaled and added as well.
        dtype = np.result_type(self._factor.narrowest, *self._dtypes)
        array: Array = self._factor.backend.xp.zeros(self.shape, dtype)
        return array

    def widened(self, array: Array) -> Array:
        """Return ``array`` in the least exact type that the factor allows, or in its own."""
        dtype = np.result_type(array.dtype, self._factor.narrowest)
        return array.astype(dtype, copy=False)

    def _accumulate(self, out: Array, alpha: float, beta: float) -> None:
        """Compute ``out ← beta·out + alpha·measurement`` from the values, and release them."""
        assert self._values is not None, "a measurement enters one average"
        factor = self._factor
        factor.statistic.add_to(out, self._values, factor.backend, alpha, beta)
        self._values = None


# Replaces the array of each measurement, in place, by its mean over all processes, weighted by the
# number of examples. Called once for each update, with the measurements in the same order on all
# processes. An error that it raises leaves all averages unchanged.
#
# The result is the measurement of the joined batches, except for: ``GradientSquare`` and
# ``GradientOuter`` of whole batches (the square of a sum), ``PixelCovariance`` with a mean, and
# ``SampledMoment``, which draws from each part. ``RotatedSquare`` needs the same basis everywhere.
Combine: TypeAlias = Callable[[Sequence[Measurement]], None]
