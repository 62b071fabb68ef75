"""A stand-in for CuPy on a CPU, as strict as CuPy: its arrays never become NumPy's by themselves.

What goes to the host is counted: ``downloads`` whole arrays, ``reads`` single numbers. So is what
starts work on the device: ``launches`` of kernels, ``calls`` of functions of CuPy. Kernels run on
the CPU, thread by thread; streams are checked, see ``standin_streams``. Allocations of more than
``memory.limit`` bytes fail. ``install`` puts it where ``import cupy`` finds it, and ``begin`` takes
it or the device.
"""

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.lib.mixins import NDArrayOperatorsMixin
from scipy import linalg

from kfac_engine.backend import select
from kfac_engine.backend.cuda import device
from kfac_engine.errors import BackendError
from kfac_engine.sessions import device_session
from tests.backend import standin_nccl, standin_solvers, standin_streams
from tests.cuda_on_cpu.module import Module, compiler

# What a fixture runs on.
KINDS = ["stand-in", pytest.param("device", marks=pytest.mark.gpu)]
# What is found out once in a process.
CACHED = (
    (select, "_gpu"), (select, "_gpu_memory_space"), (device, "_cupy"),
    (device_session, "_obstacle"), (device_session, "_say"),
)  # fmt: skip

COUNTS: Counter[str] = Counter()
# Functions that return a view where they can; a copy is a launch.
_VIEWS = frozenset(
    {
        "array", "asarray", "ascontiguousarray", "astype", "atleast_1d", "broadcast_to", "diagonal",
        "expand_dims", "moveaxis", "ravel", "reshape", "split", "squeeze", "swapaxes", "transpose",
        "view",
    }
)  # fmt: skip
_ALLOCATIONS = frozenset({"empty", "empty_like"})


class ndarray(NDArrayOperatorsMixin):  # noqa: N801 (CuPy's name)
    """An array "on the device"."""

    __module__ = "cupy"

    def __init__(self, host: np.ndarray) -> None:
        self._host = host
        if host.base is None:
            memory.take(host.nbytes)
            standin_streams.wrote(host)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _wrapped(getattr(self._host, name))

    def __array__(self, *_: object, **__: object) -> np.ndarray:
        raise TypeError("implicit conversion to a host NumPy array is not allowed")

    def __dlpack__(self, **_: object) -> None:
        raise AssertionError("CuPy's own arrays are taken as they are")

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, 0

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **options: Any) -> Any:
        return _wrapped(getattr(ufunc, method))(*inputs, **options)

    def __array_function__(self, function: Callable, types: Any, args: Any, kwargs: Any) -> Any:
        return _wrapped(function)(*args, **kwargs)

    def __getitem__(self, key: Any) -> Any:
        found = self._host[_host(key)]
        COUNTS["calls"] += not _shares(found, self._host)
        return _array(found)

    def __setitem__(self, key: Any, value: Any) -> None:
        COUNTS["calls"] += 1
        self._host[_host(key)] = _host(value)
        standin_streams.wrote(self._host)

    def __len__(self) -> int:
        return len(self._host)

    def __iter__(self) -> Iterator["ndarray"]:
        return (_array(part) for part in self._host)

    def __bool__(self) -> bool:
        return bool(_read(self))

    def __int__(self) -> int:
        return int(_read(self))

    def __float__(self) -> float:
        return float(_read(self))

    def __index__(self) -> int:
        return int(_read(self))

    def item(self) -> Any:
        return _read(self).item()

    def __str__(self) -> str:
        return str(self.get())

    def tolist(self) -> Any:
        COUNTS["downloads"] += 1
        return self._host.tolist()

    @property
    def data(self) -> SimpleNamespace:
        """Its address, for a library that writes there."""
        standin_streams.reads(self._host)
        standin_streams.wrote(self._host)
        return SimpleNamespace(ptr=self._host.ctypes.data)

    def get(self) -> np.ndarray:
        standin_streams.reads(self._host)
        COUNTS["downloads"] += 1
        return self._host.copy()

    @property
    def T(self) -> "ndarray":  # noqa: N802 (NumPy's name)
        return ndarray(self._host.T)


def _shares(found: Any, source: Any) -> bool:
    """Whether an array, or the first of several, is a view of another one."""
    first = found[0] if isinstance(found, list | tuple) else found
    both = isinstance(first, np.ndarray) and isinstance(source, np.ndarray)
    return both and (not first.size or bool(np.may_share_memory(first, source)))


def _read(array: ndarray) -> np.ndarray:
    assert array._host.size == 1
    standin_streams.reads(array._host)
    COUNTS["reads"] += 1
    return array._host


