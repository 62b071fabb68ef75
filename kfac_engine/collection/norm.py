"""Registration of parameters that scale and shift the data."""

from collections.abc import Sequence

from kfac_engine._types import Params
from kfac_engine.blocks.scale_shift import ScaleShiftForm
from kfac_engine.collection.registry import BlockRegistry, canonical_key, names_of
from kfac_engine.errors import InputError
from kfac_engine.layers.broadcast import BroadcastShape
from kfac_engine.losses.collection import Reuse


class ScaleAndShiftLayers(BlockRegistry):
    """The part of ``LayerCollection`` that registers scales and shifts."""

    def register_scale_and_shift(
        self,
        params: Params | Sequence[str],
        inputs: str,
        outputs: str,
        approx: str | None = None,
        reuse: Reuse = "VARIABLE_SCOPE",
        feature_axis: int = -1,
    ) -> None:
        """Register ``outputs = inputs ∘ scale + shift``.

        Args:
            params: The scale, or ``(scale, shift)``; their shapes must be declared. They are
                broadcast against the data from the right; along the batch they have one entry.
            inputs: Name of the data before scaling, with as many axes as ``outputs``.
            outputs: Name of the scaled and shifted data, the batch first.
            approx: ``"full"`` or ``"diagonal"``; the default when left out.
            reuse: Whether this is a further tower.
            feature_axis: Axis of the data that the parameters' last axis lies along; 1 for one
                number a channel of ``(n, channels, …)``.

        Raises:
            InputError: There are more than two parameters.
        """
        key = canonical_key(params)
        names = names_of(key)
        if len(names) > 2:
            raise InputError(f"a scale and a shift are two parameters at most, got {names}.")
        sums = [BroadcastShape(self.require_shape(name), feature_axis) for name in names]
        data = self.shape_of(outputs) or self.shape_of(inputs)
        if data is not None:  # otherwise the first batch tells
            for reduction in sums:
                reduction.summed(data)
        form = ScaleShiftForm(sums[0], sums[1] if len(sums) > 1 else None)
        self._register("scale_and_shift", key, form, (inputs, outputs), approx, reuse)
