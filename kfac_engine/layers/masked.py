"""Convolutions that see only a part of each patch."""

from dataclasses import dataclass

import numpy as np

from kfac_engine._types import Array
from kfac_engine.backend.protocol import Backend
from kfac_engine.backend.window import Window
from kfac_engine.errors import NonFiniteError, ShapeError
from kfac_engine.layers.views import PatchView, rows_as_images


@dataclass(frozen=True, slots=True)
class MaskedPatchView:
    """Patches, each multiplied by the same mask.

    Attributes:
        patches: The patches.
        mask: One number a feature, in their order ``(*kernel, channels)``.
    """

    patches: PatchView
    mask: tuple[float, ...]

    @property
    def rank(self) -> int:
        return self.patches.rank

    @property
    def channels_first(self) -> bool:
        """Whether images are ``(n, channels, *sides)``."""
        return self.patches.channels_first

    def width(self, shape: tuple[int, ...]) -> int:
        features = self.patches.width(shape)
        if features != len(self.mask):
            raise ShapeError(
                f"a patch mask of {len(self.mask)} entries got patches of {features} features, "
                f"from an input of shape {shape}."
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
        if beta == 0.0:  # overwrites whatever was there, NaN included
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
    """Patches under a mask given as an array.

    Args:
        patches: The patches.
        mask: ``(*kernel, channels)``.
        channels: Channels of the images.

    Returns:
        The view.

    Raises:
        ShapeError: The mask has another shape.
        NonFiniteError: It holds NaN or infinity.
    """
    wanted = (*patches.window.kernel, channels)
    array = np.asarray(mask, dtype=np.float64)
    if array.shape != wanted:
        raise ShapeError(f"patch_mask has shape {array.shape}; (*kernel, channels) is {wanted}.")
    if not np.isfinite(array).all():
        raise NonFiniteError("patch_mask holds NaN or infinity.")
    return MaskedPatchView(patches, tuple(array.reshape(-1).tolist()))
