"""Gradients of convolution kernels that a session may compute with BLAS.

A derivative rule writes the nodes of such a gradient and records its operands here. A session on
the CPU may remove the nodes and compute the product with BLAS (``runtime.cpu``). Exported graphs,
graphs on a GPU and graphs that are differentiated again contain the nodes.
"""

from dataclasses import dataclass

from kfac_engine.backend.window import SlidingWindow


@dataclass(frozen=True, slots=True)
class KernelGradient:
    """The gradient of a convolution kernel.

    Attributes:
        images: Name of the input of the convolution, ``(n, channels, *spatial)``.
        cotangents: Name of the cotangent of the result.
        window: Window of the convolution.
        outs: Number of channels of the cotangent.
        ins: Number of channels of the input in each group.
    """

    images: str
    cotangents: str
    window: SlidingWindow
    outs: int
    ins: int

    @property
    def operands(self) -> tuple[str, str]:
        """The names of the two factors of the product."""
        return self.images, self.cotangents

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the kernel."""
        return self.outs, self.ins, *self.window.kernel
