"""Computes Gram matrices and squared gradients of patches and channel groups by CUDA kernels."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from math import prod
from types import MappingProxyType

from kfac_engine._types import Array
from kfac_engine.backend.channel_groups import check_group_shape
from kfac_engine.backend.cuda.moment_groups import MomentGroups
from kfac_engine.backend.cuda.recipes import MOST_POSITIONS, image_geometry
from kfac_engine.backend.protocol import Accumulation
from kfac_engine.backend.window import Window, pointwise
from kfac_engine.errors import ShapeError
from kfac_engine.kernels.geometry import AXES, Geometry
from kfac_engine.kernels.groups import Groups, add_group_moments, add_squares
from kfac_engine.kernels.launch import Device
from kfac_engine.kernels.moments import Layer, Scales
from kfac_engine.kernels.patches import add_patch_squares
from kfac_engine.kernels.tuned import UNITS, Choice, Choices, choices, shape_key


class PatchMoments:
    """Computes Gram matrices of patches on one device, with one plan for each geometry.

    ``scratch_bytes`` bounds the partial results of one pass, and may be changed. ``products`` is
    the number of products of tensor cores for each float32 product: 3 has float32 accuracy, 1 has
    11 bits, and 0 uses FP32 units. ``tuned`` has choices of ways by shape; by default the model of
    ``MomentGroups`` chooses. Images that do not fit the scratch memory use FP32 units.
    """

    def __init__(
        self,
        device: Device,
        scratch_bytes: int,
        products: int,
        tuned: Choices = MappingProxyType({}),
    ) -> None:
        self._device = device
        self.scratch_bytes = scratch_bytes
        self.products, self._tuned = products, tuned
        self._groups = MomentGroups(device, products)
        self._geometries: dict[tuple[object, ...], Geometry] = {}

    def add(self, x: Array, window: Window, out: Array, how: Accumulation) -> None:
        """Compute ``out ← beta·out + alpha·Σ z zᵀ`` over all patches of all images, in place.

        ``x`` is ``(n, channels, *spatial_shape)`` with any strides, float32, float16 or bfloat16.
        ``out`` is ``(d, d)`` with ``d = taps·channels (+ 1)``, C-contiguous float32; features are
        tap-major.
        """
        features = window.taps * x.shape[1]
        if out.shape != (features + how.homogeneous,) * 2:
            raise ShapeError(
                f"a Gram matrix of {features} features{' and a bias' if how.homogeneous else ''} "
                f"does not fit a matrix of shape {out.shape}."
            )
        self._groups.add(x, window, out, how, self.scratch_bytes, self._choice(x, window))

    def ways(self, x: Array, window: Window) -> tuple[str, ...]:
        """Return the ways to multiply patches, the default first; see ``kernels/tuned.py``."""
        pairs = self._groups.ways(x, window, self.scratch_bytes) if self.products else ()
        return pairs or (UNITS,)

    def _choice(self, x: Array, window: Window) -> Choice:
        positions = len(x) * prod(window.output_shape(x.shape[2:]))
        ways = self.ways(x, window)
        choice = self._tuned.get(shape_key(window.taps, x.shape[1], positions))
        return choice if choice and choice.way in ways else choices(ways)[0]

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Return a context in which several calls of ``add`` share launches.

        Until the context ends, or until ``flush``, their matrices are unspecified. After an error,
        they keep their old values.
        """
        with self._groups.gathered():
            try:
                yield
            except BaseException:
                self._groups.forget()
                raise
        self.flush()

    def settle(self, out: Array) -> None:
        """Compute what waits if ``out`` is among it, before another operation changes ``out``."""
        if self._groups.awaits(out):
            self.flush()

    def flush(self) -> None:
        """Compute the matrices of all calls of ``add`` in a ``gathered`` context."""
        self._groups.flush(self.scratch_bytes)

    def add_squares(
        self, x: Array, window: Window, out: Array, *, alpha: float, beta: float
    ) -> None:
        """Compute ``out ← beta·out + alpha·Σ z²`` over all patches, entry by entry, in place.

        The arguments are as for ``add``, but ``out`` is ``(taps·channels,)``.
        """
        scales = Scales(len(out), alpha, beta)
        add_patch_squares(self._device, Layer(x, out, scales, self.geometry(x, window)))

    def geometry(self, x: Array, window: Window) -> Geometry:
        """Return images and window as structs of the kernels."""
        key = window, x.shape, x.strides, x.dtype.itemsize
        if key not in self._geometries:
            self._geometries[key] = image_geometry(x, window)
        return self._geometries[key]


class GroupProducts:
    """Computes Gram matrices and squared gradients of groups of channels on one device.

    ``scratch_bytes`` bounds the partial results of one product, and may be changed.
    """

    def __init__(self, device: Device, scratch_bytes: int) -> None:
        self._device = device
        self.scratch_bytes = scratch_bytes

    def add_moments(self, x: Array, window: Window, out: Array, how: Accumulation) -> None:
        """Compute ``out ← beta·out + alpha·Σ z zᵀ`` for each group, in place.

        ``x`` is ``(n, channels, *spatial_shape)`` with any strides, float32, float16 or bfloat16.
        ``out`` is ``(groups, d, d)``, C-contiguous float32.
        """
        rows = check_group_shape(x, window, out, out.shape[2], homogeneous=how.homogeneous)
        positions = prod(window.output_shape(x.shape[2:]))
        most = max(1, MOST_POSITIONS // positions)
        for start in range(0, len(x), most):
            part = x[start : start + most]
            groups = self._groups(out, rows, rows, how)
            add_group_moments(self._device, part, out, image_geometry(part, window), groups)
            how = how.of_others

    def add_squares(
        self, x: Array, window: Window, ds: Array, out: Array, how: Accumulation
    ) -> None:
        """Compute ``out ← beta·out + alpha·Σ_n (Σ_t z_nt ds_ntᵀ)²`` for each group, in place.

        ``x`` is as for ``add_moments``; ``ds`` is ``(n, outputs, *output_shape)``, of the same
        type. ``out`` is ``(groups, d, outputs / groups)``, C-contiguous float32.
        """
        outputs = window.output_shape(x.shape[2:])
        if len(ds) != len(x) or prod(ds.shape[2:]) != prod(outputs):
            raise ShapeError(
                f"gradients of shape {ds.shape} do not fit {len(x)} images with {outputs} outputs."
            )
        ds = ds.reshape(*ds.shape[:2], *outputs)
        columns = ds.shape[1] // len(out)
        rows = check_group_shape(x, window, out, columns, homogeneous=how.homogeneous)
        groups = self._groups(out, rows, columns, how)
        add_squares(self._device, x, ds, out, image_geometry(x, window), groups)

    def _groups(self, out: Array, rows: int, columns: int, how: Accumulation) -> Groups:
        scales = how.homogeneous, how.alpha, how.beta
        return Groups(len(out), rows, columns, *scales, self.scratch_bytes)


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
