"""Second moments of patches, in the form that is the quickest (``patch_gram_cost``).

The patch at output position ``o`` is ``z[u, c] = x[c, o·stride + u·dilation − begin]`` over taps
``u`` and channels ``c``, zero where the pixel lies outside the image. Two forms
compute ``Σ z zᵀ``:

* *plain*: patches of a few images, or of a few rows of one, are copied and multiplied by SYRK; with
  a single tap the patches are the pixels, and no copy is needed (``gram``);
* *lines*, for stride one: from products of lines of images with lines (``shifted_gram``).
"""

from math import prod

import numpy as np

from kfac_engine._types import Array
from kfac_engine.backend.cpu.gram import CHUNK_BYTES, Border, check_out, write_border
from kfac_engine.backend.cpu.im2col import patch_matrices
from kfac_engine.backend.cpu.patch_gram_cost import Images, quickest
from kfac_engine.backend.cpu.shifted_gram import Means, add_lines
from kfac_engine.backend.cpu.syrk import accumulate, parts_for
from kfac_engine.backend.patch_sums import patch_sums
from kfac_engine.backend.threads import Workers, single_threaded_blas
from kfac_engine.backend.window import Window


def patch_second_moment(  # noqa: PLR0913 (the primitive's, and what it may take)
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
    """Lower triangle of ``out ← beta·out + alpha·Σ z zᵀ`` over all patches, in place.

    Args:
        x: Images, ``(n, channels, *sides)``, any strides; accumulated in the dtype of ``out``.
        window: Geometry.
        out: ``(taps·channels (+ 1), same)``, C-contiguous; features tap-major.
        homogeneous: Whether each patch ends with an implicit one.
        alpha: Scale of the new moment.
        beta: Scale of the old one; zero overwrites.
        scratch_bytes: Bound of the working memory, that of all threads together.
        workers: Threads.

    Raises:
        ShapeError: The image does not fit the window, or ``out`` is not of this shape and layout.
    """
    channels, sides = x.shape[1], x.shape[2:]
    d = window.taps * channels
    check_out(out, d + homogeneous)
    positions = len(x) * prod(window.output_shape(sides))
    core = out[:d, :d]
    chunk_bytes = min(CHUNK_BYTES, scratch_bytes)
    room = (scratch_bytes - chunk_bytes) // out.itemsize
    with single_threaded_blas():
        add = FORMS[quickest(window, Images(len(x), channels, sides), room, workers.count)]
        add(x, window, core, alpha, beta, Means(workers, chunk_bytes, room))
    if homogeneous:
        write_border(out, Border(patch_sums(x, window, out.dtype, np), positions), alpha, beta)


def _add_plain(
    x: Array, window: Window, out: Array, alpha: float, beta: float, means: Means
) -> None:
    """The same by copies of patches."""
    positions = len(x) * prod(window.output_shape(x.shape[2:]))
    count = parts_for(positions, len(out), means.workers, means.numbers)
    parts = np.array_split(x, max(1, min(len(x), count)))
    some = means.chunk_bytes // len(parts)
    pieces = [patch_matrices(part, window, out.dtype, some) for part in parts]
    accumulate(pieces, out, alpha, beta, means.workers)


# By the names that ``quickest`` gives.
FORMS = {"plain": _add_plain, "lines": add_lines}
