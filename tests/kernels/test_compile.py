"""Every kernel compiles for every generation of GPUs, without spilling registers to memory."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from kfac_engine.kernels.launch import source
from kfac_engine.kernels.variants import MACROS, variants
from tests.cuda_on_cpu import nvrtc

# A block of 256 threads cannot start with more registers a thread; a block of shared memory that is
# declared statically cannot be larger.
MOST_REGISTERS = 255
MOST_SHARED_BYTES = 48 << 10

# Types of images and plain TF32 change how numbers are loaded, not what is generated for a machine:
# they are compiled for the newest and the oldest alone.
THOROUGH = ("sm_70", "sm_100")


def chosen(name: str, architecture: str) -> list[tuple[str, ...]]:
    every = list(variants(name))
    if architecture in THOROUGH:
        return every
    return [o for o in every if not {"-DINPUT=1", "-DINPUT=2", "-DSPLIT=1"}.intersection(o)]


@pytest.mark.slow
@pytest.mark.parametrize("architecture", nvrtc.ARCHITECTURES)
@pytest.mark.parametrize("name", MACROS)
def test_a_source_compiles_without_spills(name: str, architecture: str) -> None:
    if not nvrtc.installed(architecture):
        pytest.skip("no NVRTC for this architecture; install the extra 'nvrtc'")
    kernels = set()
    with ThreadPoolExecutor() as pool:
        wanted = chosen(name, architecture)
        found = pool.map(lambda options: nvrtc.resources(name, options, architecture), wanted)
        for options, taken in zip(wanted, found, strict=True):
            kernels.update(taken)
            for kernel, use in taken.items():
                assert use.spilled_bytes == 0, (kernel, options)
                assert use.registers <= MOST_REGISTERS, (kernel, options)
                assert use.shared_bytes <= MOST_SHARED_BYTES, (kernel, options)
    assert kernels


def test_a_broken_source_is_reported() -> None:
    if not nvrtc.installed("sm_90"):
        pytest.skip("no NVRTC; install the extra 'nvrtc'")
    with pytest.raises(nvrtc.CompileError, match="undefined"):
        nvrtc._compiled(source("averages").replace("alpha *", "gamma *"), (), "sm_90")


@pytest.mark.parametrize("name", MACROS)
def test_a_source_includes_nothing(name: str) -> None:
    """The compiler at run time finds no headers."""
    assert "#include" not in source(name).replace("No #include", "")
