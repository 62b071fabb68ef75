"""Gram matrices and squared gradients of groups of channels, by CUDA kernels."""

from itertools import pairwise
from math import prod

from kfac_engine._types import Array
from kfac_engine.backend.channel_groups import check_group_shape
from kfac_engine.backend.cuda.patch_gram import MOST_POSITIONS, image_geometry
from kfac_engine.backend.window import Window, pointwise
from kfac_engine.errors import ShapeError
from kfac_engine.kernels.geometry import AXES
from kfac_engine.kernels.groups import Groups, add_group_moments, add_squares
from kfac_engine.kernels.launch import Device


class GroupProducts:
    """Computes Gram matrices and squared gradients of groups of channels on one device.

    Args:
        device: Device of the kernels.
        scratch_bytes: Bound of the partial results of one product.

    Attributes:
        scratch_bytes: The bound, which may be changed.
    """

    def __init__(self, device: Device, scratch_bytes: int) -> None:
        self._device = device
        self.scratch_bytes = scratch_bytes

    def add_moments(
        self,
        x: Array,
        window: Window,
        out: Array,
        *,
        homogeneous: bool,
        alpha: float,
        beta: float,
    ) -> None:
        """Compute ``out ← beta·out + alpha·Σ z zᵀ`` for each group, in place.

        Args:
            x: Images, ``(n, channels, *spatial_shape)``, any strides; float32, float16 or bfloat16.
            window: Geometry.
            out: ``(groups, d, d)``, C-contiguous float32.
            homogeneous: Whether a 1 is appended to each row.
            alpha: Scale of the new Gram matrices.
            beta: Scale of the old matrices; zero overwrites.

        Raises:
            ShapeError: ``out`` has another shape.
        """
        rows = check_group_shape(x, window, out, out.shape[2], homogeneous=homogeneous)
        positions = prod(window.output_shape(x.shape[2:]))
        most = max(1, MOST_POSITIONS // positions)
        for start in range(0, len(x), most):
            part = x[start : start + most]
            groups = Groups(len(out), rows, rows, homogeneous, alpha, beta, self.scratch_bytes)
            add_group_moments(self._device, part, out, image_geometry(part, window), groups)
            beta = 1.0

    def add_squares(
        self,
        x: Array,
        window: Window,
        ds: Array,
        out: Array,
        *,
        homogeneous: bool,
        alpha: float,
        beta: float,
    ) -> None:
        """Compute ``out ← beta·out + alpha·Σ_n (Σ_t z_nt ds_ntᵀ)²`` for each group, in place.

        Args:
            x: Images, ``(n, channels, *spatial_shape)``, any strides; float32, float16 or bfloat16.
            window: Geometry.
            ds: ``(n, outputs, *output_shape)``, any strides, of the type of ``x``.
            out: ``(groups, d, outputs / groups)``, C-contiguous float32.
            homogeneous: Whether a 1 is appended to each row.
            alpha: Scale of the new squares.
            beta: Scale of the old squares; zero overwrites.

        Raises:
            ShapeError: ``out`` has another shape.
        """
        outputs = window.output_shape(x.shape[2:])
        if len(ds) != len(x) or prod(ds.shape[2:]) != prod(outputs):
            raise ShapeError(
                f"gradients of shape {ds.shape} do not fit {len(x)} images with {outputs} outputs."
            )
        ds = ds.reshape(*ds.shape[:2], *outputs)
        columns = ds.shape[1] // len(out)
        rows = check_group_shape(x, window, out, columns, homogeneous=homogeneous)
        groups = Groups(len(out), rows, columns, homogeneous, alpha, beta, self.scratch_bytes)
        add_squares(self._device, x, ds, out, image_geometry(x, window), groups)


def as_entry_images(x: Array, axes: tuple[int, ...]) -> Array | None:
    """Return a view ``(n, entries, *summed_shape)`` of data; None if there is no such view."""
    entry_axes = [axis for axis in range(1, x.ndim) if axis not in axes]
    summed = [axis for axis in axes if x.shape[axis] > 1]
    long_axes = [axis for axis in entry_axes if x.shape[axis] > 1]
    merges = all(x.strides[a] == x.strides[b] * x.shape[b] for a, b in pairwise(long_axes))
    if len(summed) > AXES or not merges:
        return None
    entries = prod(x.shape[axis] for axis in entry_axes)
    spatial_shape = [x.shape[axis] for axis in summed]
    placed = x.transpose(0, *entry_axes, *summed, *(axis for axis in axes if x.shape[axis] == 1))
    view: Array = placed.reshape(len(x), entries, *spatial_shape)
    return view


def merge_axes(x: Array, window: Window) -> tuple[Array, Window]:
    """Return images with as few axes as kernels need, with pixels merged into one axis."""
    if not window.is_pointwise or x.ndim <= 2 + AXES:
        return x, window
    return x.reshape(*x.shape[:2], -1), pointwise(1)
