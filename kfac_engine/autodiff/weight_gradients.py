"""Gradients of convolution kernels that a session may leave to BLAS.

A derivative rule writes the nodes of such a gradient and records its operands here. A session on
the CPU may leave the nodes out and compute the product itself (``runtime.cpu``). Exported graphs,
graphs on a GPU and graphs that are differentiated again keep the nodes.
"""

from dataclasses import dataclass

from kfac_engine.backend.sliding_window import SlidingWindow


@dataclass(frozen=True, slots=True)
class KernelGradient:
    """The gradient of a convolution kernel.

    Attributes:
        images: Name of the input of the convolution, ``(n, channels, *spatial)``.
        cotangents: Name of the cotangent of its result.
        window: Window of the convolution.
        outs: Channels of the cotangent.
        ins: Channels of the input in each group.
    """

    images: str
    cotangents: str
    window: SlidingWindow
    outs: int
    ins: int

    @property
    def operands(self) -> tuple[str, str]:
        """Names of the two factors of the product."""
        return self.images, self.cotangents

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the kernel."""
        return self.outs, self.ins, *self.window.kernel
