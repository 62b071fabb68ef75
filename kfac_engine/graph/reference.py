"""Evaluates a graph in float64 with the reference implementation of the onnx package.

The reference implementation is independent of ONNX Runtime, and has float64 for every operator.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import onnx
from onnx import AttributeProto, TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun
from onnx.reference.ops import op_conv as convolution
from scipy.special import erf

from kfac_engine._types import Array
from kfac_engine.graph.analysis.subgraph import SubGraph, read_by
from kfac_engine.graph.failures import model_errors
from kfac_engine.graph.structure import Graph, Input
from kfac_engine.graph.write import build_model

_DOUBLE = np.dtype(np.float64)
# Attributes that name the element type of a result.
_TYPE_ATTRIBUTES = frozenset({"to", "dtype"})


class Erf(OpRun):
    """The error function in float64; the onnx package rounds it to float32."""

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


class Conv(convolution.Conv):
    """Convolution as a sum of matrix products over the entries of the kernel.

    The onnx package copies all patches, which takes ten times as long, and is wrong for some
    groups of several channels.
    """

    op_domain = ""

    def _run(  # noqa: PLR0913 (the attributes of the operator)
        self,
        x: Array,
        weight: Array,
        bias: Array | None = None,
        auto_pad: str | None = None,
        dilations: Sequence[int] | None = None,
        group: int | None = None,
        kernel_shape: Sequence[int] | None = None,
        pads: Sequence[int] | None = None,
        strides: Sequence[int] | None = None,
    ) -> tuple[Array]:
        settings = (auto_pad, dilations, group, kernel_shape, pads, strides)
        if auto_pad not in {None, "NOTSET"}:
            result = super()._run(x, weight, bias, *settings)  # type: ignore[no-untyped-call]
            return (np.asarray(result[0]),)
        kernel, groups = weight.shape[2:], group or 1
        axes = range(len(kernel))
        step, gap = strides or [1] * len(kernel), dilations or [1] * len(kernel)
        ends = pads or [0] * (2 * len(kernel))
        padded = np.pad(x, [(0, 0), (0, 0), *((ends[i], ends[i + len(kernel)]) for i in axes)])
        sides = [(padded.shape[2 + i] - gap[i] * (kernel[i] - 1) - 1) // step[i] + 1 for i in axes]
        filters = weight.reshape(groups, -1, *weight.shape[1:])
        total: Array = np.zeros(())
        for tap in np.ndindex(*kernel):
            starts = [tap[i] * gap[i] for i in axes]
            window = [slice(starts[i], starts[i] + step[i] * sides[i], step[i]) for i in axes]
            pixels = padded[(slice(None), slice(None), *window)]
            pixels = pixels.reshape(len(x), groups, weight.shape[1], -1)
            total = total + filters[(..., *tap)] @ pixels
        total = total.reshape(len(x), len(weight), *sides)
        shape = (-1, *[1] * len(kernel))
        return (total if bias is None else total + bias.reshape(shape),)


class ReferenceModel:
    """A graph in standard operators, in float32 or float64, that is evaluated in float64.

    ``outputs`` are evaluated, and the constants and results ``fed`` are inputs. A graph that the
    reference implementation does not read raises a ModelError.
    """

    def __init__(self, graph: Graph, outputs: Sequence[str], fed: Iterable[str]) -> None:
        self._outputs, names = list(outputs), dict.fromkeys(fed)
        computed = [node for node in graph.nodes if not names.keys() & set(node.outputs)]
        nodes = SubGraph(replace(graph, nodes=tuple(computed)), outputs).nodes
        constants = read_by(nodes, graph.constants, excluded=names)
        inputs = [*graph.inputs, *(Input(name, _DOUBLE, None) for name in names)]
        model = build_model(
            nodes, [replace(entry, shape=None) for entry in inputs], outputs, constants,
            graph.opset, domains=graph.domains,
        )  # fmt: skip
        _widen(model.graph)
        with model_errors("the reference implementation of onnx cannot read the model"):
            self._evaluator = ReferenceEvaluator(model, new_ops=[Conv, Erf, Gelu])

    def run(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        """Evaluate the graph in float64.

        ``feeds`` has the inputs of the graph and the ``fed`` values, as floats of any width.
        """
        wide = {n: a.astype(np.float64) if a.dtype.kind == "f" else a for n, a in feeds.items()}
        # Masks and unused branches are infinite or NaN on purpose, as in ONNX Runtime.
        silent = np.errstate(all="ignore")
        with silent, model_errors("the reference implementation of onnx cannot evaluate the model"):
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
