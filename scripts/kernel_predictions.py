"""Predicts the times of kernels on an H200, from their sizes and an expected rate."""
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
# Rates of an H200 in TFLOP/s: 60 in float32, 400 in TF32 by mma.sync, 60 in float64. Memory has 4.3
# TB/s.
H200 = GpuRates(4.3e12, {FLOAT32: 30e12, TF32: 200e12, SPLIT: 200e12 / 3, FLOAT64: 30e12})


class Expected(NamedTuple):
    """The expected rate of a kernel, in percent of the highest possible rate.

    Attributes:
        least: Lower bound in percent.
        most: Upper bound in percent.
        reason: Cause of the difference from the highest rate.
    """

    least: int
    most: int
    reason: str


_STREAM = Expected(60, 90, "reads and writes run along rows")
_KERNELS: Mapping[str, Expected] = {
    "moment": Expected(
        35, 55, "the blocks of the factors above; the border reads the images again"
    ),
    "groups": Expected(15, 30, "about 200 instructions find the nine pixels of 45 products"),
    "squares": Expected(25, 45, "FP32 units read shared memory; a thread has 4 × 4 products"),
    "channels": Expected(20, 40, "as many instructions find pixels"),
    "diagonal": Expected(50, 80, "two launches"),
    "patches": Expected(20, 40, "each number takes divisions"),
    "sums": Expected(40, 70, "a warp sums each entry; the last 32 numbers of a row are incomplete"),
    "classes": Expected(10, 25, "two exponentials in float64 for each class"),
    "ids": Expected(20, 50, "counts are in the second-level cache"),
    "finite": _STREAM,
    "average": _STREAM,
    "mirror": _STREAM,
    "widen": _STREAM,
    "narrow": _STREAM,
}


def _tensor() -> Expected:
    """Return the expected rate of products on tensor cores, whose blocks have 128 threads."""
    counts = [
        compiled("patch_products")[entry(variant, "sm_90")]["patch_products"].registers
        for variant in variants("patch_products")
        if {"-DSPLIT=3", "-DINPUT=0"} <= {*variant}
    ]
    registers = f"{min(counts)} to {max(counts)} registers"
    return Expected(40, 60, f"four warps of {registers} a block do not hide all loads")


def predictions() -> Iterator[str]:
    """Yield the lines of the section on predictions."""
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
            f"| {counted.case} | {_figures(2e-9 * counted.products)} | "
            f"{_figures(1e-9 * counted.moved)} | {kind if counted.products else '–'} | "
            f"{_figures(floor)} | {_figures(fast)} – {_figures(slow)} | {expected.reason} |"
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
        Expected(20, 40, "factorisations of 4608² take most of the time; their panels are slow"),
    )
    yield gpu_counts.gradients(layers), FLOAT32, Expected(50, 80, "108 products of cuBLAS")
    for kernel, counted in gpu_counts.kernels(gpu_counts.Sizes()).items():
        yield counted, SPLIT if kernel == "moment" else FLOAT32, _KERNELS[kernel]


def _figures(number: float) -> str:
    """Return a number with two significant figures."""
    return f"{number:#.2g}".rstrip(".") if number < 100 else f"{number:.0f}"
