"""Builds models for sessions in the same process, with large constants outside the message.

Constants inside a message are copied twice, and a message is limited to 2 GB. Large constants are
therefore declared as external data, which ONNX Runtime copies once into the layout of its kernels,
or as inputs, which it reads in place.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from onnx import TensorProto, helper

from kfac_engine._types import Array
from kfac_engine.graph.structure import Input, Node
from kfac_engine.graph.write import build_model, serialize

# Smaller constants are shapes, axes and scales, which optimizations of the runtime read.
_SMALL_BYTES = 4096

# Kinds of element types that the runtime reads from NumPy arrays. Packed and half types stay in the
# message.
_SHARED_KINDS = "biuf"

# Number of bytes of constants above which nothing is copied, because memory matters more than
# faster kernels.
MOST_COPIED_BYTES = 1 << 27


@dataclass(frozen=True, slots=True)
class CompactModel:
    """A serialized model and its large constants.

    Attributes:
        proto: The serialized message.
        copied: Constants that the message declares as external data; contiguous arrays.
        fed: Constants that the message declares as inputs, by name.
        nodes: Number of nodes.
        reads_text: Whether an input is an array of text.
    """

    proto: bytes
    copied: Mapping[str, Array] = field(default_factory=dict)
    fed: Mapping[str, Array] = field(default_factory=dict)
    nodes: int = 0
    reads_text: bool = False


def compact_model(  # noqa: PLR0913 (those of build_model, and ``once``)
    nodes: Sequence[Node],
    inputs: Sequence[Input],
    outputs: Sequence[Input | str],
    constants: Mapping[str, Array],
    opset: int,
    *,
    name: str = "model",
    domains: Mapping[str, int] | None = None,
    once: bool = False,
) -> CompactModel:
    """Return a serialized model, with its large constants outside the message.

    The arguments before ``once`` are as for ``build_model``. A model that runs only ``once`` needs
    no copy of its constants.
    """
    large = {key: array for key, array in constants.items() if _is_large(array)}
    small = {key: array for key, array in constants.items() if key not in large}
    size = sum(array.nbytes for array in large.values())
    copied, fed = ({}, large) if once or size > MOST_COPIED_BYTES else (large, {})
    declared = [*inputs, *(Input(key, array.dtype, array.shape) for key, array in fed.items())]
    model = build_model(nodes, declared, outputs, small, opset, name=name, domains=domains)
    model.graph.initializer.extend(_declaration(key, array) for key, array in copied.items())
    contiguous = {key: np.ascontiguousarray(array) for key, array in copied.items()}
    texts = any(entry.dtype.kind in "OUST" for entry in declared)
    return CompactModel(serialize(model), contiguous, fed, len(nodes), reads_text=texts)


def _is_large(array: Array) -> bool:
    return array.nbytes > _SMALL_BYTES and array.dtype.kind in _SHARED_KINDS


def _declaration(name: str, array: Array) -> TensorProto:
    declared = TensorProto(
        name=name,
        data_type=helper.np_dtype_to_tensor_dtype(array.dtype),
        dims=array.shape,
        data_location=TensorProto.EXTERNAL,
    )
    declared.external_data.add(key="location", value="memory")
    return declared
