"""Evaluates a graph in float64 by the reference implementation of the onnx package.

The reference implementation is independent of ONNX Runtime, and has float64 for every operator.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import onnx
from onnx import AttributeProto, TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun
from scipy.special import erf

from kfac_engine._types import Array
from kfac_engine.graph.analysis.subgraph import read_by
from kfac_engine.graph.failures import model_errors
from kfac_engine.graph.structure import Graph, Input
from kfac_engine.graph.write import build_model

_DOUBLE = np.dtype(np.float64)
# Attributes that name the element type of a result.
_TYPE_ATTRIBUTES = frozenset({"to", "dtype"})


class Erf(OpRun):
    """The error function in float64; that of the onnx package rounds to float32."""

    op_domain = ""

    def _run(self, x: Array) -> tuple[Array]:
        return (np.asarray(erf(x)),)


class Gelu(OpRun):
    """Gelu in float64; the constants of the onnx package are float32."""

    op_domain = ""

    def _run(self, x: Array, approximate: str = "none") -> tuple[Array]:
        if approximate == "tanh":
            inner = np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))
        else:
            inner = erf(x / np.sqrt(2))
        return (0.5 * x * (1 + inner),)


class ReferenceModel:
    """A graph that is evaluated in float64.

    Args:
        graph: Graph in standard operators, in float32 or float64.
        outputs: Names of the values to evaluate.
        fed: Names of constants and results that are inputs here.

    Raises:
        ModelError: The reference implementation does not read the graph.
    """

    def __init__(self, graph: Graph, outputs: Sequence[str], fed: Iterable[str]) -> None:
        self._outputs, names = list(outputs), dict.fromkeys(fed)
        nodes = [node for node in graph.nodes if not names.keys() & set(node.outputs)]
        constants = read_by(nodes, graph.constants, excluded=names)
        inputs = [*graph.inputs, *(Input(name, _DOUBLE, None) for name in names)]
        model = build_model(
            nodes, [replace(entry, shape=None) for entry in inputs], outputs, constants,
            graph.opset, domains=graph.domains,
        )  # fmt: skip
        _widen(model.graph)
        with model_errors("the reference implementation of onnx cannot read the model"):
            self._evaluator = ReferenceEvaluator(model, new_ops=[Erf, Gelu])

    def run(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        """Evaluate the graph.

        Args:
            feeds: Name to array for the inputs of the graph and the ``fed`` values; floats of any
                width.

        Returns:
            Name to array in float64, or of its own type if it is not a float.

        Raises:
            ModelError: The reference implementation fails on the graph.
        """
        wide = {n: a.astype(np.float64) if a.dtype.kind == "f" else a for n, a in feeds.items()}
        with model_errors("the reference implementation of onnx cannot evaluate the model"):
            results = self._evaluator.run(self._outputs, wide)
        return dict(zip(self._outputs, map(np.asarray, results), strict=True))


def _widen(graph: onnx.GraphProto) -> None:
    """Convert the float32 tensors and types of a graph to float64, in place."""
    for initializer in graph.initializer:
        _widen_tensor(initializer)
    for entry in (*graph.input, *graph.output, *graph.value_info):
        if entry.type.tensor_type.elem_type == TensorProto.FLOAT:
            entry.type.tensor_type.elem_type = TensorProto.DOUBLE
    for node in graph.node:
        if node.op_type == "ConstantOfShape" and not node.attribute:
            zero = helper.make_tensor("value", TensorProto.FLOAT, [1], [0.0])
            node.attribute.append(helper.make_attribute("value", zero))
        for attribute in node.attribute:
            _widen_attribute(attribute)


def _widen_attribute(attribute: AttributeProto) -> None:
    if attribute.type == AttributeProto.TENSOR:
        _widen_tensor(attribute.t)
    elif attribute.type == AttributeProto.GRAPH:
        _widen(attribute.g)
    elif attribute.name in _TYPE_ATTRIBUTES and attribute.i == TensorProto.FLOAT:
        attribute.i = TensorProto.DOUBLE


def _widen_tensor(values: TensorProto) -> None:
    if values.data_type == TensorProto.FLOAT:
        array = numpy_helper.to_array(values).astype(np.float64)
        values.CopyFrom(numpy_helper.from_array(array, values.name))
