"""Gram matrices of patches by the faster of two algorithms (``patch_gram_cost``).

The patch at output position ``o`` is ``z[u, c] = x[c, o·stride + u·dilation − begin]`` over taps
``u`` and channels ``c``, with zeros outside the image. Two algorithms compute ``Σ z zᵀ``:

* *im2col*: patches of a few images, or of a few rows of one image, are copied and multiplied by
  SYRK; with a single tap, patches are pixels and need no copy (``im2col``, ``gram``);
* *shifted*, for stride one: products of shifted images (``shifted_gram``).
"""

from math import prod

import numpy as np

from kfac_engine._types import Array
from kfac_engine.backend.cpu.gram import CHUNK_BYTES, Border, check_out, write_border
from kfac_engine.backend.cpu.im2col import patch_matrices
from kfac_engine.backend.cpu.patch_gram_cost import Images, select_algorithm
from kfac_engine.backend.cpu.shifted_gram import Resources, add_shifted_gram
from kfac_engine.backend.cpu.syrk import accumulate, count_parts
from kfac_engine.backend.patch_sums import patch_sums
from kfac_engine.backend.threads import Workers, single_threaded_blas
from kfac_engine.backend.window import Window


def patch_second_moment(  # noqa: PLR0913 (the operation's arguments and its resources)
    x: Array,
    window: Window,
    out: Array,
    *,
    homogeneous: bool,
    alpha: float,
    beta: float,
    scratch_bytes: int,
    workers: Workers,
) -> None:
    """Compute the lower triangle of ``out ← beta·out + alpha·Σ z zᵀ`` over all patches, in place.

    Args:
        x: Images, ``(n, channels, *spatial_shape)``, any strides; accumulated in the element type
            of ``out``.
        window: Geometry.
        out: ``(d, d)`` with ``d = taps·channels (+ 1)``, C-contiguous; features are tap-major.
        homogeneous: Whether a 1 is appended to each patch.
        alpha: Scale of the new Gram matrix.
        beta: Scale of the old matrix; zero overwrites.
        scratch_bytes: Bound of the scratch memory of all threads together.
        workers: Threads.

    Raises:
        ShapeError: The image does not fit the window, or ``out`` has another shape or layout.
    """
    channels, spatial_shape = x.shape[1], x.shape[2:]
    d = window.taps * channels
    check_out(out, d + homogeneous)
    positions = len(x) * prod(window.output_shape(spatial_shape))
    core = out[:d, :d]
    chunk_bytes = min(CHUNK_BYTES, scratch_bytes)
    numbers = (scratch_bytes - chunk_bytes) // out.itemsize
    with single_threaded_blas():
        images = Images(len(x), channels, spatial_shape)
        add = _ALGORITHMS[select_algorithm(window, images, numbers, workers.count)]
        add(x, window, core, alpha, beta, Resources(workers, chunk_bytes, numbers))
    if homogeneous:
        write_border(out, Border(patch_sums(x, window, out.dtype, np), positions), alpha, beta)


def _add_im2col_gram(
    x: Array, window: Window, out: Array, alpha: float, beta: float, resources: Resources
) -> None:
    """Compute ``out ← beta·out + alpha·Σ z zᵀ`` from copies of the patches ``z``."""
    positions = len(x) * prod(window.output_shape(x.shape[2:]))
    count = count_parts(positions, len(out), resources.workers, resources.numbers)
    parts = np.array_split(x, max(1, min(len(x), count)))
    chunk_bytes = resources.chunk_bytes // len(parts)
    pieces = [patch_matrices(part, window, out.dtype, chunk_bytes) for part in parts]
    accumulate(pieces, out, alpha, beta, resources.workers)


# Algorithms by the names of ``patch_gram_cost.COSTS``.
_ALGORITHMS = {"im2col": _add_im2col_gram, "shifted": add_shifted_gram}
