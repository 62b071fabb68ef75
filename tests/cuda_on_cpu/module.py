"""CUDA source compiled by g++ and launched on NumPy arrays, called as CuPy's ``RawModule`` is.

Limits: blocks do not run at once, so races between blocks stay unseen, as do misaligned accesses
and the speed of anything. Those are for a device and its sanitizers.
"""

import ctypes
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from threading import Lock

import numpy as np

_HERE = Path(__file__).parent
_SHIM = _HERE / "cuda_on_cpu.hpp"
# Jumps between stacks are meant: nothing is to be fortified against them. Optimizing further would
# take longer than it saves.
_FLAGS = ("-std=c++17", "-O1", "-ffp-contract=off", "-fPIC", "-w", "-U_FORTIFY_SOURCE")
_KERNEL = re.compile(r"__global__\s+void\s+(?:__launch_bounds__\([^)]*\)\s*)?(\w+)\s*\(")
_DYNAMIC = re.compile(r"extern\s+__shared__\s+(?:__align__\(\d+\)\s+)?(\w+)\s+(\w+)\s*\[\s*\]\s*;")
_SCALARS = {
    np.dtype(name): kind
    for name, kind in {
        "float32": ctypes.c_float,
        "float64": ctypes.c_double,
        "int32": ctypes.c_int32,
        "int64": ctypes.c_int64,
    }.items()
}

# The orders that threads of a block take turns in.
ORDERS = {"forward": 0, "reversed": 1, "shuffled": 2, "warp by warp": 3}

Launch = Callable[..., None]

# Held while one thread compiles a library, or runs a kernel: both use global names and variables.
_TURN = Lock()


def compiler() -> str | None:
    """The compiler the shim needs; None where there is none.

    Other systems have others by this name, and kernels are the same everywhere.
    """
    return shutil.which("g++") if sys.platform == "linux" else None


class Module:
    """The kernels of one source.

    Args:
        code: CUDA C++ without ``#include``.
        options: Only ``-D…`` matter here.
    """

    def __init__(self, code: str, options: Sequence[str] = ()) -> None:
        self.names = tuple(dict.fromkeys(_KERNEL.findall(code)))
        flags = [flag for flag in options if flag.startswith("-D")]
        with _TURN:
            self._library = ctypes.CDLL(str(_built(_translated(code, self.names), flags)))

    def get_function(self, name: str) -> Launch:
        """A function ``launch(grid, block, arguments, shared_mem=0, order=…, seed=…)``."""
        run = getattr(self._library, f"launch_{name}")

        def launch(
            grid: Sequence[int],
            block: Sequence[int],
            arguments: Sequence[object],
            *,
            shared_mem: int = 0,
            order: str = "forward",
            seed: int = 0,
        ) -> None:
            values = [_value(argument) for argument in arguments]
            places = [ctypes.cast(ctypes.byref(value), ctypes.c_void_p) for value in values]
            packed = (ctypes.c_void_p * len(places))(*places)
            size = ctypes.c_size_t(shared_mem)
            with _TURN:
                run(_three(grid), _three(block), size, ORDERS[order], ctypes.c_uint(seed), packed)

        return launch


def _translated(code: str, names: Sequence[str]) -> str:
    room = "(uintptr_t)fibres::dynamic_shared.data() + 127) & ~(uintptr_t)127"
    code = _DYNAMIC.sub(rf"\1* \2 = (\1*)(({room});", code)
    launchers = (
        f'extern "C" void launch_{name}(const unsigned* grid, const unsigned* block, size_t bytes, '
        f"int order, unsigned seed, void** arguments) "
        f"{{ fibres::launch(&{name}, grid, block, bytes, order, seed, arguments); }}"
        for name in names
    )
    keep = "__shared__ char keep_the_section;"
    head = '#include "cuda_on_cpu.hpp"\n#line 1 "kernel.cu"'
    return "\n".join([head, code, keep, *launchers, ""])


def _built(source: str, options: Sequence[str]) -> Path:
    key = _key(source, _SHIM.read_text(), *_FLAGS, *options)
    folder = Path(tempfile.gettempdir()) / f"cuda_on_cpu_{os.getuid()}"
    folder.mkdir(exist_ok=True)
    library = folder / f"{key}.so"
    if not library.exists():
        text = folder / f"{key}.{os.getpid()}.cpp"
        text.write_text(source)
        # Parsing the shim and what it includes takes longer than all the rest.
        include = [f"-I{_precompiled(folder).parent}", f"-I{_HERE}"]
        _compiled(["-shared", *include, *options, str(text)], library)
    return library


def _precompiled(folder: Path) -> Path:
    """The shim as g++ has parsed it: found where the shim itself would be."""
    shim = _SHIM.read_text()
    parsed = folder / _key(shim, str(_HERE), *_FLAGS) / f"{_SHIM.name}.gch"
    if not parsed.exists():
        parsed.parent.mkdir(exist_ok=True)
        _compiled(["-x", "c++-header", str(_SHIM)], parsed)
    return parsed


def _compiled(arguments: Sequence[str], result: Path) -> None:
    """Run g++; processes that do so at the same time write the same."""
    made = result.with_suffix(f".{os.getpid()}")
    command = ["g++", *_FLAGS, *arguments, "-o", str(made)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[:4000]
    made.replace(result)


def _key(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]


def _three(sides: Sequence[int]) -> ctypes.Array[ctypes.c_uint]:
    return (ctypes.c_uint * 3)(*(*sides, 1, 1)[:3])


def _value(argument: object) -> object:
    """An argument as C sees it; scalars must be NumPy's, of the kernel's own type.

    An array is a pointer, but structs go by value: so it is with CuPy.
    """
    if isinstance(argument, np.ndarray) and argument.dtype.names:
        assert argument.shape == (1,)
        return (ctypes.c_char * argument.nbytes).from_buffer_copy(argument.tobytes())
    if isinstance(argument, np.ndarray):
        return ctypes.c_void_p(argument.ctypes.data)
    assert isinstance(argument, np.generic), f"pass NumPy scalars, not {type(argument)}"
    return _SCALARS[argument.dtype](argument.item())
