"""The layers of a ResNet-50 on images of 224 × 224 pixels, as the GPU suite measures them."""

from collections.abc import Iterator
from typing import NamedTuple


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
