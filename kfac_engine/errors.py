"""Defines the exceptions that public functions raise.

The tree of classes, with built-in parent classes in brackets::

    KfacError
    ├── InputError              [ValueError]           an argument, array or file is wrong
    │   ├── ModelError                                 not a usable ONNX model
    │   ├── ShapeError                                 shapes or ranks do not fit
    │   ├── NonFiniteError                             NaN or infinity where numbers were expected
    │   └── RegistrationError                          a layer, loss or parameter registered wrongly
    ├── UnknownNameError        [KeyError]             no object has this name
    │   └── UnknownAttributeError [AttributeError]     an attribute that cannot be set
    ├── UnsupportedError        [NotImplementedError]  well-formed, but not supported
    │   └── UnsupportedOpError                         an ONNX operator without derivative rule
    ├── NotReadyError           [RuntimeError]         read before it was computed
    ├── MemoryLimitError        [MemoryError]          a step needs more memory than is available
    ├── RankError               [RuntimeError]         processes do not fit together, or one failed
    └── BackendError            [RuntimeError]         the array library or ONNX Runtime failed
        └── MissingKernelError                         ONNX Runtime has no kernel for an operator

The warnings are ``DivergenceWarning``, ``ExportWarning``, ``InferenceFormWarning`` and
``OverfittingWarning``. ``warn`` issues them at the line of the caller.

Each message has one or two sentences: the error, its location and a remedy. A message is one
printable line, even if names in it have line breaks or control characters.
"""

import sys
import warnings
from collections.abc import Iterable
from difflib import get_close_matches
from types import FrameType
from typing import Self

from kfac_engine.printable import one_line


class KfacError(Exception):
    """Base class of all errors of this package.

    Attributes:
        place: The wrong entry of a batch: the name of the input, or ``"targets"``, and the index in
            it. None if the error does not concern a single entry.
        option: The argument that is wrong, with whose name the message begins; ``""`` for none.
    """

    place: tuple[str, tuple[int, ...]] | None = None
    option: str = ""

    def at(self, name: str, index: tuple[int, ...]) -> Self:
        """Set ``place``, and return the error."""
        self.place = name, index
        return self

    def of(self, option: str) -> Self:
        """Set ``option``, and return the error."""
        self.option = option
        return self

    def __str__(self) -> str:
        """Return the message as one printable line; ``KeyError`` would return its ``repr``."""
        return one_line(BaseException.__str__(self))


class InputError(KfacError, ValueError):
    """An argument, an array or a file is wrong."""


class ModelError(InputError):
    """The file or bytes are not an ONNX model this engine can use."""


class ShapeError(InputError):
    """Shapes or ranks of arrays do not fit together."""


class NonFiniteError(InputError):
    """An array that must be finite contains NaN or infinity."""


class RegistrationError(InputError):
    """A layer, loss or parameter was registered wrongly."""


class UnknownNameError(KfacError, KeyError):
    """No parameter, value, loss or option has this name."""


class UnknownAttributeError(UnknownNameError, AttributeError):
    """An object has no attribute of this name, or the attribute cannot be set."""


class UnsupportedError(KfacError, NotImplementedError):
    """The engine does not support a valid request."""


class UnsupportedOpError(UnsupportedError):
    """An ONNX operator between the parameters and the loss has no derivative rule."""


class NotReadyError(KfacError, RuntimeError):
    """A result was read before it was computed."""


class MemoryLimitError(KfacError, MemoryError):
    """A step needs more memory than is available."""


class RankError(KfacError, RuntimeError):
    """Ranks have different models, options or states, or one of them failed."""


class BackendError(KfacError, RuntimeError):
    """The array library or ONNX Runtime failed."""


class MissingKernelError(BackendError):
    """ONNX Runtime has no kernel for an operator with the element types of its node."""


class DivergenceError(KfacError, ArithmeticError):
    """The loss of a training run explodes after all of its roll-backs."""


class DivergenceWarning(UserWarning):
    """The loss of a run has become a large multiple of its first losses."""


class ExportWarning(UserWarning):
    """An exporter changed a module: the file has other parameters, or does not read an input."""


class InferenceFormWarning(UserWarning):
    """A model that is trained has normalizations or dropouts in inference form."""


class OverfittingWarning(UserWarning):
    """The validation loss of a run rose for several validations; earlier weights are better."""


_PACKAGE = __name__.partition(".")[0]
# Modules whose functions stand between two functions of this package.
_BETWEEN = frozenset({_PACKAGE, "contextlib", "functools"})


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Issue a warning, which is shown at the line that called this package."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and _root(frame) in _BETWEEN:
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level)


def _root(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]


# -- the known name that is nearest to an unknown one ----------------------------------------------

# Least similarity, as difflib measures it. At its default of 0.6, 'convolution' is near to
# 'precondition'.
_LEAST_SIMILARITY = 0.7


def suggestion(name: object, known: Iterable[str]) -> str:
    """Return `` (did you mean 'NAME'?)`` with the nearest known name, to follow an unknown name.

    The text is empty if no known name is near. Letters that differ in case only count as equal.
    """
    folded = {entry.casefold(): entry for entry in known}
    near = get_close_matches(str(name).casefold(), folded, 1, _LEAST_SIMILARITY)
    return f" (did you mean '{folded[near[0]]}'?)" if near else ""
