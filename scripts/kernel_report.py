"""Writes docs/kernels.md, with the resources and the errors of each kernel, without a GPU.

Run it in the environment of ``make setup`` after ``python -m scripts.compile_kernels``:
``python -m scripts.kernel_report``. g++ runs the kernels thread by thread.
"""
# ruff: noqa: E501 (rows of the page)

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from kfac_engine.backend.cuda import recursive_inverse
from kfac_engine.backend.cuda.gram import GroupProducts, PatchMoments
from kfac_engine.backend.protocol import Accumulation
from kfac_engine.backend.window import Window
from kfac_engine.kernels.groups import draw_classes, sum_examples
from kfac_engine.kernels.launch import MACROS
from kfac_engine.kernels.pairs import shared_bytes
from kfac_engine.kernels.symmetric import Floor, widen
from scripts import markdown
from scripts.compile_kernels import Compiled, compiled
from tests.backend.truths import patches
from tests.cuda_on_cpu import nvrtc
from tests.cuda_on_cpu.device import ShimDevice
from tests.cuda_on_cpu.module import ORDERS

PAGE = Path(__file__).parents[1] / "docs" / "kernels.md"
_SCRATCH = 4 << 20
_PLAIN = Accumulation(homogeneous=False, alpha=1, beta=0)
# Shape of the images (n, channels, size), kernel, stride and padding.
_GEOMETRIES = {
    "2×64×6², 3×3": ((2, 64, 6), 3, 1, 1),
    "3×20×5², 2×2": ((3, 20, 5), 2, 1, 1),
    "2×24×9², 3×3/2": ((2, 24, 9), 3, 2, 1),
    "4×70×4², 1×1": ((4, 70, 4), 1, 1, 0),
    "1×16×7², 5×5": ((1, 16, 7), 5, 1, 2),
}
# Images that pair_rows.cu reads.
_ROWS = {"2×70×8², 1×1": ((2, 70, 8), 1, 1, 0)}
_HEAD = """# Kernels

To read a kernel, find its result in this table and open its source in `kernels/`. The first comment
of the source describes the work of a block and of a thread. To change a kernel, edit the source,
then run `python -m scripts.compile_kernels` and `python -m scripts.kernel_report`, which writes
this page. Neither program needs a GPU.

| source | result | replaces |
|---|---|---|
| `patch_products.cu`, `moment.cu` | Gram matrices of patches on FP32 units, read from images | copied patches, and a product |
| `pair_stage.cu`, `pair_products.cu`, `pair_rows.cu`, `moment.cu` | the same on tensor cores, by pairs of half-precision numbers, for several layers in one launch | copied patches, and products in float32 |
| `patch_sums.cu` | sums of patches and of their squares: the bias row of a Gram matrix, and its diagonal | copied patches, and sums |
| `symmetric.cu` | damped float64 matrix of a factor, its trace, and whether it is finite; conversion back | a dozen passes over float64 matrices |
| `leaf_inverse.cu` | inverses of blocks of at most 128 rows, and symmetric and transposed blocks, for inverses by products | a factorisation in panels |
| `few_products.cu` | Gram matrices and squared per-example gradients of depthwise filters, in registers | products of each channel |
| `group_products.cu` | Gram matrices and squared per-example gradients of groups of channels | stacks of patches, and products of each example |
| `example_sums.cu` | per-example gradients of a scale and a shift | a product as large as the data, and two sums |
| `classes.cu` | classes sampled from uniform numbers; cross-entropy and its gradient | exponentials, sums and comparisons as large as the logits |
| `spans.cu` | checks, inner products and sums of many arrays, in one launch | a call for each array |
| `small_products.cu` | products of many small matrices of any shapes and strides, in one launch | a call for each product, and copies in another order |
| `averages.cu` | moving averages and sums of pieces in one pass; counts of token ids | three passes; one-hot rows |
| `patches.cu` | copies of patches, for other operations | |

No kernel adds floating-point numbers atomically, so results are equal in every run. Offsets have 64
bits.
"""


def main() -> None:
    """Compute the errors and write the page."""
    lines = [_HEAD, *resources(), "", *_exactness()]
    PAGE.write_text("\n".join(lines) + "\n", encoding="utf-8")


def resources() -> Iterator[str]:
    """Yield the lines of the section about registers and shared memory."""
    tables = {name: compiled(name) for name in MACROS}
    each = [
        used for table in tables.values() for kernels in table.values() for used in kernels.values()
    ]
    spilling = sum(used.spilled_bytes > 0 for used in each)
    yield "## Resources of a block\n"
    yield "Each cell is the largest number of registers of a thread over all variants of a source (types of images, lengths of"
    yield "rows, tensor cores). Brackets contain the kilobytes of shared memory of a block. `python -m scripts.compile_kernels` compiles every variant"
    yield f"that a launch can choose for every architecture: {len(each)} kernels, of which {spilling or 'none'} spill{'s' * (spilling == 1)} registers to memory."
    yield "Dynamic shared memory is not in the table. Blocks of one or two tiles along a side have, in kilobytes:"
    yield f"{_dynamic('pair_products')} for `pair_products`, and {_dynamic('pair_rows')} for `pair_rows`.\n"
    yield from markdown.table(
        ("kernel", *nvrtc.ARCHITECTURES),
        (
            (f"`{kernel}`", *(cell(most(table, kernel, name)) for name in nvrtc.ARCHITECTURES))
            for table in tables.values()
            for kernel in dict.fromkeys(kernel for kernels in table.values() for kernel in kernels)
        ),
    )


