"""Methods of a collection for the default collection and the default approximations."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Protocol, Self

from kfac_engine.errors import RegistrationError


class Collection(Protocol):
    """The part of ``LayerCollection`` that the mixin calls."""

    def default_approximation(self, kind: str) -> str:
        """Return the default approximation of a kind of layer."""

    def set_default_approximation(self, kind: str, value: str) -> None:
        """Set the default approximation of a kind of layer."""


def _default(kind: str) -> property:
    """Return a property for the default approximation of a kind of layer."""

    def default(self: Collection) -> str:
        return self.default_approximation(kind)

    return property(default, doc=f"Default approximation of layers of the kind '{kind}'.")


def _setter(kind: str) -> Callable[[Collection, str], None]:
    """Return a method that sets the default approximation of a kind of layer."""

    def set_default(self: Collection, value: str) -> None:
        self.set_default_approximation(kind, value)

    set_default.__doc__ = (
        f"Set the default approximation of layers of the kind '{kind}'; raise an InputError for an "
        f"approximation that the kind does not have."
    )
    return set_default


class CollectionDefaults:
    """Properties for the default collection and for the default approximation of each kind."""

    default_generic_approximation = _default("generic")
    default_fully_connected_approximation = _default("fully_connected")
    default_fully_connected_multi_approximation = _default("fully_connected_multi")
    default_conv2d_approximation = _default("conv2d")
    default_conv2d_multi_approximation = _default("conv2d_multi")
    default_embedding_approximation = _default("embedding")
    default_embedding_multi_approximation = _default("embedding_multi")
    default_scale_and_shift_approximation = _default("scale_and_shift")

    set_default_generic_approximation = _setter("generic")
    set_default_fully_connected_approximation = _setter("fully_connected")
    set_default_fully_connected_multi_approximation = _setter("fully_connected_multi")
    set_default_conv2d_approximation = _setter("conv2d")
    set_default_conv2d_multi_approximation = _setter("conv2d_multi")
    set_default_embedding_approximation = _setter("embedding")
    set_default_embedding_multi_approximation = _setter("embedding_multi")
    set_default_scale_and_shift_approximation = _setter("scale_and_shift")

    @contextmanager
    def as_default(self) -> Iterator[Self]:
        """Return a context in which ``get_default_layer_collection`` returns this collection."""
        set_default(self)
        try:
            yield self
        finally:
            set_default(None)


# A context variable, so that threads and tasks have separate defaults.
_default_collection: ContextVar[CollectionDefaults | None] = ContextVar(
    "default collection", default=None
)


def get_default() -> CollectionDefaults | None:
    """Return the default collection; None if no default is set."""
    return _default_collection.get()


def set_default(collection: CollectionDefaults | None) -> None:
    """Set the default collection; None clears it.

    Raises:
        RegistrationError: Another default is set.
    """
    if collection is not None and _default_collection.get() is not None:
        raise RegistrationError(
            "a default LayerCollection is set already; clear it with "
            "set_default_layer_collection(None) first."
        )
    _default_collection.set(collection)
