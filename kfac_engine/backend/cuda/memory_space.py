"""Allocates memory on a GPU, with a stream for ONNX Runtime.

CuPy's default stream has no address that ONNX Runtime accepts, so ONNX Runtime uses a second
stream. Events on the device order the two streams.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import fsum, isfinite, sqrt
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from kfac_engine._types import Array, DType
from kfac_engine.backend.memory_space import HOST, Finite, stays_on_host

if TYPE_CHECKING:
    from kfac_engine.backend.cuda.backend import CupyBackend


class CupyMemorySpace:
    """The memory space of the current CUDA device.

    With ``tf32``, products may round float32 numbers to TF32.
    """

    kind = "cuda"

    def __init__(self, backend: "CupyBackend", *, tf32: bool) -> None:
        self._backend = backend
        self._cuda = backend.xp.cuda
        self._stream = self._cuda.Stream(non_blocking=True)
        self.index = int(self._cuda.Device().id)
        self.stream = int(self._stream.ptr)
        self.tf32 = tf32
        self.name = backend.device.name

    def as_feed(self, value: Any) -> Array:
        if isinstance(value, np.ndarray) and (
            value.dtype.kind not in "biuf" or stays_on_host(value.dtype, value.ndim)
        ):
            return HOST.as_feed(value)
        return self.to_device(value)

    def to_device(self, value: Any) -> Array:
        array = self._backend.asarray(value)
        contiguous: Array = self._backend.xp.ascontiguousarray(array)
        return contiguous.reshape(array.shape)

    def empty(self, shape: Sequence[int], dtype: npt.DTypeLike) -> Array:
        return self._backend.device.empty(shape, dtype)

    def adopt(self, value: Any, dtype: DType) -> Array:
        array: Array = self._backend.xp.from_dlpack(value).view(dtype)
        return array

    def address(self, array: Array) -> int:
        memory: Any = array.data
        return int(memory.ptr)

    def on_host(self, array: Array) -> Array:
        return self._backend.to_numpy(array)

    def finite(self, arrays: Sequence[Array], numbers: Sequence[Any] = ()) -> Finite:
        # The squares of large numbers overflow, so an infinite norm needs a check of the entries.
        on_device = [number for number in numbers if not isinstance(number, float)]
        norms, read = self._backend.squared_norms_and(arrays, on_device)
        each = [
            isfinite(squares) or bool(self._backend.xp.isfinite(array).all())
            for squares, array in zip(norms, arrays, strict=True)
        ]
        others = iter(read)
        on_host = [n if isinstance(n, float) else next(others) for n in numbers]
        return Finite(each, on_host, sqrt(fsum(norms)) if all(each) else None)

    @contextmanager
    def ordered(self) -> Iterator[None]:
        current = self._cuda.get_current_stream()
        self._stream.wait_event(current.record())
        try:
            yield
        finally:  # a failed run may have launched work
            current.wait_event(self._stream.record())

    def wait(self) -> None:
        self._stream.synchronize()

    def release(self) -> bool:
        self._backend.xp.get_default_memory_pool().free_all_blocks()
        return True