def _dynamic(source: str) -> str:
    """Return the dynamic shared memory of both sizes of blocks."""
    return " or ".join(f"{shared_bytes(source, side, 3) / 1024:.1f}" for side in (1, 2))


def most(table: Compiled, kernel: str, architecture: str) -> nvrtc.Resources | None:
    """Return the largest resources of all variants of a kernel; None if there is no variant."""
    uses = (
        kernels[kernel]
        for key, kernels in table.items()
        if key.split()[0] == architecture and kernel in kernels
    )
    return max(uses, default=None)


def cell(used: nvrtc.Resources | None) -> str:
    """Return registers, kilobytes of shared memory, and spilled bytes as text."""
    if used is None:
        return "–"
    spilled = f", {used.spilled_bytes} B spilled" if used.spilled_bytes else ""
    return f"{used.registers} ({used.shared_bytes / 1024:.1f}){spilled}"


def _exactness() -> Iterator[str]:
    yield "## Errors\n"
    yield "Each number is the largest error of a result, divided by the largest entry of the result in float64. A CPU executes"
    yield "the threads of a block one after the other; each column is an order of the threads.\n"
    errors = ((k, c, *(f"{error(order):.1e}" for order in ORDERS)) for k, c, error in cases())
    yield from markdown.table(("kernel", "case", *ORDERS), errors)


def cases() -> Iterator[tuple[str, str, Callable[[str], float]]]:
    """Yield each kernel and case, with a function from the order of threads to the error."""
    yield from _moment_cases()
    for case in _GEOMETRIES:
        yield "`group_products`", case, lambda order, case=case: _group_error(case, order)
        yield "… squared", case, lambda order, case=case: _square_error(case, order)
    for case in _GEOMETRIES:
        yield "`add_patches`, squares", case, lambda order, case=case: _diagonal_error(case, order)
    for kernel in ((2, 3), (3, 3)):
        case = f"2×6×9², {kernel[0]}×{kernel[1]}"
        yield "`few_products`", case, lambda order, kernel=kernel: _few_error(kernel, order)
        yield "`few_squares`", case, lambda order, kernel=kernel: _few_square_error(kernel, order)
    for side in (33, 100):
        yield "`widen`, `damp`", f"2×{side}²", lambda order, side=side: _damped_error(side, order)
    for side in (33, 128):
        yield "`leaf_inverse`", f"2×{side}²", lambda order, side=side: _leaf_error(side, order)
    for shape in ((4, 30, 50), (4, 50, 3)):
        name = "×".join(map(str, shape))
        yield "`example_sums`", name, lambda order, shape=shape: _sum_error(shape, order)
    for shape in ((40, 100, 1), (2, 10, 300)):
        name = "×".join(map(str, shape))
        what = "`draw_classes`, part of other ids"
        yield what, name, lambda order, shape=shape: _draw_error(shape, order)


def _moment_cases() -> Iterator[tuple[str, str, Callable[[str], float]]]:
    """Yield the cases of Gram matrices of patches."""
    for case in _GEOMETRIES:
        for products, kernel in (
            (0, "`patch_products`"),
            (3, "`pair_products`"),
            (1, "`pair_products`, 11 bits"),
        ):
            error = lambda order, case=case, products=products: _moment_error(case, products, order)  # noqa: E731 (bound to the loop)
            yield kernel, case, error
    for case in _ROWS:
        yield "`pair_rows`", case, lambda order, case=case: _moment_error(case, 3, order)


def _data(case: str) -> tuple[np.ndarray, Window, np.ndarray]:
    (n, channels, side), kernel, stride, pad = {**_GEOMETRIES, **_ROWS}[case]
    x = np.random.default_rng(0).standard_normal((n, channels, side, side), np.float32)
    window = Window((kernel,) * 2, (stride,) * 2, (1, 1), (pad,) * 2, (pad,) * 2)
    w = window
    return x, window, patches(x, w.kernel, w.strides, w.dilations, w.begins, w.ends)


def _worst(result: np.ndarray, wanted: np.ndarray) -> float:
    return float(np.abs(result - wanted).max() / np.abs(wanted).max())


def _moment_error(case: str, products: int, order: str) -> float:
    x, window, z = _data(case)
    out = np.full((z.shape[2],) * 2, np.nan, np.float32)
    moments = PatchMoments(ShimDevice(order), _SCRATCH, products)
    moments.add(x, window, out, _PLAIN)
    return _worst(out, np.einsum("nti,ntj->ij", z, z))


def _by_group(z: np.ndarray, taps: int) -> np.ndarray:
    """Return the rows of two groups, ``(2, n, t, features)``."""
    n, t, _ = z.shape
    return np.moveaxis(z.reshape(n, t, taps, 2, -1), 3, 0).reshape(2, n, t, -1)


