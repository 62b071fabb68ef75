"""Models for a runtime in the same process, which reads large constants where they lie.

Written into the message they would be copied twice, and a message ends at 2 GB. Here they are
declared as external data, and their arrays are handed to the session beside the message.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from onnx import TensorProto, helper

from kfac_engine._types import Array
from kfac_engine.graph.structure import Input, Node
from kfac_engine.graph.write import build_model, serialize

# Smaller ones are shapes, axes and scales, which optimisations of the runtime look into.
_SMALL_BYTES = 4096

# The runtime takes arrays of NumPy's own types; packed and half types stay in the message.
_SHARED_KINDS = "biuf"


@dataclass(frozen=True, slots=True)
class CompactModel:
    """A model in two parts.

    Attributes:
        proto: The serialized message.
        shared: Constants that it declares, but does not hold; contiguous.
    """

    proto: bytes
    shared: Mapping[str, Array]


def compact_model(
    nodes: Sequence[Node],
    inputs: Sequence[Input],
    outputs: Sequence[Input | str],
    constants: Mapping[str, Array],
    opset: int,
    *,
    name: str = "model",
    domains: Mapping[str, int] | None = None,
) -> CompactModel:
    """A model made of ``nodes``; the arguments are those of ``build_model``.

    Args:
        nodes: In topological order.
        inputs: What is fed.
        outputs: What can be fetched.
        constants: Large ones are shared, small ones become initializers.
        opset: Version of the standard operator set.
        name: Name of the graph, for messages.
        domains: Versions of other operator domains in use.

    Returns:
        Message and shared constants.

    Raises:
        ModelError: The message is larger than 2 GB.
    """
    large = {key: array for key, array in constants.items() if _is_large(array)}
    small = {key: array for key, array in constants.items() if key not in large}
    model = build_model(nodes, inputs, outputs, small, opset, name=name, domains=domains)
    model.graph.initializer.extend(_declaration(key, array) for key, array in large.items())
    shared = {key: np.ascontiguousarray(array) for key, array in large.items()}
    return CompactModel(serialize(model), shared)


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
