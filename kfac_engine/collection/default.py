"""The default collection, for code that is not handed one."""

from contextvars import ContextVar
from typing import TYPE_CHECKING

from kfac_engine.errors import RegistrationError

if TYPE_CHECKING:
    from kfac_engine.collection import LayerCollection

# A context variable: threads and tasks do not see each other's choice.
_default: ContextVar["LayerCollection | None"] = ContextVar("default collection", default=None)


def get_default_layer_collection() -> "LayerCollection":
    """The collection set as the default.

    Returns:
        The collection itself.

    Raises:
        RegistrationError: None is set.
    """
    collection = _default.get()
    if collection is None:
        raise RegistrationError(
            "no default LayerCollection is set; pass one, or use `with collection.as_default():`."
        )
    return collection


def set_default_layer_collection(layer_collection: "LayerCollection | None") -> None:
    """Make a collection the default; None clears it.

    Raises:
        RegistrationError: Another default is set; clear it first.
    """
    if layer_collection is not None and _default.get() is not None:
        raise RegistrationError(
            "a default LayerCollection is set already; clear it with "
            "set_default_layer_collection(None) first."
        )
    _default.set(layer_collection)
