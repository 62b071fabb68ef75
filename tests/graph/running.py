"""Makes, executes and compares models and canonical graphs."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
from onnx import helper

from kfac_engine.graph.structure import Graph, Input
from kfac_engine.graph.write import build_model, serialize
from tests.comparing import assert_arrays_close
from tests.models import parsed

# Models that the onnx package carries.
CARRIED = Path(onnx.__file__).parent / "backend" / "test" / "data"

# The same kernels run in both, but upgraded operators may sum in another order.
CLOSE = 1e-6

Arrays = Mapping[str, np.ndarray]


def outputs(
    model: onnx.ModelProto | bytes | str | Path,
    feeds: Arrays,
    options: ort.SessionOptions | None = None,
) -> dict[str, np.ndarray]:
    """All outputs of a model, or of its file, by name, from ONNX Runtime on the CPU."""
    source = model.SerializeToString() if isinstance(model, onnx.ModelProto) else model
    session = ort.InferenceSession(source, options, providers=["CPUExecutionProvider"])
    names = [entry.name for entry in session.get_outputs()]
    return dict(zip(names, session.run(names, dict(feeds)), strict=True))


def run_model(model: bytes, feeds: Arrays) -> dict[str, np.ndarray]:
    """All outputs of a serialized model by name, from ONNX Runtime without optimisations."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 4
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    return outputs(model, feeds, options)


def run_graph(graph: Graph, feeds: Arrays, dtype: str = "float32") -> dict[str, np.ndarray]:
    """All outputs, which have element type ``dtype``, of a canonical graph by name."""
    outputs = [Input(name, np.dtype(dtype), None) for name in graph.outputs]
    model = build_model(
        graph.nodes, graph.inputs, outputs, graph.constants, graph.opset, domains=graph.domains
    )
    return run_model(serialize(model), feeds)


def assert_same(found: Arrays, expected: Arrays, tolerance: float) -> None:
    """Check names and values."""
    assert found.keys() == expected.keys()
    assert_arrays_close(found, expected, rtol=tolerance, atol=tolerance)


def relabelled(model: onnx.ModelProto, opset: int) -> onnx.ModelProto:
    """``model`` as one of operator set ``opset``, where its operators have the same form."""
    model.opset_import[0].version = opset
    model.ir_version = min(helper.find_min_ir_version_for(model.opset_import), 13)
    return model


def simple_model(nodes: str, x: str = "float[n,2] x", **constants: object) -> onnx.ModelProto:
    """A model with an input ``x`` and the output ``y``; the nodes are not checked."""
    return parsed(f"simple ({x}) => (float[] y) {{ {nodes} }}", constants)
