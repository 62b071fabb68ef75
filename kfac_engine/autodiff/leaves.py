"""Products of a backward pass that may end outside ONNX Runtime: gradients of kernels.

A derivative rule writes the nodes of such a product, and beside them says what they compute. Where
nobody but the caller reads the result, a session may leave the nodes out, hand over the operands
instead, and have the product done here (see ``finish``). Exported graphs, graphs on a GPU and
graphs that are differentiated again keep the nodes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kfac_engine._types import Array
from kfac_engine.backend.numpy_kernels import Scratch, add_kernel_gradient
from kfac_engine.backend.tasks import TO_READ
from kfac_engine.backend.threads import Workers
from kfac_engine.backend.window import Window

if TYPE_CHECKING:
    from kfac_engine.autodiff.rules.geometry import Sliding


@dataclass(frozen=True, slots=True)
class KernelLeaf:
    """The gradient of a convolution's kernel.

    Attributes:
        images: Name of what the kernel slides over, ``(n, channels, *sides)``.
        cotangents: Name of the cotangent of what it makes.
        window: How it slides; with the sides of the kernel, which are those of every batch.
        outs: Channels of the cotangents.
        ins: Channels of the images in a group.
    """

    images: str
    cotangents: str
    window: "Sliding"
    outs: int
    ins: int

    @property
    def operands(self) -> tuple[str, str]:
        """Names of the values that are multiplied."""
        return self.images, self.cotangents

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the kernel."""
        return self.outs, self.ins, *self.window.kernel

    def work(self, operands: Sequence[Array]) -> float:
        """Multiplications, and those in the time that copies take."""
        x, g = operands
        return g.size * self.ins * self.window.taps + TO_READ * (x.size + g.size)

    def add(
        self, operands: Sequence[Array], out: Array, workers: Workers, scratch: Scratch
    ) -> None:
        """Add the gradient to ``out``, of any strides."""
        x, g = operands
        window = _resolved(self.window, x.shape[2:], g.shape[2:])
        add_kernel_gradient(x, g, window, out, workers, scratch=scratch)


def _resolved(window: "Sliding", sides: Sequence[int], outputs: Sequence[int]) -> Window:
    """The window on an image of known size; it has as many outputs as there are cotangents."""
    reached = [
        (count - 1) * stride + reach + 1
        for count, stride, reach in zip(outputs, window.strides, window.reaches, strict=True)
    ]
    begins = window.begins
    if window.same:
        missing = [max(0, need - side) for need, side in zip(reached, sides, strict=True)]
        odd = 0 if window.same == "SAME_UPPER" else 1  # whether the odd pixel comes first
        begins = tuple((pad + odd) // 2 for pad in missing)
    ends = (need - begin - side for need, begin, side in zip(reached, begins, sides, strict=True))
    return Window(window.kernel, window.strides, window.dilations, begins, tuple(ends))
