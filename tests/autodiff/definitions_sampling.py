"""Reading images at computed places, from the definition: every pixel has a weight."""

import numpy as np
from numpy.typing import NDArray
from onnx.reference.op_run import OpRun


class GridSample(OpRun):
    """The reference rounds to float32, and moves places to the border before it looks for taps."""

    op_domain = ""

    def _run(
        self, x: NDArray, grid: NDArray, *, align_corners: int, mode: str, padding_mode: str
    ) -> tuple[NDArray]:
        around = {"zeros": "constant", "border": "edge"}
        around["reflection"] = "reflect" if align_corners else "symmetric"
        far, axes = 12, x.ndim - 2
        padded = np.pad(x, [(0, 0), (0, 0), *[(far, far)] * axes], around[padding_mode])
        y = padded.reshape(*padded.shape[:2], *[1] * (grid.ndim - 2), *padded.shape[2:])
        for axis in range(axes):
            side = x.shape[2 + axis]
            place = (grid[..., axes - 1 - axis] + 1) / 2
            place = place * (side - 1) if align_corners else place * side - 0.5
            # (n, 1, *places, pixels): every pixel, most of them with the weight zero.
            weights = _KERNELS[mode](place[..., None] - np.arange(-far, side + far))
            after = weights.ndim - 1
            y = y * weights.reshape(len(x), 1, *weights.shape[1:], *[1] * (axes - 1 - axis))
            y = y.sum(axis=after + 1)
        return (y,)


def _cubic(s: NDArray) -> NDArray:
    s = np.abs(s)
    near, far = 1.25 * s**3 - 2.25 * s**2 + 1, -0.75 * (s**3 - 5 * s**2 + 8 * s - 4)
    return np.where(s <= 1, near, np.where(s < 2, far, 0))


# Weight of a pixel by its distance.
_KERNELS = {
    "nearest": lambda s: (np.abs(s) < 0.5).astype(s.dtype),
    "linear": lambda s: np.maximum(1 - np.abs(s), 0),
    "cubic": _cubic,
}


class AffineGrid(OpRun):
    """The reference rounds to float32."""

    op_domain = ""

    def _run(self, matrices: NDArray, size: NDArray, *, align_corners: int) -> tuple[NDArray]:
        lines = [
            np.linspace(-1, 1, side) if align_corners else (2 * np.arange(side) + 1) / side - 1
            for side in size[2:]
        ]
        places = np.meshgrid(*lines, indexing="ij")[::-1]
        places = np.stack([*places, np.ones(size[2:])], axis=-1)
        return (np.einsum("...j,nij->n...i", places, matrices).astype(matrices.dtype),)


class DeformConv(OpRun):
    """The reference is slow."""

    op_domain = ""

    def _run(
        self,
        x: NDArray,
        weight: NDArray,
        offset: NDArray,
        bias: NDArray | None = None,
        mask: NDArray | None = None,
        *,
        group: int = 1,
        offset_group: int = 1,
        strides: list[int] | None = None,
        dilations: list[int] | None = None,
        pads: list[int] | None = None,
        **_: object,
    ) -> tuple[NDArray]:
        strides, dilations, pads = strides or [1, 1], dilations or [1, 1], pads or [0] * 4
        n, outs, kernel, sides = len(x), len(weight), weight.shape[2:], offset.shape[2:]
        moves = offset.reshape(n, offset_group, -1, 2, *sides)
        read = x.reshape(n, offset_group, -1, *x.shape[2:])
        seen = []
        for axis in range(2):
            tap = np.indices(kernel)[axis].reshape(-1, 1, 1) * dilations[axis] - pads[axis]
            place = moves[:, :, :, axis] + tap + np.indices(sides)[axis] * strides[axis]
            seen.append(_KERNELS["linear"](place[..., None] - np.arange(x.shape[2 + axis])))
        columns = np.einsum("ngcij,ngtyxi,ngtyxj->ngctyx", read, *seen)
        if mask is not None:
            columns = columns * mask.reshape(n, offset_group, 1, -1, *sides)
        columns = columns.reshape(n, group, -1, *sides)
        y = np.einsum("ngkyx,gok->ngoyx", columns, weight.reshape(group, outs // group, -1))
        shift = 0 if bias is None else bias.reshape(-1, 1, 1)
        return (y.reshape(n, outs, *sides) + shift,)


class MaxRoiPool(OpRun):
    """The reference has none."""

    op_domain = ""

    def _run(
        self, x: NDArray, regions: NDArray, *, pooled_shape: list[int], spatial_scale: float
    ) -> tuple[NDArray]:
        y = np.zeros((len(regions), x.shape[1], *pooled_shape), x.dtype)
        for index in np.ndindex(len(regions), *pooled_shape):
            image, left, top, right, bottom = regions[index[0]]
            spans = []
            for axis, (begin, end) in enumerate(((top, bottom), (left, right))):
                begin, end = (
                    np.copysign(np.floor(abs(side * spatial_scale) + 0.5), side)
                    for side in (begin, end)
                )
                step = max(end - begin + 1, 1) / pooled_shape[axis]
                first = int(begin + np.floor(index[1 + axis] * step))
                behind = int(begin + np.ceil((index[1 + axis] + 1) * step))
                spans.append(slice(max(first, 0), min(max(behind, 0), x.shape[2 + axis])))
            pixels = x[(int(image), slice(None), *spans)]
            if pixels.size:
                y[index[0], :, index[1], index[2]] = pixels.max(axis=(1, 2))
        return (y,)
