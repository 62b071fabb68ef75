"""Converts exceptions of the onnx package about a model into a ModelError."""

from collections.abc import Iterator
from contextlib import contextmanager

from google.protobuf.message import Error as ProtobufError  # type: ignore[import-untyped]  # has no stubs
from onnx import checker, shape_inference, version_converter

from kfac_engine.errors import KfacError, ModelError

# Python types of the exceptions of the C++ passes of onnx.
_RAISED = (
    ArithmeticError,
    AttributeError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
    ProtobufError,
    checker.ValidationError,
    shape_inference.InferenceError,
    version_converter.ConvertError,
)


@contextmanager
def model_errors(what: str, cure: str = "") -> Iterator[None]:
    """Return a context that converts exceptions of the onnx package to ModelErrors.

    ``what`` is the failure, such as "the functions cannot be inlined"; ``cure`` is the remedy, if
    there is one. A KfacError passes unchanged.
    """
    try:
        yield
    except KfacError:
        raise
    except _RAISED as failure:
        remedy = f"; {cure}" if cure else ""
        raise ModelError(f"{what}: {_first_line(failure)}{remedy}.") from failure


def _first_line(failure: Exception) -> str:
    """Return the first line of an exception's message, without the final period."""
    text = next((line for line in str(failure).splitlines() if line.strip()), "no reason given")
    return text.strip().rstrip(".")
