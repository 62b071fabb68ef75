"""Models for estimators, written with the helpers of the onnx package."""

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

CODES = {"float32": TensorProto.FLOAT, "float64": TensorProto.DOUBLE, "int64": TensorProto.INT64}


def network(
    features: int,
    outputs: int,
    *,
    dtype: str = "float32",
    shape: tuple[int | str, ...] | None = None,
    last: str = "",
    column: bool = True,
    seed: int = 0,
) -> onnx.ModelProto:
    """Dense layers of 16 ReLUs on ``shape``, flattened; ``last`` is an operator on the output."""
    rng = np.random.default_rng(seed)
    arrays = {
        "w1": rng.standard_normal((features, 16)) * np.sqrt(2 / features),
        "b1": np.zeros(16),
        "w2": rng.standard_normal((16, outputs)) / 4,
        "b2": np.zeros(outputs),
    }
    nodes = [
        helper.make_node("Flatten", ["x"], ["flat"]),
        helper.make_node("Gemm", ["flat", "w1", "b1"], ["s1"]),
        helper.make_node("Relu", ["s1"], ["a1"]),
        helper.make_node("Gemm", ["a1", "w2", "b2"], ["s2"]),
        helper.make_node(last or "Identity", ["s2"], ["p"]),
        helper.make_node("Identity", ["p"], ["z"])
        if column
        else helper.make_node("Reshape", ["p", "flat_shape"], ["z"]),
    ]
    weights = [numpy_helper.from_array(a.astype(dtype), name) for name, a in arrays.items()]
    if not column:
        weights.append(numpy_helper.from_array(np.array([-1]), "flat_shape"))
    result = ["n", outputs] if column else ["n"]
    return written(nodes, weights, ("n", *(shape or (features,))), result, dtype)


def written(nodes, weights, shape, result, dtype="float32", inputs="x"):
    """A checked model with equal inputs, and the output ``z``."""
    graph = helper.make_graph(
        nodes,
        "network",
        [helper.make_tensor_value_info(name, CODES[dtype], shape) for name in inputs],
        [helper.make_tensor_value_info("z", CODES["float64" if dtype == "float64" else "float32"],
                                       result)],
        weights,
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    onnx.checker.check_model(model, full_check=True)
    return model


def double_network(features: int, outputs: int) -> onnx.ModelProto:
    """A network in float64."""
    return network(features, outputs, dtype="float64")
