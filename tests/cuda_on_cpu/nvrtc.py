"""Compiles kernels to machine code with NVRTC, which needs no GPU, and reads what ptxas reports.

nvdisasm lists the machine code, of which the loops are counted.
"""

import ctypes
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Sequence
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
_BINARIES = "nvidia/cu13/bin"
_LABEL = re.compile(r"\s*(\.L_x_\d+):")
_INSTRUCTION = re.compile(r"\s+/\*[0-9a-f]+\*/\s+(.*?);")
_JUMP = re.compile(r"BRA.*`\((\.L_x_\d+)\)")
# Instructions of the pipe for integers, which starts one for a warp every other cycle.
_INTEGER = (
    *("IADD3", "VIADD", "LOP3", "SEL", "ISETP", "FSETP", "LEA", "SHF", "IABS", "PLOP3"),
    *("VIMNMX", "IMNMX", "FSEL", "FMNMX", "PRMT", "F2FP", "MOV"),
)
_ENTRY = re.compile(r"Compiling entry function '(\w+)'")
_SPILLS = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_USED = re.compile(r"Used (\d+) registers")
_SHARED = re.compile(r"(\d+) bytes smem")


class Resources(NamedTuple):
    """What one thread, or one block, of a kernel takes."""

    registers: int
    shared_bytes: int
    spilled_bytes: int


class Loop(NamedTuple):
    """Counts what a warp executes in one pass of a loop, without the loops inside it."""

    instructions: int
    integer: int  # of the pipe for integers, comparisons and conversions: two cycles each
    tensor: int  # products of tensor cores
    wide_copies: int  # asynchronous copies of 16 bytes
    narrow_copies: int  # of less
    wide_loads: int  # loads of 16 bytes
    narrow_loads: int  # of less
    local: int  # loads and stores of spilled registers


class CompileError(Exception):
    """NVRTC's log."""


def installed(architecture: str) -> bool:
    """Whether there is a compiler for an architecture."""
    return _folder(ARCHITECTURES[architecture]) is not None


def resources(name: str, options: Sequence[str], architecture: str) -> dict[str, Resources]:
    """Kernel to what it takes, of one source compiled for one architecture."""
    return _reported(_compiled(source(name), options, architecture)[0])


def disassembler() -> Path | None:
    """The program nvdisasm; None if it is not installed."""
    folder = _folder(_BINARIES)
    return folder / "nvdisasm" if folder and (folder / "nvdisasm").exists() else None


def loops(name: str, options: Sequence[str], architecture: str) -> dict[str, list[Loop]]:
    """Kernel to its loops, in the order of their ends: an inner loop before its outer loop."""
    program = disassembler()
    assert program is not None, "install the extra 'nvrtc'"
    with tempfile.TemporaryDirectory() as folder:
        code = Path(folder, "kernel.cubin")
        code.write_bytes(_compiled(source(name), options, architecture)[1])
        command = [str(program), "-c", str(code)]
        listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    sections = re.split(r"^\s*\.section\s+\.text\.(\w+)", listing, flags=re.MULTILINE)[1:]
    return {
        kernel: _loops(text) for kernel, text in zip(sections[::2], sections[1::2], strict=True)
    }


def _loops(listing: str) -> list[Loop]:
    lines: list[str] = []
    labels: dict[str, int] = {}
    edges: list[tuple[int, int]] = []
    for line in listing.splitlines():
        if label := _LABEL.match(line):
            labels[label[1]] = len(lines)
        elif instruction := _INSTRUCTION.match(line):
            jump = _JUMP.search(instruction[1])
            if jump and jump[1] in labels:
                edges.append((labels[jump[1]], len(lines)))
            lines.append(re.sub(r"^@!?U?P\w+\s+", "", instruction[1]).split()[0])
    # The last instruction jumps to itself.
    edges = [(begin, end) for begin, end in edges if begin < end]
    return [
        _counted(
            name
            for i, name in enumerate(lines[begin : end + 1], begin)
            if not any(begin <= a <= i <= b < end for a, b in edges)
        )
        for begin, end in edges
    ]


def _counted(names: Iterable[str]) -> Loop:
    counts = Counter(names)

    def of(*kinds: str, wide: bool | None = None) -> int:
        return sum(
            count
            for name, count in counts.items()
            if name.split(".")[0] in kinds and wide in (None, ".128" in name)
        )

    return Loop(
        counts.total(),
        of(*_INTEGER),
        of("HMMA"),
        of("LDGSTS", wide=True),
        of("LDGSTS", wide=False),
        of("LDG", "LD", wide=True),
        of("LDG", "LD", wide=False),
        of("LDL", "STL"),
    )


def _compiled(code: str, options: Sequence[str], architecture: str) -> tuple[str, bytes]:
    """The log of a successful compilation, and the machine code."""
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
    nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(size))
    binary = ctypes.create_string_buffer(size.value)
    nvrtc.nvrtcGetCUBIN(program, binary)
    nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    if status:
        raise CompileError(log.value.decode())
    return log.value.decode(), binary.raw


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
