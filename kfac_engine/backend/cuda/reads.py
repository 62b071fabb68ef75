"""Copies small arrays of a device to the host together, because each read waits for the device."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeAlias

import numpy as np

from kfac_engine._types import Array
from kfac_engine.backend.cuda.device import CupyDevice

# An array to read, and the function that uses it.
_Later: TypeAlias = tuple[Array, Callable[[Array], None]]
# What waits for the next read of a ``shared`` block; None outside of a block.
_WAITING: ContextVar[list[_Later] | None] = ContextVar("waiting", default=None)


class DeviceReads:
    """The reads of a device; results are float64."""

    def __init__(self, device: CupyDevice) -> None:
        self._device = device

    def now(self, arrays: Sequence[Array]) -> list[Array]:
        """Return copies of arrays, and call the functions that wait for this read."""
        waiting = _WAITING.get()
        if not waiting:
            return self._copied(arrays)
        host = self._copied([*arrays, *(array for array, _ in waiting)])
        functions = [use for _, use in waiting]
        waiting.clear()
        try:
            for use, copied in zip(functions, host[len(arrays) :], strict=True):
                use(copied)
        except BaseException:
            _WAITING.set(None)  # the search for the cause of an error cannot wait
            raise
        return host[: len(arrays)]

    def later(self, array: Array, use: Callable[[Array], None]) -> None:
        """Call a function with a copy of an array: after the next read of a block, or at once."""
        waiting = _WAITING.get()
        if waiting is None:
            use(self._copied([array])[0])
        else:
            waiting.append((array, use))

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Return a block whose reads ``later`` are made with the next one, or at the end."""
        before = _WAITING.set([])
        try:
            yield
            self.now(())
        finally:
            _WAITING.reset(before)

    def _copied(self, arrays: Sequence[Array]) -> list[Array]:
        if len(arrays) < 2:
            return [self._device.download(array).astype(np.float64) for array in arrays]
        xp = self._device.xp
        # The bytes of all types are joined by a single launch.
        parts = [xp.ascontiguousarray(array).reshape(-1).view(np.uint8) for array in arrays]
        host = self._device.download(xp.concatenate(parts))
        of_each = np.split(host, np.cumsum([part.size for part in parts[:-1]]))
        return [
            part.view(array.dtype).reshape(array.shape).astype(np.float64)
            for part, array in zip(of_each, arrays, strict=True)
        ]