def _group_error(case: str, order: str) -> float:
    x, window, z = _data(case)
    z = _by_group(z, window.taps)
    out = np.full((2, z.shape[3], z.shape[3]), np.nan, np.float32)
    products = GroupProducts(ShimDevice(order), _SCRATCH)
    products.add_moments(x, window, out, _PLAIN)
    return _worst(out, np.einsum("gnti,gntj->gij", z, z))


def _square_error(case: str, order: str) -> float:
    x, window, z = _data(case)
    z = _by_group(z, window.taps)
    sides = window.output_shape(x.shape[2:])
    ds = np.random.default_rng(1).standard_normal((len(x), 6, *sides), np.float32)
    out = np.full((2, z.shape[3], 3), np.nan, np.float32)
    products = GroupProducts(ShimDevice(order), _SCRATCH)
    products.add_squares(x, window, ds, out, _PLAIN)
    g = ds.astype(np.float64).reshape(len(x), 2, 3, -1)
    return _worst(out, (np.einsum("gnti,ngot->gnio", z, g) ** 2).sum(axis=1))


def _diagonal_error(case: str, order: str) -> float:
    x, window, z = _data(case)
    out = np.full(z.shape[2], np.nan, np.float32)
    moments = PatchMoments(ShimDevice(order), _SCRATCH, 0)
    moments.add_squares(x, window, out, alpha=1, beta=0)
    return _worst(out, (z**2).sum(axis=(0, 1)))


def _few(kernel: tuple[int, int]) -> tuple[np.ndarray, Window, np.ndarray]:
    """Return images of six channels, their window, and the patches, ``(6, n, t, taps)``."""
    x = np.random.default_rng(0).standard_normal((2, 6, 9, 9), np.float32)
    w = Window(kernel, (1, 1), (1, 1), (1, 1), (1, 1))
    z = patches(x, w.kernel, w.strides, w.dilations, w.begins, w.ends)
    return x, w, np.moveaxis(z.reshape(*z.shape[:2], w.taps, 6), 3, 0)


def _few_error(kernel: tuple[int, int], order: str) -> float:
    x, window, z = _few(kernel)
    out = np.full((6, window.taps, window.taps), np.nan, np.float32)
    products = GroupProducts(ShimDevice(order), _SCRATCH)
    products.add_moments(x, window, out, _PLAIN)
    return _worst(out, np.einsum("gnti,gntj->gij", z, z))


def _few_square_error(kernel: tuple[int, int], order: str) -> float:
    x, window, z = _few(kernel)
    sides = window.output_shape(x.shape[2:])
    ds = np.random.default_rng(1).standard_normal((2, 6, *sides), np.float32)
    out = np.full((6, window.taps, 1), np.nan, np.float32)
    products = GroupProducts(ShimDevice(order), _SCRATCH)
    products.add_squares(x, window, ds, out, _PLAIN)
    g = ds.astype(np.float64).reshape(2, 6, -1)
    return _worst(out[..., 0], (np.einsum("gnti,ngt->gni", z, g) ** 2).sum(axis=1))


def _damped_error(side: int, order: str) -> float:
    stack = np.random.default_rng(0).standard_normal((2, side, side))
    wide, _ = widen(ShimDevice(order), stack, np.zeros(2), Floor(0.1, 0.0))
    whole = np.tril(stack) + np.tril(stack, -1).swapaxes(1, 2)
    norms = np.linalg.norm(whole, axis=(1, 2))
    return _worst(wide, whole + 0.1 * norms[:, None, None] * np.eye(side))


def _leaf_error(side: int, order: str) -> float:
    root = np.random.default_rng(0).standard_normal((2, side, side))
    stack = root @ root.swapaxes(1, 2) / side + 0.5 * np.eye(side)
    work, codes = stack.copy(), np.zeros(2, np.int32)
    recursive_inverse._Inverse(ShimDevice(order), codes)(work, np.zeros(0), 0)
    return _worst(work, np.linalg.inv(stack))


def _sum_error(shape: Sequence[int], order: str) -> float:
    x, ds = np.random.default_rng(0).standard_normal((2, *shape), np.float32)
    sums = np.full((shape[0], 2 * shape[1]), np.nan, np.float32)
    sum_examples(ShimDevice(order), x, ds, sums)
    wide = (x.astype(np.float64) * ds).sum(axis=2), ds.sum(axis=2, dtype=np.float64)
    return _worst(sums, np.concatenate(wide, axis=1))


def _draw_error(shape: Sequence[int], order: str) -> float:
    rng = np.random.default_rng(0)
    logits, uniforms = rng.standard_normal(shape, np.float32), rng.random((shape[0], shape[2]))
    ids = np.zeros(uniforms.shape, np.int64)
    draw_classes(ShimDevice(order), logits, uniforms, ids)
    bound = np.exp(logits.astype(np.float64)).cumsum(axis=1)
    wanted = (bound <= uniforms[:, None] * bound[:, -1:]).sum(axis=1)
    return float((ids != wanted).mean())


if __name__ == "__main__":
    main()