def _array(value: Any) -> Any:
    """Results of NumPy as the device has them: scalars are arrays without axes."""
    if isinstance(value, np.ndarray | np.generic):
        return ndarray(np.asarray(value))
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(_array, value))
    return type(value)(map(_array, value)) if isinstance(value, tuple | list) else value


def _host(value: Any) -> Any:
    """Operands as NumPy has them; arrays of the host are refused, as CuPy refuses them."""
    if isinstance(value, ndarray):
        standin_streams.reads(value._host)
        return value._host
    if isinstance(value, np.ndarray) and value.ndim:
        raise TypeError("unsupported type <class 'numpy.ndarray'>")
    if isinstance(value, tuple | list):
        return type(value)(map(_host, value))
    return value


def _wrapped(found: Any) -> Any:
    """A function of NumPy that takes and gives arrays of the device; attributes as they are."""
    if isinstance(found, np.ndarray):
        return ndarray(found)
    if not callable(found) or isinstance(found, type):
        return found

    def call(*args: Any, **options: Any) -> Any:
        arguments = {name: _host(value) for name, value in options.items()}
        operands = [*map(_host, args)]
        with np.errstate(all="ignore"):  # a device warns of nothing
            on_host = found(*operands, **arguments)
        name, owner = found.__name__, getattr(found, "__self__", None)
        source = owner if isinstance(owner, np.ndarray) else operands[0] if operands else None
        view = name in _ALLOCATIONS or (name in _VIEWS and _shares(on_host, source))
        COUNTS["calls"] += isinstance(on_host, np.ndarray | np.generic | tuple) and not view
        result = _array(on_host)
        out = arguments.get("out")
        for written in out if isinstance(out, tuple) else (out,):
            if written is not None:
                standin_streams.wrote(written)
        return result

    return call


class RawModule:
    """Kernels, run on the CPU."""

    def __init__(self, code: str, options: tuple[str, ...] = ()) -> None:
        self._module = Module(code, options)

    def get_function(self, name: str) -> Callable[..., None]:
        launch = self._module.get_function(name)

        def run(grid: Any, block: Any, arguments: Any, *, shared_mem: int = 0) -> None:
            COUNTS["launches"] += 1
            assert shared_mem <= getattr(run, "max_dynamic_shared_size_bytes", 48 << 10)
            launch(grid, block, [_argument(a) for a in arguments], shared_mem=shared_mem)

        return run


def _argument(argument: Any) -> Any:
    """CuPy takes its own arrays, NumPy's scalars, and structs; a plain host array is a mistake."""
    if isinstance(argument, ndarray):
        return argument._host
    assert not isinstance(argument, np.ndarray) or argument.dtype.names
    return argument


def _syrk(trans: str, a: ndarray, out: ndarray, alpha: float, beta: float, lower: bool) -> None:
    """Writes one triangle, and reads the old one only where beta is not zero."""
    rows, host = a._host, out._host
    assert a._host.flags.c_contiguous
    assert host.flags.c_contiguous
    assert rows.dtype == host.dtype
    assert trans == "T"
    assert lower
    old = beta * host if beta else 0
    where = np.tri(len(host), dtype=bool)
    np.copyto(host, alpha * (rows.T @ rows) + old, where=where)


# Of cuBLAS, one after the other.
MATH_MODES = [0]


def _gemm(transa: str, transb: str, a: ndarray, b: ndarray, out: ndarray) -> None:
    assert transa == transb == "N"
    np.matmul(a._host, b._host, out=out._host)


class OutOfMemoryError(MemoryError):
    """CuPy's."""


class _Memory:
    """Refuses large allocations; ``refused`` counts them."""

    def __init__(self) -> None:
        self.limit: int | None = None
        self.refused = 0

    def take(self, size: int) -> None:
        if self.limit is not None and size > self.limit:
            self.refused += 1
            raise OutOfMemoryError(f"Out of memory allocating {size} bytes.")


memory = _Memory()


