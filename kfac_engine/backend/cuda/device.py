"""Calls the GPU through CuPy, cuBLAS and cuSOLVER; only this file's code needs a GPU.

CuPy is imported when a device is created, because it is an optional dependency and its import takes
time. Tests run all code that uses this file on a CPU, with a stand-in for CuPy. Tests with the mark
``gpu`` check the calls of this file on a device.
"""

from collections.abc import Callable, Sequence
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import Any, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from kfac_engine._types import Array
from kfac_engine.errors import BackendError, MemoryLimitError
from kfac_engine.kernels.launch import Launch

# An array of the device.
_Array: TypeAlias = Any

# The largest matrix size for which one call factorizes a whole stack, and the number of streams.
# docs/inverses.md measures other values.
STACKED_SIZE = 256
STREAMS = 4

# CUBLAS_FILL_MODE_LOWER, the faster mode of cuSOLVER. It reads rows as columns: its lower triangle
# is our upper triangle.
_LOWER = 0


class Solvers:
    """Computes factorisations on one device, in the upper triangles of arrays."""

    def __init__(self, xp: ModuleType) -> None:
        self._xp = xp
        self._calls: Any = import_module("cupy_backends.cuda.libs.cusolver")
        self._streams = [xp.cuda.Stream(non_blocking=True) for _ in range(STREAMS)]

    def cholesky(self, work: _Array) -> _Array:
        """Replace a stack of matrices with ``Lᵀ`` of ``L Lᵀ``, and return the error codes.

        ``work`` is ``(n, d, d)``, float64, C-contiguous and symmetric; its lower triangles become
        unspecified. The codes ``(n,)`` are on the device, zero where the factor exists.
        """
        count, size, _ = work.shape
        info = self._xp.zeros(count, np.int32)
        if size <= STACKED_SIZE and count > 1:
            first, step = work.data.ptr, work.strides[0]
            addresses = self._xp.arange(first, first + count * step, step, dtype=np.uintp)
            self._calls.dpotrfBatched(
                self._handle(), _LOWER, size, addresses.data.ptr, size, info.data.ptr, count
            )
            return info
        for matrix, code in zip(work, self._each(info), strict=True):
            at = self._handle(), _LOWER, size, matrix.data.ptr, size
            size = self._calls.dpotrf_bufferSize(*at)
            space = self._xp.empty(size, np.float64)
            self._calls.dpotrf(*at, space.data.ptr, size, code.data.ptr)
        return info

    def solve_lower(self, lowers: _Array) -> _Array:
        """Return ``L⁻¹`` of each matrix of a stack ``(n, d, d)``, with zeros above the diagonal."""
        xp = self._xp
        solve = import_module("cupyx.scipy.linalg").solve_triangular
        eye = xp.broadcast_to(xp.eye(lowers.shape[1], dtype=lowers.dtype), lowers.shape)
        solved: _Array = xp.tril(solve(xp.tril(lowers), xp.ascontiguousarray(eye), lower=True))
        return solved

    def fork(self, streams: int) -> list[Any]:
        """Return streams whose work starts after all earlier work of the current stream.

        If ``streams`` is zero, the list contains only the current stream.
        """
        current = self._xp.cuda.get_current_stream()
        if not streams:
            return [current]
        begun = current.record()
        for stream in self._streams[:streams]:
            stream.wait_event(begun)
        return self._streams[:streams]

    def join(self, streams: Sequence[Any]) -> None:
        """Delay later work of the current stream until the other streams have finished."""
        current = self._xp.cuda.get_current_stream()
        for stream in streams:
            if stream is not current:
                current.wait_event(stream.record())

    # -- private ----------------------------------------------------------------------------------

    def _handle(self) -> int:
        handle: int = self._xp.cuda.device.get_cusolver_handle()
        return handle

    def _each(self, info: _Array) -> Sequence[_Array]:
        return [info[index : index + 1] for index in range(len(info))]


_PROBE = """
extern "C" __global__ void add_one(float* x) { x[threadIdx.x] += 1.0f; }
"""
# Oldest compute capability for which the kernels are compiled.
_OLDEST = 70
# Least scratch memory, in bytes.
_LEAST_SCRATCH = 1 << 20

_T = TypeVar("_T")


