"""Checks the names of extractions of patches in TensorFlow's library.

All extractions return the same patches. A name is checked, so that layers that TensorFlow's library
refuses raise an error.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

from kfac_engine.errors import UnsupportedError
from kfac_engine.layers.layer_forms import LayerForm
from kfac_engine.layers.masked import MaskedPatchView
from kfac_engine.layers.views import PatchView

Entries: TypeAlias = Sequence[int] | None
# Function of the geometry, the strides and the dilations that returns the missing property, or "".
_Requirement: TypeAlias = Callable[[PatchView, Entries, Entries], str]

_IMAGE_AXES = 4


def check_extraction(name: str | None, form: LayerForm, strides: Entries, rates: Entries) -> None:
    """Check that an extraction supports a convolution.

    Args:
        name: Name of the extraction; None supports every convolution.
        form: The convolution.
        strides: Strides of the caller.
        rates: Dilations of the caller.

    Raises:
        UnsupportedError: The name is unknown, or the extraction does not support the convolution.
    """
    requirement = _REQUIREMENTS.get(name)
    if requirement is None:
        known = ", ".join(key for key in _REQUIREMENTS if key)
        raise UnsupportedError(f"unknown extract_patches_fn '{name}'; choose one of: {known}.")
    view = form.input_view
    patches = view.patches if isinstance(view, MaskedPatchView) else view
    assert isinstance(patches, PatchView)  # the view of every convolution
    missing = requirement(patches, strides, rates)
    if missing:
        raise UnsupportedError(
            f"{name} needs {missing}; got kernel {patches.window.kernel}, strides {strides} and "
            f"dilations {rates}. Omit extract_patches_fn."
        )


def _anything(patches: PatchView, strides: Entries, rates: Entries) -> str:
    del patches, strides, rates
    return ""


def _images(patches: PatchView, strides: Entries, rates: Entries) -> str:
    entered = [entries for entries in (strides, rates) if entries is not None]
    fits = patches.rank == _IMAGE_AXES and all(len(entries) == _IMAGE_AXES for entries in entered)
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
