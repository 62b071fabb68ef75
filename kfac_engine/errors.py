"""Every exception that crosses the public border.

The tree (built-in parents in brackets: the types the specification names)::

    KfacError
    ├── InputError              [ValueError]           an argument, array or file is wrong
    │   ├── ModelError                                 not a usable ONNX model
    │   ├── ShapeError                                 sides or ranks do not fit
    │   ├── NonFiniteError                             NaN or infinity where numbers were expected
    │   └── RegistrationError                          a layer, loss or parameter registered wrongly
    ├── UnknownNameError        [KeyError]             a name that nothing goes by
    │   └── UnknownAttributeError [AttributeError]     an attribute that cannot be set
    ├── UnsupportedError        [NotImplementedError]  well-formed, but not covered
    │   └── UnsupportedOpError                         an ONNX operator without derivative rule
    ├── NotReadyError           [RuntimeError]         read before it was computed
    ├── MemoryLimitError        [MemoryError]          more memory announced than the machine has
    └── BackendError            [RuntimeError]         the array library or the model runtime failed
        └── MissingKernelError                         ONNX Runtime has no kernel for an operator

One warning stands beside them: ``DivergenceWarning``, for a loss that explodes.

Each message is one sentence or two: what was wrong, where, what to do. It is one line, whatever
names it holds.
"""

from kfac_engine.printable import one_line


class KfacError(Exception):
    """Base of all errors a user can cause."""

    def __str__(self) -> str:
        """Return the message, printable; ``KeyError`` would show its ``repr``."""
        return one_line(BaseException.__str__(self))


class InputError(KfacError, ValueError):
    """An argument, array or file given by the user is wrong."""


class ModelError(InputError):
    """The file or bytes are not an ONNX model this engine can use."""


class ShapeError(InputError):
    """Ranks or sides of arrays do not fit together."""


class NonFiniteError(InputError):
    """NaN or infinity reached a place where it would poison the state."""


class RegistrationError(InputError):
    """A layer, loss or parameter was registered wrongly."""


class UnknownNameError(KfacError, KeyError):
    """A name that no parameter, tensor, loss or option goes by."""


class UnknownAttributeError(UnknownNameError, AttributeError):
    """An attribute that an object does not have, or that cannot be set."""


class UnsupportedError(KfacError, NotImplementedError):
    """The request is well-formed, but this engine does not cover it."""


class UnsupportedOpError(UnsupportedError):
    """An ONNX operator on the differentiated path has no derivative rule."""


class NotReadyError(KfacError, RuntimeError):
    """A result was read before it was computed."""


class MemoryLimitError(KfacError, MemoryError):
    """A step would need more memory than the machine has."""


class BackendError(KfacError, RuntimeError):
    """The array library or the model runtime cannot do what was asked."""


class MissingKernelError(BackendError):
    """ONNX Runtime has no kernel for an operator in the element types of its node."""


class DivergenceWarning(UserWarning):
    """The loss of a run has become a large multiple of its first losses."""
