"""Models for a runtime in the same process, which is handed large constants beside the message.

Written into the message they would be copied twice, and a message ends at 2 GB. Here they are
declared as external data, which ONNX Runtime copies once, into the form its kernels like; or as
inputs, which it reads where they lie.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from onnx import TensorProto, helper

from kfac_engine._types import Array
from kfac_engine.graph.structure import Input, Node
from kfac_engine.graph.write import build_model, serialize

# Smaller ones are shapes, axes and scales, which optimisations of the runtime look into.
_SMALL_BYTES = 4096

# The runtime takes arrays of NumPy's own types; packed and half types stay in the message.
_SHARED_KINDS = "biuf"

# With more constants than this, a copy is worth more than quicker kernels.
_MOST_COPIED_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class CompactModel:
    """A model in parts.

    Attributes:
        proto: The serialized message.
        copied: Constants that it declares as external data; contiguous.
        fed: Constants that it declares as inputs.
        nodes: Number of its nodes.
    """

    proto: bytes
    copied: Mapping[str, Array] = field(default_factory=dict)
    fed: Mapping[str, Array] = field(default_factory=dict)
    nodes: int = 0


def compact_model(  # noqa: PLR0913 (those of build_model, and one)
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
    """A model made of ``nodes``; the first arguments are those of ``build_model``.

    Args:
        nodes: In topological order.
        inputs: What is fed.
        outputs: What can be fetched.
        constants: Small ones become initializers.
        opset: Version of the standard operator set.
        name: Name of the graph, for messages.
        domains: Versions of other operator domains in use.
        once: Whether the model is run but once, so that no constant is worth a copy.

    Returns:
        The message, and the large constants.

    Raises:
        ModelError: The message is larger than 2 GB.
    """
    large = {key: array for key, array in constants.items() if _is_large(array)}
    small = {key: array for key, array in constants.items() if key not in large}
    size = sum(array.nbytes for array in large.values())
    copied, fed = ({}, large) if once or size > _MOST_COPIED_BYTES else (large, {})
    given = [*inputs, *(Input(key, array.dtype, array.shape) for key, array in fed.items())]
    model = build_model(nodes, given, outputs, small, opset, name=name, domains=domains)
    model.graph.initializer.extend(_declaration(key, array) for key, array in copied.items())
    contiguous = {key: np.ascontiguousarray(array) for key, array in copied.items()}
    return CompactModel(serialize(model), contiguous, fed, len(nodes))


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
