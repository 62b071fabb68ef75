"""Merges the uses of a weight into one layer."""

from collections.abc import Sequence
from dataclasses import replace

from kfac_engine.layers.match import LayerMatch, Tensors

# Layer kind with one use to the kind for several uses.
_SEVERAL_USES = {
    "conv1d": "convolution_multi",
    "conv2d": "conv2d_multi",
    "conv_transpose": "conv_transpose_multi",
    "convolution": "convolution_multi",
    "embedding": "embedding_multi",
    "fully_connected": "fully_connected_multi",
    "grouped_convolution": "grouped_convolution_multi",
    "scale_and_shift": "scale_and_shift",
    "shift": "shift",
}


def merge_uses(uses: Sequence[LayerMatch], several: str) -> LayerMatch | str:
    """Merge the uses of a weight into one layer.

    Args:
        uses: A layer for each use, at least one.
        several: Description of the uses, with which the reason begins.

    Returns:
        The layer, or the reason why there is none.
    """
    first = uses[0]
    if len(uses) == 1:
        return first
    kinds = sorted({use.kind for use in uses})
    if len(kinds) > 1 or first.kind not in _SEVERAL_USES:
        return f"{several}: no approximation covers several uses as {' and '.join(kinds)}"
    if any(use.options != first.options for use in uses):
        return f"{several}, with different properties"
    kind, options = _SEVERAL_USES[first.kind], dict(first.options)
    if "dilation_rate" in options and kind == "convolution_multi":
        options["dilations"] = options.pop("dilation_rate")
    # A bias that differs between the uses does not belong to the layer.
    same = all(use.parameters == first.parameters for use in uses)
    return replace(
        first,
        kind=kind,
        options=options,
        parameters=first.parameters if same else first.parameters[:1],
        inputs=_over([use.inputs for use in uses]),
        outputs=_over([use.outputs for use in uses]),
        computed=tuple(value for use in uses for value in use.computed),
    )


def _over(uses: Sequence[Tensors]) -> tuple[str, ...]:
    return tuple(name for use in uses for name in ((use,) if isinstance(use, str) else use) if name)
