"""What kernels are expected to take on an H200: floors from sizes, fractions of them from reasons."""
# ruff: noqa: E501 (rows of the page)

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from kfac_engine.bench import gpu_counts
from kfac_engine.bench.gpu_counts import Counted
from kfac_engine.bench.gpu_meter import FLOAT32, FLOAT64, SPLIT, TF32, GpuRates
from kfac_engine.bench.resnet50 import resnet50
from kfac_engine.kernels.variants import variants
from scripts.compile_kernels import compiled, entry

_BATCH = 32
# Of an H200: float32 units 60 TFLOP/s, TF32 by mma.sync 400, float64 60, memory 4.3 TB/s.
H200 = GpuRates(4.3e12, {FLOAT32: 30e12, TF32: 200e12, SPLIT: 200e12 / 3, FLOAT64: 30e12})


class Expected(NamedTuple):
    """Part of the rate of the floor that is expected, in percent, and why.

    Attributes:
        least: Percent.
        most: Percent.
        reason: What keeps it from the floor.
    """

    least: int
    most: int
    reason: str


_STREAM = Expected(60, 90, "reads and writes along rows")
_KERNELS: Mapping[str, Expected] = {
    "moment": Expected(35, 55, "as all factors; the border reads the images once more"),
    "groups": Expected(15, 30, "some 200 instructions to find the nine pixels of 45 products"),
    "squares": Expected(25, 45, "products from shared memory in FP32 units, four by four a thread"),
    "channels": Expected(20, 40, "as many instructions to find pixels"),
    "diagonal": Expected(50, 80, "two launches"),
    "patches": Expected(20, 40, "divisions for each number"),
    "sums": Expected(40, 70, "a warp an entry: tails of 32"),
    "classes": Expected(10, 25, "the exponential in float64, twice"),
    "ids": Expected(20, 50, "counts in the second-level cache"),
    "finite": _STREAM,
    "average": _STREAM,
    "mirror": _STREAM,
    "widen": _STREAM,
    "narrow": _STREAM,
}


def _tensor() -> Expected:
    """The expectation for products on tensor cores, whose blocks have 128 threads."""
    taken = [
        compiled("patch_products")[entry(variant, "sm_90")]["patch_products"].registers
        for variant in variants("patch_products")
        if {"-DSPLIT=3", "-DINPUT=0"} <= {*variant}
    ]
    registers = f"{min(taken)} to {max(taken)} registers"
    return Expected(40, 60, f"four warps of {registers} a block: loads are not hidden wholly")


def predictions() -> Iterator[str]:
    """The section of the page, line by line."""
    yield "## What is expected of a device\n"
    yield "**Predictions, not measurements**: `kfac-engine bench --suite gpu` measures them. The floor of a job is the longer"
    yield "of two times on an H200: the time of its products, and the time of its bytes at 4.3 TB/s. The rates of products are"
    yield "60 TFLOP/s in float32 and float64, and 133 TFLOP/s in 3 × TF32."
    yield f"The ResNet-50 has batch {_BATCH}.\n"
    yield "| work | GFLOP | GB | products in | floor, ms | expected, ms | because |"
    yield "|---|---|---|---|---|---|---|"
    for counted, kind, expected in _rows():
        floor = 1e3 * H200.floor(counted, kind)
        slow, fast = (100 * floor / part for part in (expected.least, expected.most))
        yield (
            f"| {counted.case} | {_figures(2e-9 * counted.products)} | {_figures(1e-9 * counted.moved)} "
            f"| {kind if counted.products else '–'} | {_figures(floor)} "
            f"| {_figures(fast)} – {_figures(slow)} | {expected.reason} |"
        )


def _rows() -> Iterator[tuple[Counted, str, Expected]]:
    layers = resnet50()
    inputs, outputs = (
        count(layers, _BATCH) for count in (gpu_counts.input_factors, gpu_counts.output_factors)
    )
    yield inputs, SPLIT, _tensor()
    yield inputs, FLOAT32, Expected(50, 70, "a read of shared memory for four products")
    yield inputs, TF32, Expected(25, 45, "loads of four bytes keep tensor cores waiting")
    yield outputs, SPLIT, _tensor()
    yield (
        gpu_counts.inverses(layers),
        FLOAT64,
        Expected(20, 40, "most is in factorisations of 4608², whose panels are slow"),
    )
    yield gpu_counts.gradients(layers), FLOAT32, Expected(50, 80, "108 products of cuBLAS")
    for kernel, counted in gpu_counts.kernels(gpu_counts.Sizes()).items():
        yield counted, SPLIT if kernel == "moment" else FLOAT32, _KERNELS[kernel]


def _figures(number: float) -> str:
    """Two significant figures."""
    return f"{number:#.2g}".rstrip(".") if number < 100 else f"{number:.0f}"
