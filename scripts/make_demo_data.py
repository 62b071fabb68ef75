"""Writes the data of the demo: two small untrained classifiers of 8×8 images, and the digits.

Run from the repository root: ``python -m scripts.make_demo_data``. The same seed gives the same
bytes. The digits are those of scikit-learn, and stay as they are if it is not installed.
"""

from importlib.util import find_spec
from pathlib import Path

import numpy as np
import onnx
from onnx import NodeProto, TensorProto, helper, numpy_helper

TARGET = Path(__file__).resolve().parent.parent / "kfac_engine" / "data"
SEED = 20240229
CLASSES = 10


class Network:
    """A builder of a chain of layers."""

    def __init__(self, seed: int) -> None:
        self._rng = np.random.default_rng(seed)
        self._nodes: list[NodeProto] = []
        self._weights: list[TensorProto] = []
        self._value = "image"

    def conv(self, name: str, channels: tuple[int, int], stride: int = 1) -> "Network":
        """Append a 3×3 convolution with a padding of one."""
        self._parameters(name, (channels[1], channels[0], 3, 3))
        return self._append(
            "Conv",
            name,
            [f"{name}.weight", f"{name}.bias"],
            kernel_shape=[3, 3],
            pads=[1, 1, 1, 1],
            strides=[stride, stride],
        )

    def dense(self, name: str, sizes: tuple[int, int]) -> "Network":
        """Append a dense layer."""
        self._parameters(name, (sizes[1], sizes[0]))
        return self._append("Gemm", name, [f"{name}.weight", f"{name}.bias"], transB=1)

    def apply(self, op: str, name: str) -> "Network":
        """Append an operator without parameters."""
        return self._append(op, name, [])

    def model(self) -> onnx.ModelProto:
        """Return the chain as a checked model whose output is ``logits``."""
        self._nodes[-1].output[0] = "logits"
        graph = helper.make_graph(
            self._nodes,
            "digits",
            [helper.make_tensor_value_info("image", TensorProto.FLOAT, ["batch", 1, 8, 8])],
            [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", CLASSES])],
            self._weights,
        )
        opset = helper.make_opsetid("", 18)
        model = helper.make_model(graph, opset_imports=[opset], ir_version=9)
        onnx.checker.check_model(model, full_check=True)
        return model

    def _parameters(self, name: str, shape: tuple[int, ...]) -> None:
        # He initialization: the variance 2 / fan-in preserves the scale of activations.
        scale = np.sqrt(2 / np.prod(shape[1:]))
        weight = (self._rng.standard_normal(shape) * scale).astype(np.float32)
        bias = np.zeros(shape[0], np.float32)
        self._weights.append(numpy_helper.from_array(weight, f"{name}.weight"))
        self._weights.append(numpy_helper.from_array(bias, f"{name}.bias"))

    def _append(
        self, op: str, name: str, weights: list[str], **attributes: int | list[int]
    ) -> "Network":
        inputs = [self._value, *weights]
        self._nodes.append(helper.make_node(op, inputs, [f"{name}_out"], name, **attributes))
        self._value = f"{name}_out"
        return self


def mlp() -> onnx.ModelProto:
    """Return a model of three dense layers."""
    network = Network(SEED).apply("Flatten", "flatten")
    network.dense("dense1", (64, 64)).apply("Relu", "relu1")
    network.dense("dense2", (64, 32)).apply("Relu", "relu2")
    return network.dense("dense3", (32, CLASSES)).model()


def cnn() -> onnx.ModelProto:
    """Return a model of three convolutions, two of them strided, and two dense layers."""
    network = Network(SEED)
    network.conv("conv1", (1, 16)).apply("Relu", "relu1")
    network.conv("conv2", (16, 32), stride=2).apply("Relu", "relu2")
    network.conv("conv3", (32, 32), stride=2).apply("Relu", "relu3")
    network.apply("Flatten", "flatten")
    network.dense("dense1", (128, 64)).apply("Relu", "relu4")
    return network.dense("dense2", (64, CLASSES)).model()


def write_models(folder: Path = TARGET) -> list[Path]:
    """Write both models into a folder and return their paths."""
    paths = []
    for make in (mlp, cnn):
        path = folder / f"{make.__name__}.onnx"
        path.write_bytes(make().SerializeToString(deterministic=True))
        paths.append(path)
    return paths


def write_digits(path: Path) -> Path:
    """Write images and labels as bytes to one compressed file, and return its path."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    np.savez_compressed(
        path, images=digits.images.astype(np.uint8), labels=digits.target.astype(np.uint8)
    )
    return path


if __name__ == "__main__":
    paths = write_models()
    if find_spec("sklearn"):
        paths.append(write_digits(TARGET / "digits.npz"))
    for written in paths:
        print(f"{written}: {written.stat().st_size} bytes")
