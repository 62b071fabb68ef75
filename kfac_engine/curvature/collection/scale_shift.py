"""Registration of parameters that scale and shift the data."""

from collections.abc import Sequence

from kfac_engine._types import Params
from kfac_engine.curvature.blocks.base import TowerNames, uses
from kfac_engine.curvature.collection.registry import BlockRegistry, canonical_key, names_of
from kfac_engine.errors import InputError
from kfac_engine.layers.broadcast import BroadcastShape, ScaleShiftForm
from kfac_engine.losses.collection import Reuse


class ScaleAndShiftLayers(BlockRegistry):
    """The part of ``LayerCollection`` that registers scales and shifts."""

    def register_scale_and_shift(
        self,
        params: Params | Sequence[str],
        inputs: TowerNames,
        outputs: TowerNames,
        approx: str | None = None,
        reuse: Reuse = "VARIABLE_SCOPE",
        feature_axis: int = -1,
        batch_axis: int = 0,
    ) -> None:
        """Register ``outputs = inputs ∘ scale + shift``.

        Args:
            params: The scale, or ``(scale, shift)``; their shapes must be declared. They are
                broadcast against the data from the right, and have one entry along the batch.
            inputs: Name of the data before scaling, with as many axes as ``outputs``; or names over
                the uses of the parameters.
            outputs: Name of the scaled and shifted data, likewise.
            approx: ``"full"`` or ``"diagonal"``; by default that of the collection.
            reuse: Whether this is a further tower.
            feature_axis: Axis of the data for the last axis of the parameters; 1 for a number for
                each channel of ``(n, channels, …)``.
            batch_axis: Axis of the examples in the data.

        Raises:
            InputError: There are more than two parameters.
        """
        key = canonical_key(params)
        names = names_of(key)
        if len(names) > 2:
            raise InputError(f"a scale and a shift are two parameters at most, got {names}.")
        sums = self._sums(names, (*uses(outputs), *uses(inputs)), feature_axis, batch_axis)
        form = ScaleShiftForm(sums[0], sums[1] if len(sums) > 1 else None)
        self._register("scale_and_shift", key, form, (inputs, outputs), approx, reuse)

    def register_shift(
        self,
        params: str,
        outputs: TowerNames,
        approx: str | None = None,
        reuse: Reuse = "VARIABLE_SCOPE",
        feature_axis: int = -1,
        batch_axis: int = 0,
    ) -> None:
        """Register ``outputs = inputs + shift`` without a trained scale.

        Args:
            params: The shift.
            outputs: As in ``register_scale_and_shift``.
            approx: As in ``register_scale_and_shift``.
            reuse: Whether this is a further tower.
            feature_axis: As in ``register_scale_and_shift``.
            batch_axis: As in ``register_scale_and_shift``.

        Raises:
            InputError: There are several parameters.
        """
        if not isinstance(params, str):
            raise InputError(f"a shift is one parameter, got {params}.")
        (sums,) = self._sums((params,), uses(outputs), feature_axis, batch_axis)
        form = ScaleShiftForm(None, sums)
        self._register("shift", params, form, ((), outputs), approx, reuse)

    def _sums(
        self, names: Sequence[str], data: Sequence[str], feature_axis: int, batch_axis: int
    ) -> list[BroadcastShape]:
        """Return the broadcasts of parameters, checked against the first data of known shape."""
        sums = [BroadcastShape(self.require_shape(n), feature_axis, batch_axis) for n in names]
        known = next((shape for name in data if (shape := self.shape_of(name))), None)
        if known is not None:  # otherwise the first batch is checked
            for reduction in sums:
                reduction.summed(known)
        return sums
