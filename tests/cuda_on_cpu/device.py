"""A device for the wrappers of kernels whose arrays are NumPy's and whose threads are fibres."""

from collections.abc import Sequence
from functools import cache

import numpy as np
import numpy.typing as npt

from kfac_engine.kernels.launch import Launch
from tests.cuda_on_cpu.module import Module


@cache
def _module(source: str, options: tuple[str, ...]) -> Module:
    return Module(source, options)


class ShimDevice:
    """Runs kernels on the CPU.

    Args:
        order: The order that threads take turns in; a name of ``ORDERS``.
        processors: Multiprocessors it says it has: more of them, more pieces of work.
    """

    def __init__(self, order: str = "forward", processors: int = 2) -> None:
        self.processors = processors
        self.launched: list[str] = []
        self._order = order

    def function(
        self, source: str, name: str, options: tuple[str, ...], shared_bytes: int = 0
    ) -> Launch:
        launch = _module(source, options).get_function(name)

        def run(
            grid: tuple[int, ...],
            block: tuple[int, ...],
            arguments: tuple[object, ...],
            *,
            shared_mem: int = 0,
        ) -> None:
            assert shared_mem <= shared_bytes
            self.launched.append(name)
            seed = len(self.launched)
            launch(grid, block, arguments, shared_mem=shared_mem, order=self._order, seed=seed)

        return run

    def upload(self, host: npt.NDArray) -> npt.NDArray:
        return host.copy()

    def address(self, array: npt.NDArray) -> int:
        return int(array.ctypes.data)

    def empty(self, shape: Sequence[int], dtype: npt.DTypeLike) -> npt.NDArray:
        """Poisoned, so that reading what was not written shows."""
        poison = np.nan if np.issubdtype(dtype, np.floating) else np.iinfo(dtype).min
        return np.full(shape, poison, dtype)
