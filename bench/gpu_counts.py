"""Sizes of the GPU suite: the layers of a ResNet-50, and the least cost of the work.

The images of the ResNet-50 have 224 × 224 pixels. One triangle of a symmetric matrix is multiplied.
Data are read once, results are written once, and moving averages are read too.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

_FLOAT, _DOUBLE = 4, 8


class Layer(NamedTuple):
    """A convolution over square images, or the last, dense layer on one pixel."""

    inputs: int
    outputs: int
    kernel: int
    stride: int
    side: int
    homogeneous: bool = False

    @property
    def pad(self) -> int:
        """Padding at each end."""
        return self.kernel // 2

    @property
    def out_side(self) -> int:
        """Output positions an axis."""
        return (self.side + 2 * self.pad - self.kernel) // self.stride + 1

    @property
    def d_in(self) -> int:
        """Number of rows of the input factor."""
        return self.inputs * self.kernel**2 + self.homogeneous


# Stage by stage: blocks, channels inside a block, channels after it.
_STAGES = ((3, 64, 256), (4, 128, 512), (6, 256, 1024), (3, 512, 2048))


def resnet50() -> tuple[Layer, ...]:
    """Return all 54 layers, in order.

    Source: He et al. 2016, arXiv:1512.03385, with the stride in the 3 × 3 filters.
    """
    return (Layer(3, 64, 7, 2, 224), *_blocks(), Layer(2048, 1000, 1, 1, 1, True))


def _blocks() -> Iterator[Layer]:
    before, side = 64, 56
    for stage, (blocks, inside, after) in enumerate(_STAGES):
        for block in range(blocks):
            stride = 2 if stage and not block else 1
            yield Layer(before, inside, 1, 1, side)
            yield Layer(inside, inside, 3, stride, side)
            yield Layer(inside, after, 1, 1, side // stride)
            if not block:
                yield Layer(before, after, 1, stride, side)
            before, side = after, side // stride


class Counted(NamedTuple):
    """Least numbers of multiplications and of moved bytes of a work."""

    case: str
    products: float
    moved: float


class Sizes(NamedTuple):
    """Sizes of the data of each kernel.

    ``ids`` are counted, of a vocabulary of a twentieth of them. Each image has 64 draws of a class.
    """

    images: int = 32
    channels: int = 64
    side: int = 56
    matrix: int = 4608
    ids: int = 1 << 20
    classes: int = 1000

    @property
    def words(self) -> int:
        """Size of the vocabulary."""
        return self.ids // 20

    @property
    def draws(self) -> int:
        """Number of draws."""
        return 64 * self.images


def input_factors(layers: Sequence[Layer], batch: int) -> Counted:
    """Return the cost of averaging the second moments of patches of layers."""
    one = layers[0]
    size = f"{batch}×{one.inputs}×{one.side}², {one.kernel}×{one.kernel}/{one.stride}"
    return Counted(
        f"A of {len(layers)} layers" if len(layers) > 1 else f"A: {size}",
        sum(_input_products(layer, batch) for layer in layers),
        _FLOAT * sum(batch * x.inputs * x.side**2 + 2 * x.d_in**2 for x in layers),
    )


def output_factors(layers: Sequence[Layer], batch: int) -> Counted:
    """Return the cost of averaging the second moments of pixels."""
    pixels = {layer: batch * layer.out_side**2 for layer in set(layers)}
    return Counted(
        f"G of {len(layers)} layers",
        sum(0.5 * pixels[x] * x.outputs**2 for x in layers),
        _FLOAT * sum(pixels[x] * x.outputs + 2 * x.outputs**2 for x in layers),
    )


def inverses(layers: Sequence[Layer]) -> Counted:
    """Return the cost of the inverses of all factors, ``d³`` flops each."""
    sides = [side for layer in layers for side in (layer.d_in, layer.outputs)]
    squares = sum(side * side for side in sides)
    return Counted(
        f"{len(sides)} inverses", sum(0.5 * side**3 for side in sides), 2 * _FLOAT * squares
    )


def gradients(layers: Sequence[Layer]) -> Counted:
    """Return the cost of multiplying gradients by two matrices each."""
    return Counted(
        f"gradients of {len(layers)} layers, preconditioned",
        sum(float(x.d_in * x.outputs) * (x.d_in + x.outputs) for x in layers),
        _FLOAT * sum(x.d_in**2 + 2 * x.d_in * x.outputs + x.outputs**2 for x in layers),
    )


def kernels(sizes: Sizes) -> Mapping[str, Counted]:
    """Return the cost of each kernel by name."""
    n, channels, side, matrix, *_ = sizes
    rows, d, square = n * side**2, 9 * channels, matrix**2
    x, size = _FLOAT * rows * channels, f"{n}×{channels}×{side}², 3×3"
    half = _FLOAT * square // 2  # one triangle
    return {
        "moment": Counted(f"A with its border, {size}", 13.0 * rows * channels**2,
                          x + 2 * _FLOAT * (d + 1) ** 2),
        "groups": Counted(f"A of each channel, {size}", 45.0 * rows * channels,
                          x + 2 * _FLOAT * 81 * channels),
        "squares": Counted(f"squared gradients, {size}", float(rows * d * channels),
                           2 * x + 2 * _FLOAT * d * channels),
        "channels": Counted(f"squared gradients of each channel, {size}", 9.0 * rows * channels,
                            2 * x + 2 * _FLOAT * d),
        "diagonal": Counted(f"squares of patches, {size}", 0.0, x + 2 * _FLOAT * d),
        "patches": Counted(f"patches written out, {size}", 0.0, 10 * x),
        "sums": Counted(f"sums of examples, {size}", 0.0, 2 * x + 2 * _FLOAT * n * channels),
        "classes": Counted(f"{sizes.draws} classes of {sizes.classes}", 0.0,
                           sizes.draws * (_FLOAT * sizes.classes + 2 * _DOUBLE)),
        "ids": Counted(f"{sizes.ids} identifiers of {sizes.words}", 0.0,
                       _DOUBLE * sizes.ids + _FLOAT * sizes.words),
        "average": Counted(f"average of {matrix}²", 0.0, 3 * _FLOAT * square),
        "norms": Counted(f"sum of squares of {matrix}²", 0.0, _FLOAT * square),
        "finite": Counted(f"whether {matrix}² is finite", 0.0, _FLOAT * square),
        "mirror": Counted(f"mirror, {matrix}²", 0.0, 2 * half),
        "widen": Counted(f"widened, damped and described, {matrix}²", 0.0,
                         half + _DOUBLE * square),
        "narrow": Counted(f"narrowed, {matrix}²", 0.0, _DOUBLE * square // 2 + 2 * half),
    }  # fmt: skip


def _input_products(layer: Layer, batch: int) -> float:
    """Return the multiplications of a lower triangle, by distances of taps if these are fewer."""
    rows, k = batch * layer.out_side**2, layer.kernel
    if layer.stride == 1 and k > 1:
        return float(rows * layer.inputs**2 * ((2 * k - 1) ** 2 + 1) / 2)
    return float(rows * layer.d_in**2 / 2)
