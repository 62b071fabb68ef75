"""Computes Gram matrices and squared gradients of patches and channel groups by CUDA kernels."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from math import prod
from types import MappingProxyType

import numpy as np

from kfac_engine._types import Array
from kfac_engine.backend.channel_groups import Accumulation, check_group_shape
from kfac_engine.backend.cuda import recipes
from kfac_engine.backend.cuda.pair_moments import PairMoments
from kfac_engine.backend.cuda.recipes import MOST_POSITIONS, Product, Recipe, Terms, image_geometry
from kfac_engine.backend.window import Window, pointwise
from kfac_engine.errors import ShapeError
from kfac_engine.kernels.geometry import AXES, JOB, SUM, Geometry, grid_struct, words
from kfac_engine.kernels.groups import Groups, add_group_moments, add_squares
from kfac_engine.kernels.launch import Device
from kfac_engine.kernels.moments import TILE, Pass, Scales, add_products
from kfac_engine.kernels.patches import add_border, add_patch_squares
from kfac_engine.kernels.tuned import UNITS, Choice, Choices, choices, shape_key

# Least number of positions of a block. With fewer positions, the start of the block dominates.
_SHORTEST = 512
_DEPTH = 16  # positions that a block of patch_products.cu loads at a time


def plan(
    window: Window,
    images: int,
    channels: int,
    spatial_shape: tuple[int, ...],
    blocks: int,
    scratch_bytes: int,
) -> tuple[Pass, ...]:
    """Return the passes that compute a Gram matrix of patches, with arrays of the host.

    Each pass computes different tiles. The products are divided into ``blocks`` pieces or less.
    ``scratch_bytes`` bounds the partial results of a pass.
    """
    recipe = recipes.recipe_for(window, images, channels, spatial_shape)
    needed = {part for terms in recipe.terms.values() for part, _ in terms}
    total = sum(images * recipe.positions(part.grid) for part in needed)
    length = recipes.piece_length(total, blocks, _SHORTEST, _DEPTH)
    capacity = max(1, scratch_bytes // (TILE**2 * 4))
    groups = recipes.fitting(recipe, images, length, capacity)
    return tuple(_pass(recipe, images, length, group) for group in groups)


def _pass(recipe: Recipe, images: int, length: int, group: Terms) -> Pass:
    jobs: list[tuple[int, int, int, int, int]] = []
    pieces: dict[Product, range] = {}
    sums: list[tuple[int, ...]] = []
    sources: list[int] = []
    for tile, terms in group.items():
        begin = len(sources)
        for part, minus in terms:
            if part not in pieces:
                stop = images * recipe.positions(part.grid)
                cuts = range(0, stop, length)
                pieces[part] = range(len(jobs), len(jobs) + len(cuts))
                jobs += [(*part, cut, min(cut + length, stop)) for cut in cuts]
            sources += [~index if minus else index for index in pieces[part]]
        sums.append(recipe.sum_row(tile, begin, len(sources)))
    grids = np.concatenate([grid_struct(*box) for box in recipe.grids])
    return Pass(
        recipe.width % TILE == 0,
        grids,
        np.array(jobs, JOB),
        np.array(sums, SUM),
        np.array(sources, np.int32),
    )


class PatchMoments:
    """Computes Gram matrices of patches on one device, with one plan for each geometry.

    ``scratch_bytes`` bounds the partial results of one pass, and may be changed. ``products`` is
    the number of products of tensor cores for each float32 product: 3 has float32 accuracy, 1 has
    11 bits, and 0 uses FP32 units. ``tuned`` has choices of ways by shape; by default the model of
    ``PairMoments`` chooses. Images that do not fit the scratch memory use FP32 units.
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
        self._pairs = PairMoments(device, products)
        self._plans: dict[tuple[object, ...], tuple[Pass, ...]] = {}
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
        outputs = window.output_shape(x.shape[2:])
        choice = self._choice(x, window)
        if choice.way != UNITS:
            self._pairs.add(x, window, out, how, self.scratch_bytes, choice)
            return
        self.settle(out)
        most = max(1, MOST_POSITIONS // prod(outputs))
        for start in range(0, len(x), most):
            self._add(x[start : start + most], window, out, how, choice.blocks)
            how = how.of_others

    def ways(self, x: Array, window: Window) -> tuple[str, ...]:
        """Return the ways to multiply patches, the default first; see ``kernels/tuned.py``."""
        pairs = self._pairs.ways(x, window, self.scratch_bytes) if self.products else ()
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
        with self._pairs.gathered():
            try:
                yield
            except BaseException:
                self._pairs.forget()
                raise
        self.flush()

    def settle(self, out: Array) -> None:
        """Compute what waits if ``out`` is among it, before another operation changes ``out``."""
        if self._pairs.awaits(out):
            self.flush()

    def flush(self) -> None:
        """Compute the matrices of all calls of ``add`` in a ``gathered`` context."""
        self._pairs.flush(self.scratch_bytes)

    def _add(self, x: Array, window: Window, out: Array, how: Accumulation, blocks: int) -> None:
        passes = self._passes(window, len(x), x.shape[1], x.shape[2:], blocks)
        geometry = self.geometry(x, window)
        scales = Scales(window.taps * x.shape[1], how.alpha, how.beta)
        add_products(self._device, x, out, geometry, passes, scales)
        if how.homogeneous:
            add_border(self._device, x, out, geometry, scales)

    def add_squares(
        self, x: Array, window: Window, out: Array, *, alpha: float, beta: float
    ) -> None:
        """Compute ``out ← beta·out + alpha·Σ z²`` over all patches, entry by entry, in place.

        The arguments are as for ``add``, but ``out`` is ``(taps·channels,)``.
        """
        scales = Scales(len(out), alpha, beta)
        add_patch_squares(self._device, x, out, self.geometry(x, window), scales)

    def geometry(self, x: Array, window: Window) -> Geometry:
        """Return images and window as structs of the kernels."""
        key = window, x.shape, x.strides, x.dtype.itemsize
        if key not in self._geometries:
            self._geometries[key] = image_geometry(x, window)
        return self._geometries[key]

    def _passes(
        self,
        window: Window,
        images: int,
        channels: int,
        spatial_shape: tuple[int, ...],
        blocks: int,
    ) -> tuple[Pass, ...]:
        key = window, images, channels, spatial_shape, blocks, self.scratch_bytes
        if key not in self._plans:
            host = plan(*key[:4], blocks * self._device.processors, self.scratch_bytes)
            self._plans[key] = tuple(self._uploaded(item) for item in host)
        return self._plans[key]

    def _uploaded(self, host: Pass) -> Pass:
        upload = self._device.upload
        structs = (upload(words(array)) for array in (host.grids, host.jobs, host.sums))
        return Pass(host.aligned, *structs, upload(host.sources))


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
