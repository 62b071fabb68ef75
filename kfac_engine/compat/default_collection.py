"""The default collection of the process, with the functions of TensorFlow's library."""

from kfac_engine.compat.mixins.collection import get_default, set_default
from kfac_engine.curvature.collection import LayerCollection
from kfac_engine.errors import RegistrationError


def get_default_layer_collection() -> LayerCollection:
    """Return the collection that was set as the default.

    Raises:
        RegistrationError: No default is set.
    """
    collection = get_default()
    if not isinstance(collection, LayerCollection):
        raise RegistrationError(
            "no default LayerCollection is set; pass a collection, or use `with "
            "collection.as_default():`."
        )
    return collection


def set_default_layer_collection(layer_collection: LayerCollection | None) -> None:
    """Set the default collection; None clears it.

    Raises:
        RegistrationError: Another default is set; clear it first.
    """
    set_default(layer_collection)
