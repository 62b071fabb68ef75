"""Models for estimators."""

import numpy as np
import onnx

from tests.models import parsed

ELEMENTS = {"float32": "float", "float64": "double", "int64": "int64"}


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
    weights = {name: array.astype(dtype) for name, array in arrays.items()}
    last = last or "Identity"
    end = "z = Identity (p)" if column else "z = Reshape (p, flat_shape)"
    nodes = f"""flat = Flatten (x)  s1 = Gemm (flat, w1, b1)  a1 = Relu (s1)
      s2 = Gemm (a1, w2, b2)  p = {last} (s2)  {end}"""
    sides = ",".join(map(str, shape or (features,)))
    element, result = ELEMENTS[dtype], "double" if dtype == "float64" else "float"
    ends = f"network ({element}[n,{sides}] x) => ({result}[n{f',{outputs}' if column else ''}] z)"
    return checked(f"{ends} {{ {nodes} }}", weights if column else weights | {"flat_shape": [-1]})


def checked(graph, constants):
    """A model from text, checked."""
    model = parsed(graph, constants)
    onnx.checker.check_model(model, full_check=True)
    return model


def double_network(features: int, outputs: int) -> onnx.ModelProto:
    """A network in float64."""
    return network(features, outputs, dtype="float64")
