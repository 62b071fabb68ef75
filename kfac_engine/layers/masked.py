"""Convolutions whose patches are multiplied by a mask."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from kfac_engine._types import Array
from kfac_engine.backend.protocol import Backend
from kfac_engine.backend.window import Window
from kfac_engine.errors import NonFiniteError, ShapeError
from kfac_engine.layers.views import PatchView, rows_as_images


@dataclass(frozen=True, slots=True)
class MaskedPatchView:
    """The input of a convolution whose patches are multiplied by a mask.

    Attributes:
        patches: View without the mask.
        mask: Factor of each feature, in the order ``(*kernel, channels)``.
    """

    has_rows: ClassVar[bool] = True

    patches: PatchView
    mask: tuple[float, ...]

    @property
    def rank(self) -> int:
        return self.patches.rank

    @property
    def channels_first(self) -> bool:
        """Whether images are ``(n, channels, *spatial_shape)``."""
        return self.patches.channels_first

    def width(self, shape: tuple[int, ...]) -> int:
        features = self.patches.width(shape)
        if features != len(self.mask):
            raise ShapeError(
                f"a patch mask has {len(self.mask)} entries, but patches of an input of shape "
                f"{shape} have {features} features."
            )
        return features

    def count(self, shape: tuple[int, ...]) -> int:
        return self.patches.count(shape)

    def second_moment(
        self,
        x: Array,
        out: Array,
        backend: Backend,
        *,
        homogeneous: bool,
        alpha: float,
        beta: float,
    ) -> None:
        d = self.width(x.shape)
        moment = backend.xp.zeros_like(out)
        self.patches.second_moment(
            x, moment, backend, homogeneous=homogeneous, alpha=alpha, beta=0.0
        )
        # (m∘z)(m∘z)ᵀ = (m mᵀ)∘(z zᵀ): masking the moment costs d², masking the patches n·t·d.
        mask = self._mask(backend, out)
        moment[:d] *= mask[:, None]
        moment[:, :d] *= mask
        if beta == 0.0:  # 0 · NaN would be NaN
            out[...] = moment
            return
        out *= beta
        out += moment

    def rows(self, x: Array, backend: Backend) -> Array:
        patches = self.patches.rows(x, backend)
        masked: Array = patches * self._mask(backend, patches)
        return masked

    def images(self, x: Array, backend: Backend) -> tuple[Array, Window]:
        return rows_as_images(self.rows(x, backend))

    def _mask(self, backend: Backend, like: Array) -> Array:
        return backend.asarray(np.array(self.mask), like.dtype)


def masked_patch_view(patches: PatchView, mask: Array, channels: int) -> MaskedPatchView:
    """Return the view of patches that are multiplied by a mask.

    Args:
        patches: View without the mask.
        mask: ``(*kernel, channels)``.
        channels: Number of channels of the images.

    Returns:
        The view.

    Raises:
        ShapeError: The mask has another shape.
        NonFiniteError: The mask contains NaN or infinity.
    """
    expected = (*patches.window.kernel, channels)
    array = np.asarray(mask, dtype=np.float64)
    if array.shape != expected:
        raise ShapeError(f"patch_mask has shape {array.shape}; (*kernel, channels) is {expected}.")
    if not np.isfinite(array).all():
        raise NonFiniteError("patch_mask contains NaN or infinity.")
    return MaskedPatchView(patches, tuple(array.reshape(-1).tolist()))
