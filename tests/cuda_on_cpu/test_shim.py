"""The shim that runs kernels on the CPU finds the mistakes that kernels tend to have."""

import re
import subprocess
import sys

import numpy as np
import pytest

from kfac_engine.backend.cuda.gram import PatchMoments
from kfac_engine.backend.protocol import Accumulation
from kfac_engine.kernels.launch import source
from tests.cuda_on_cpu.device import ShimDevice
from tests.cuda_on_cpu.module import ORDERS, Module, compiler
from tests.kernels.test_patch_moments import ALPHA, SCRATCH, UNTILED, truth
from tests.nightly import nightly_but

pytestmark = pytest.mark.skipif(compiler() is None, reason="needs g++ to run kernels on the CPU")

BARRIER = "__syncthreads();"


class Broken(ShimDevice):
    """A device whose compiler makes a mistake in one kernel.

    Args:
        name: The kernel's source.
        mistake: Changes its text.
        order: Of threads.
    """

    def __init__(self, name, mistake, order):
        super().__init__(order)
        self._wanted, self._mistake = source(name), mistake

    def function(self, code, name, options, shared_bytes=0):
        changed = self._mistake(code) if code == self._wanted else code
        return super().function(changed, name, options, shared_bytes)


def without(pattern, occurrence):
    """Text without the n-th match of a pattern inside the kernel itself."""

    def change(code):
        found = list(re.finditer(pattern, code))[occurrence]
        return code[: found.start()] + code[found.end() :]

    return change


# Occurrences are counted in the whole source: block_sum of the prelude has two barriers.
MISTAKES = {
    "no barrier before the product": ("patch_products", without(re.escape(BARRIER), 3)),
    "no barrier after the product": ("patch_products", without(re.escape(BARRIER), 4)),
    "no barrier before the mirror image": ("moment", without(re.escape(BARRIER), 2)),
    "a position too many": (
        "patch_products",
        lambda code: code.replace("found.counts = p < end", "found.counts = p <= end"),
    ),
    "a pixel outside the image": (
        "patch_products",
        lambda code: code.replace("(unsigned)pixel < (unsigned)g.shape", "pixel < g.shape"),
    ),
}


@pytest.mark.parametrize("mistake", nightly_but([*MISTAKES][::4], MISTAKES))
def test_mutated_kernel_gives_wrong_result(mistake):
    name, change = MISTAKES[mistake]
    case = UNTILED[0]
    # Behind the images lie others, so that reading too far shows.
    images = case.images(seed=1).astype(np.float32)
    x = np.concatenate([images, np.ones_like(images)])[: len(images)]
    wanted = ALPHA * truth(case, x, False)
    errors = []
    for order in ORDERS:
        out = np.zeros(wanted.shape, np.float32)
        moments = PatchMoments(Broken(name, change, order), SCRATCH, 0)
        moments.add(x, case.window, out, Accumulation(False, ALPHA, 0))
        worst = np.abs(out - wanted).max() / np.abs(wanted).max()
        errors.append(np.inf if np.isnan(worst) else worst)
    assert max(errors) > 1e-3


FATAL = {
    "a barrier that some threads skip": "if (threadIdx.x < 8) { __syncthreads(); }",
    "two barriers that meet": "if (threadIdx.x < 8) { __syncthreads(); }\n"
    "else { __syncthreads(); }",
}


@pytest.mark.parametrize("body", FATAL.values(), ids=FATAL)
def test_divergent_barrier_aborts_program(body):
    code = f'extern "C" __global__ void kernel(float* x) {{ {body}\n x[threadIdx.x] = 1; }}'
    program = (
        "import numpy as np\nfrom tests.cuda_on_cpu.module import Module\n"
        f"Module({code!r}).get_function('kernel')((1,), (16,), (np.zeros(16, np.float32),))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode != 0
    assert "cuda_on_cpu:" in done.stderr


def test_shared_memory_is_uninitialized():
    code = """
    extern "C" __global__ void kernel(float* x) {
      __shared__ float fixed[4];
      extern __shared__ float given[];
      x[threadIdx.x] = fixed[threadIdx.x] + given[threadIdx.x];
    }"""
    x = np.zeros(4, np.float32)
    Module(code).get_function("kernel")((1,), (4,), (x,), shared_mem=16)
    assert np.isnan(x).all()


def test_float_atomics_do_not_compile():
    code = 'extern "C" __global__ void kernel(float* x) { atomicAdd(x, 1.0f); }'
    with pytest.raises(AssertionError, match="not deterministic"):
        Module(code)
