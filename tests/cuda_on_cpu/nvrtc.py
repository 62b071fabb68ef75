"""Compiles kernels to machine code with NVRTC, which needs no GPU, and reads what ptxas reports."""

import ctypes
import re
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

from kfac_engine.kernels.launch import source

# Compute capability to where in site-packages the compiler lies that knows it.
_NEW, _OLD = "nvidia/cu13/lib", "nvidia/cuda_nvrtc/lib"
ARCHITECTURES = {
    "sm_70": _OLD,  # gone from CUDA 13
    "sm_75": _NEW,
    "sm_80": _NEW,
    "sm_86": _NEW,
    "sm_89": _NEW,
    "sm_90": _NEW,
    "sm_100": _NEW,
}
FLAGS = ("-std=c++17", "--ptxas-options=-v")
_ENTRY = re.compile(r"Compiling entry function '(\w+)'")
_SPILLS = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_USED = re.compile(r"Used (\d+) registers")
_SHARED = re.compile(r"(\d+) bytes smem")


class Resources(NamedTuple):
    """What one thread, or one block, of a kernel takes."""

    registers: int
    shared_bytes: int
    spilled_bytes: int


class CompileError(Exception):
    """NVRTC's log."""


def installed(architecture: str) -> bool:
    """Whether there is a compiler for an architecture."""
    return _folder(ARCHITECTURES[architecture]) is not None


def resources(name: str, options: Sequence[str], architecture: str) -> dict[str, Resources]:
    """Kernel to what it takes, of one source compiled for one architecture."""
    return _reported(_compiled(source(name), options, architecture))


def _compiled(code: str, options: Sequence[str], architecture: str) -> str:
    """The log of a successful compilation."""
    nvrtc = _library(ARCHITECTURES[architecture])
    program = ctypes.c_void_p()
    create = nvrtc.nvrtcCreateProgram
    assert create(ctypes.byref(program), code.encode(), b"kernel.cu", 0, None, None) == 0
    flags = [f"-arch={architecture}", *FLAGS, *options]
    packed = (ctypes.c_char_p * len(flags))(*[flag.encode() for flag in flags])
    status = nvrtc.nvrtcCompileProgram(program, len(flags), packed)
    size = ctypes.c_size_t()
    nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value)
    nvrtc.nvrtcGetProgramLog(program, log)
    nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    if status:
        raise CompileError(log.value.decode())
    return log.value.decode()


def _reported(log: str) -> dict[str, Resources]:
    found: dict[str, Resources] = {}
    name, spilled = "", 0
    for line in log.splitlines():
        if entry := _ENTRY.search(line):
            name = entry[1]
        elif spills := _SPILLS.search(line):
            spilled = sum(map(int, spills.groups()))
        elif used := _USED.search(line):
            shared = _SHARED.search(line)
            found[name] = Resources(int(used[1]), int(shared[1]) if shared else 0, spilled)
    return found


def _folder(relative: str) -> Path | None:
    return next((Path(p, relative) for p in sys.path if Path(p, relative).is_dir()), None)


@cache
def _library(relative: str) -> ctypes.CDLL:
    folder = _folder(relative)
    assert folder is not None, "install the extra 'nvrtc'"
    for part in sorted(folder.glob("libnvrtc-builtins.so*")):  # not found by itself
        ctypes.CDLL(str(part), mode=ctypes.RTLD_GLOBAL)
    return ctypes.CDLL(str(next(folder.glob("libnvrtc.so*"))))
