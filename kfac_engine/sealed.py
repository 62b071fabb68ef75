"""Defines objects that refuse unknown attributes, so that a misspelled option is an error."""

from collections.abc import Collection
from typing import ClassVar

from kfac_engine.errors import UnknownAttributeError, suggestion


class Sealed:
    """A base class whose objects refuse new attributes once ``_sealed`` is True."""

    # Names of constructor arguments that cannot be set later, for messages.
    _fixed: ClassVar[Collection[str]] = ()
    _sealed = False

    def __setattr__(self, name: str, value: object) -> None:
        """Set an attribute; raise an UnknownAttributeError for a name that cannot be set."""
        if self._sealed and name not in vars(self) and not _can_be_set(type(self), name):
            raise UnknownAttributeError(f"{type(self).__name__} {self._reason(name)}")
        object.__setattr__(self, name, value)

    def _reason(self, name: str) -> str:
        settable = _settable(type(self))
        if name in self._fixed:
            return (
                f"takes '{name}' in its constructor; only {' and '.join(settable)} can be set "
                f"later."
            )
        if hasattr(type(self), name):
            return f"has '{name}', but only {' and '.join(settable)} can be set."
        near = suggestion(name, [*settable, *self._fixed])
        return f"has no attribute '{name}'{near}; only {' and '.join(settable)} can be set."


def _settable(cls: type) -> list[str]:
    """Return the names of the properties of a class that can be set."""
    return [name for name in dir(cls) if _can_be_set(cls, name)]


def _can_be_set(cls: type, name: str) -> bool:
    return getattr(getattr(cls, name, None), "fset", None) is not None
