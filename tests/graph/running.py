"""Executes models and canonical graphs, and finds the models that the onnx package carries."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort

from kfac_engine.graph.structure import Graph, Input
from kfac_engine.graph.write import build_model, serialize

CARRIED = Path(onnx.__file__).parent / "backend" / "test" / "data"

Arrays = Mapping[str, np.ndarray]


def run_model(model: bytes, feeds: Arrays) -> dict[str, np.ndarray]:
    """All outputs of a serialized model by name, from ONNX Runtime without optimisations."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 4
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    names = [entry.name for entry in session.get_outputs()]
    return dict(zip(names, session.run(names, dict(feeds)), strict=True))


def run_graph(graph: Graph, feeds: Arrays, dtype: str = "float32") -> dict[str, np.ndarray]:
    """All outputs, which have element type ``dtype``, of a canonical graph by name."""
    outputs = [Input(name, np.dtype(dtype), None) for name in graph.outputs]
    model = build_model(
        graph.nodes, graph.inputs, outputs, graph.constants, graph.opset, domains=graph.domains
    )
    return run_model(serialize(model), feeds)