class _Cupy(ModuleType):
    """``import cupy``."""

    __path__ = ()
    ndarray = ndarray
    RawModule = RawModule
    __version__ = "14.2"
    cublas = SimpleNamespace(syrk=_syrk, gemm=_gemm)
    cuda = SimpleNamespace(
        Event=standin_streams.Mark,
        get_elapsed_time=standin_streams.elapsed_milliseconds,
        cublas=SimpleNamespace(
            getMathMode=lambda handle: MATH_MODES[-1],
            setMathMode=lambda handle, mode: MATH_MODES.append(mode),
        ),
        Device=lambda: SimpleNamespace(id=0, synchronize=lambda: None),
        Stream=standin_streams.Stream,
        get_current_stream=standin_streams.current,
        device=SimpleNamespace(
            get_cusolver_handle=lambda: standin_solvers.HANDLE,
            get_cublas_handle=lambda: standin_solvers.HANDLE,
        ),
        alloc=memory.take,
        memory=SimpleNamespace(OutOfMemoryError=OutOfMemoryError),
        runtime=SimpleNamespace(
            memGetInfo=lambda: (1 << 30, 8 << 30),
            driverGetVersion=lambda: 13000,
            runtimeGetVersion=lambda: 13000,
            getDeviceCount=lambda: 1,
            getDeviceProperties=lambda index: {
                "major": 9,
                "minor": 0,
                "multiProcessorCount": 2,
                "totalGlobalMem": 8 << 30,
                "name": b"stand-in",
            },
        ),
    )

    def __getattr__(self, name: str) -> Any:
        if name == "linalg":
            return SimpleNamespace(
                **{
                    function: _wrapped(getattr(np.linalg, function))
                    for function in ("eigh", "norm", "qr")
                }
            )
        return _wrapped(getattr(np, name))

    @staticmethod
    def asarray(value: Any, dtype: Any = None) -> ndarray:
        if isinstance(value, ndarray):
            return value if dtype is None else value.astype(dtype, copy=False)
        COUNTS["uploads"] += 1
        return ndarray(np.array(value, dtype))

    @staticmethod
    def from_dlpack(value: Any) -> ndarray:
        """A view; NumPy's cannot be written through."""
        COUNTS["shared"] += 1
        return ndarray(np.from_dlpack(value))

    @staticmethod
    def get_default_memory_pool() -> SimpleNamespace:
        return SimpleNamespace(free_all_blocks=lambda: None, total_bytes=lambda: 0)

    @staticmethod
    def asnumpy(array: ndarray) -> np.ndarray:
        return array.get()

    @staticmethod
    def empty(shape: Any, dtype: Any = float) -> ndarray:
        """Poisoned, so that reading what was not written shows."""
        kind = np.dtype(dtype)
        poison = np.nan if np.issubdtype(kind, np.floating) else 0
        return ndarray(np.full(shape, poison, kind))


def forget(patch: pytest.MonkeyPatch) -> None:
    """Find out anew what devices there are; what is known before returns with the patch's end."""
    for module, name in CACHED:
        patch.setattr(module, name, cache(getattr(module, name).__wrapped__))


def begin(kind: str, patch: pytest.MonkeyPatch) -> None:
    """Install the stand-in, or take the device; skip the test without one of them."""
    (install if kind == "stand-in" else forget)(patch)
    try:
        select.select("cupy")
    except BackendError as failure:
        pytest.skip(str(failure))


def install(patch: pytest.MonkeyPatch) -> None:
    """Let ``import cupy`` and ``import cupyx`` find the stand-in; forget what was counted."""
    if compiler() is None:
        pytest.skip("needs g++ to run kernels on the CPU")
    forget(patch)
    COUNTS.clear()
    cupy = _Cupy("cupy")
    cupyx, scipy, dense = (ModuleType(n) for n in ("cupyx", "cupyx.scipy", "cupyx.scipy.linalg"))
    dense.solve_triangular = _wrapped(_solve_triangular)
    scipy.linalg, cupyx.scipy = dense, scipy
    modules = {
        "cupy": cupy,
        "cupy.cublas": cupy.cublas,
        "cupy.cuda.nccl": standin_nccl.module(),
        "cupyx": cupyx,
        "cupyx.scipy": scipy,
        "cupyx.scipy.linalg": dense,
        **standin_solvers.modules(),
    }
    standin_solvers.CALLS.clear()
    memory.limit, memory.refused = None, 0
    for name, module in modules.items():
        patch.setitem(sys.modules, name, module)


def _solve_triangular(a: np.ndarray, b: np.ndarray, *, lower: bool) -> np.ndarray:
    """CuPy's takes stacks, and divides by zero where there is one."""
    assert a.flags.c_contiguous
    assert b.flags.c_contiguous
    return np.stack([_solve_one(one, right, lower) for one, right in zip(a, b, strict=True)])


def _solve_one(a: np.ndarray, b: np.ndarray, lower: bool) -> np.ndarray:
    if not np.diagonal(a).all():
        return np.full(b.shape, np.inf)
    return linalg.solve_triangular(a, b, lower=lower)