class CupyDevice:
    """The current CUDA device.

    Raises:
        BackendError: CuPy is not installed, there is no device, or a small computation fails on it.

    Attributes:
        xp: CuPy.
        processors: Number of multiprocessors.
        name: Name of the device with its compute capability and memory.
        capability: Compute capability, ``90`` for 9.0.
        tensor_cores: Whether the device has tensor cores for TF32.
        solvers: Computes factorisations of stacks of matrices.
    """

    def __init__(self) -> None:
        self.xp = _cupy()
        cuda = self.xp.cuda
        try:
            properties = cuda.runtime.getDeviceProperties(cuda.Device().id)
            self.capability = 10 * properties["major"] + properties["minor"]
            self.processors = int(properties["multiProcessorCount"])
            self.memory = int(properties["totalGlobalMem"])
            name = properties["name"].decode()
            self._check()
            self.solvers = Solvers(self.xp)
        except (RuntimeError, OSError, ImportError, AttributeError) as failure:
            raise BackendError(f"the GPU cannot be used: {_first_line(failure)}.") from failure
        self.name = f"{name}, compute capability {self.capability / 10}, {self.memory >> 30} GiB"
        self.tensor_cores = self.capability >= 80
        self.architecture = f"sm_{self.capability}"
        self._modules: dict[tuple[str, tuple[str, ...]], Any] = {}
        self._functions: dict[tuple[str, str, tuple[str, ...]], Launch] = {}
        self._blas: Any = import_module("cupy_backends.cuda.libs.cublas")
        self._scalars = np.empty(2)  # cuBLAS reads them when it is called

    # -- kernels ----------------------------------------------------------------------------------

    def function(
        self, source: str, name: str, options: tuple[str, ...], shared_bytes: int = 0
    ) -> Launch:
        """Return the kernel ``name`` of a source; each set of options is compiled once.

        Launches may have ``shared_bytes`` of dynamic shared memory.
        """
        # `get_function` creates a kernel of CuPy in each call, which takes longer than a launch.
        key = source, name, options
        if key not in self._functions:
            function = self._module(source, options).get_function(name)
            if shared_bytes:
                function.max_dynamic_shared_size_bytes = shared_bytes
            self._functions[key] = function
        return self._functions[key]

    def upload(self, host: npt.NDArray[Any]) -> Array:
        """Return a copy of a host array on the device."""
        array: Array = self.xp.asarray(host)
        return array

    def address(self, array: Array) -> int:
        """Return the address of an array in device memory."""
        address: int = array.data.ptr  # type: ignore[attr-defined] # CuPy's
        return address

    def empty(self, shape: Sequence[int], dtype: npt.DTypeLike) -> Array:
        """Return an uninitialised array."""
        array: Array = self.xp.empty(tuple(shape), dtype)
        return array

    def download(self, array: Array) -> Array:
        """Return a copy on the host, after the device has computed the array."""
        host: Array = self.xp.asnumpy(array)
        return host

    # -- libraries --------------------------------------------------------------------------------

    def add_gram(self, rows: Array, out: Array, alpha: float, beta: float) -> None:
        """Compute the lower triangle of ``out ← beta·out + alpha·rowsᵀ rows`` by cuBLAS, in place.

        ``rows`` is ``(k, d)``. Both arrays are C-contiguous and have the same type, float32 or
        float64. A ``beta`` of zero overwrites.
        """
        self.xp.cublas.syrk("T", rows, out=out, alpha=alpha, beta=beta, lower=True)

    def add_product(
        self, kinds: str, x: Array, y: Array, out: Array, *, alpha: float, beta: float
    ) -> None:
        """Compute ``out ← beta·out + alpha·x y`` in place for each of ``n`` matrices, by cuBLAS.

        ``x``, ``y`` and ``out`` have the shape ``(n, rows, columns)`` and the type float64. They
        may be blocks of larger matrices, but the elements of a row must be adjacent. ``kinds`` has
        a letter for each factor: ``"NT"`` multiplies by the transposed ``y``. If ``beta`` is zero,
        the old values of ``out`` are not read.
        """
        # cuBLAS reads rows as columns, and therefore computes the transposed product.
        inner = x.shape[1] if kinds[0] == "T" else x.shape[2]
        operands: list[int] = []
        for array in (y, x, out):
            matrix, row, _ = array.strides
            operands += [self.address(array), row // 8, matrix // 8]
        self._scalars[:] = alpha, beta
        first, second = self._scalars.ctypes.data, self._scalars.ctypes.data + 8
        self._blas.dgemmStridedBatched(
            self.xp.cuda.device.get_cublas_handle(),
            *("NT".index(kind) for kind in reversed(kinds)),
            *(out.shape[2], out.shape[1], inner),
            *(first, *operands[:6], second, *operands[6:]),
            len(out),
        )

    def reserve(self, stored: int, scratch: int) -> None:
        """Allocate two blocks of memory and release them to CuPy's pool, for later arrays.

        One block has the bytes of averages and inverses, the other of scratch memory. If the device
        has less memory, ``MemoryLimitError`` is raised.
        """
        try:
            # Both blocks are allocated before the pool receives one, because the second block would
            # reuse the first.
            blocks = [self.xp.cuda.alloc(size) for size in (stored, scratch)]
        except self.xp.cuda.memory.OutOfMemoryError as failure:
            free, total = self._memory_figures()
            raise MemoryLimitError(
                f"factors and inverses need {stored / 1e9:.2f} GB and scratch "
                f"{scratch / 1e9:.2f} GB on the GPU, which has {free} of {total} GB "
                f"free; choose approximation 'diagonal' for the largest layers, or train fewer "
                f"parameters."
            ) from failure
        del blocks

    def within_memory(self, work: Callable[[int], _T], scratch_bytes: int) -> _T:
        """Return the result of ``work``; halve its memory while the device has too little.

        ``work`` takes the number of bytes that it may use, and must be restartable. The first
        attempt has ``scratch_bytes``. ``MemoryLimitError`` is raised if the device has no memory
        for the smallest pieces.
        """
        budget = scratch_bytes
        while True:
            try:
                return work(budget)
            except self.xp.cuda.memory.OutOfMemoryError as failure:
                self.xp.get_default_memory_pool().free_all_blocks()
                if budget <= _LEAST_SCRATCH:
                    free, total = self._memory_figures()
                    raise MemoryLimitError(
                        f"the GPU has {free} of {total} GB free, which is not "
                        f"enough for {budget / 1e6:.0f} MB of scratch beside a single matrix "
                        f"({_first_line(failure)}); choose approximation 'diagonal' for the "
                        f"largest layers, or a smaller batch."
                    ) from failure
                budget //= 2

    def affordable(self, wanted: int) -> int:
        """Return ``wanted`` bytes of scratch memory, halved until the device can allocate them.

        ``MemoryLimitError`` is raised if the device has no memory for the smallest pieces.
        """

        def taken(size: int) -> int:
            self.xp.cuda.alloc(size)  # CuPy's pool receives the memory immediately
            return size

        return self.within_memory(taken, wanted)

    # -- private ----------------------------------------------------------------------------------

    def _module(self, source: str, options: tuple[str, ...]) -> Any:
        key = source, options
        if key not in self._modules:
            flags = ("-std=c++17", *options)
            self._modules[key] = self.xp.RawModule(code=source, options=flags)
        return self._modules[key]

    def _memory_figures(self) -> tuple[str, str]:
        """Return the free and the total memory in GB, as text."""
        free, total = self.xp.cuda.runtime.memGetInfo()
        return f"{free / 1e9:.2f}", f"{total / 1e9:.2f}"

    def _check(self) -> None:
        """Raise an exception unless a small kernel and a product of matrices succeed."""
        if self.capability < _OLDEST:
            raise RuntimeError(f"its compute capability {self.capability / 10} is below 7.0")
        x = self.xp.zeros((2, 2), np.float32)
        self.xp.RawModule(code=_PROBE).get_function("add_one")((1,), (4,), (x,))
        if float((x @ x).sum()) != 8.0:
            raise RuntimeError("a small kernel returned a wrong result")


def load_nccl() -> ModuleType:
    """Return CuPy's bindings of NCCL.

    ``BackendError`` is raised if CuPy is not installed, there is no device, or CuPy finds no NCCL.
    """
    _cupy()
    nccl = import_module("cupy.cuda.nccl")
    if not nccl.available:
        raise BackendError(
            "CuPy finds no NCCL library; install nvidia-nccl-cu13 or, with CUDA 12, "
            "nvidia-nccl-cu12."
        )
    return nccl


@cache
def _cupy() -> ModuleType:
    try:
        cupy = import_module("cupy")
    except ImportError as failure:
        raise BackendError(
            f"CuPy is not installed ({_first_line(failure)}); install kfac-engine[cuda13] or "
            f"kfac-engine[cuda12]."
        ) from failure
    try:
        count = cupy.cuda.runtime.getDeviceCount()
    except RuntimeError as failure:
        raise BackendError(f"there is no usable GPU: {_first_line(failure)}.") from failure
    if not count:
        raise BackendError("there is no GPU.")
    import_module("cupy.cublas")
    return cupy


def _first_line(failure: Exception) -> str:
    return (str(failure).splitlines() or [type(failure).__name__])[0].rstrip(".")
