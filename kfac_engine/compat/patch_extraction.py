"""The specification's names for ways to extract patches, and the layers each may describe.

Here one way serves all layers. A name is checked, so that a description that would have been
refused there is not accepted here with another meaning.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

from kfac_engine.errors import UnsupportedError
from kfac_engine.layers.layer_forms import LayerForm
from kfac_engine.layers.masked import MaskedPatchView
from kfac_engine.layers.views import PatchView

Entries: TypeAlias = Sequence[int] | None
# Takes the geometry, the strides and the dilations as given; returns what is missing, or nothing.
_Requirement: TypeAlias = Callable[[PatchView, Entries, Entries], str]

_IMAGE_AXES = 4


def check_extraction(name: str | None, form: LayerForm, strides: Entries, rates: Entries) -> None:
    """Refuse a name that does not describe this convolution.

    Args:
        name: Of the extraction; None is the general one.
        form: The convolution.
        strides: As the caller gave them.
        rates: Dilations, as the caller gave them.

    Raises:
        UnsupportedError: There is no such extraction, or it does not apply.
    """
    requirement = _REQUIREMENTS.get(name)
    if requirement is None:
        known = ", ".join(key for key in _REQUIREMENTS if key)
        raise UnsupportedError(f"unknown extract_patches_fn '{name}'; choose one of: {known}.")
    view = form.input_view
    patches = view.patches if isinstance(view, MaskedPatchView) else view
    assert isinstance(patches, PatchView)  # of a convolution
    missing = requirement(patches, strides, rates)
    if missing:
        raise UnsupportedError(
            f"{name} needs {missing}; got kernel {patches.window.kernel}, strides {strides} and "
            f"dilations {rates}. Leave extract_patches_fn out."
        )


def _anything(patches: PatchView, strides: Entries, rates: Entries) -> str:
    del patches, strides, rates
    return ""


def _images(patches: PatchView, strides: Entries, rates: Entries) -> str:
    given = [entries for entries in (strides, rates) if entries is not None]
    fits = patches.rank == _IMAGE_AXES and all(len(entries) == _IMAGE_AXES for entries in given)
    return "" if fits else "images with two spatial axes, strides and dilations of four entries"


def _pointwise(patches: PatchView, strides: Entries, rates: Entries) -> str:
    del strides, rates
    fits = patches.window.kernel == patches.window.strides == (1, 1)
    return "" if fits else "a filter of one pixel and strides of one"


_REQUIREMENTS: Mapping[str | None, _Requirement] = {
    None: _anything,
    "extract_convolution_patches": _anything,
    "extract_image_patches": _images,
    "extract_pointwise_conv2d_patches": _pointwise,
}
