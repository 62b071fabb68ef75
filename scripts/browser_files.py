"""Writes the files of the page "Train in your browser": training steps, digits and the runtime.

The hooks of the site call ``write``. The runtime and the package for JavaScript come from ``web``,
where ``make web`` installs and builds them; without it, the page says that it cannot train.
"""

import shutil
import sys
from pathlib import Path

import numpy as np
import onnx
from onnx import helper, numpy_helper

import kfac_engine as ke
from kfac_engine.data import demo_model, digits

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "web"
RUNTIME = PACKAGE / "node_modules" / "onnxruntime-web"
# Files of the runtime and of the package that the page loads.
FROM_RUNTIME = ("ort.wasm.min.mjs", "ort-wasm-simd-threaded.mjs", "ort-wasm-simd-threaded.wasm")
FROM_PACKAGE = ("kfac-engine.min.js", "kfac-engine-worker.min.js")
TRAIN, SEED = 1400, 0
OPTIMIZERS = {"kfac": {}, "adamw": {"learning_rate": 0.003}}
# Sides and channels of the pictures that a visitor draws or photographs, and their classes.
SIDE, CHANNELS, CLASSES = 32, 3, 3


def shuffled() -> tuple[np.ndarray, np.ndarray]:
    """Return the digits in another order: the last ones in the file are of other writers."""
    images, labels = digits()
    order = np.random.default_rng(SEED).permutation(len(labels))
    return images[order], labels[order]


def pictures_model() -> onnx.ModelProto:
    """Return an untrained network for pictures: three convolutions, a pool and a dense layer."""
    rng, nodes, weights, x = np.random.default_rng(SEED), [], [], "image"

    def weight(name: str, *shape: int) -> str:
        spread = np.sqrt(2 / np.prod(shape[1:])) if len(shape) > 1 else 0
        values = (spread * rng.standard_normal(shape)).astype(np.float32)
        weights.append(numpy_helper.from_array(values, name))
        return name

    for number, (inputs, outputs) in enumerate([(CHANNELS, 8), (8, 16), (16, 32)], 1):
        name = f"conv{number}"
        operands = [
            x,
            weight(f"{name}.weight", outputs, inputs, 3, 3),
            weight(f"{name}.bias", outputs),
        ]
        options = {"kernel_shape": [3, 3], "strides": [2, 2], "pads": [1, 1, 1, 1]}
        nodes += [
            helper.make_node("Conv", operands, [name], **options),
            helper.make_node("Relu", [name], [f"relu{number}"]),
        ]
        x = f"relu{number}"
    nodes += [
        helper.make_node("AveragePool", [x], ["pool"], kernel_shape=[2, 2], strides=[2, 2]),
        helper.make_node("Flatten", ["pool"], ["flat"], axis=1),
        helper.make_node(
            "Gemm",
            ["flat", weight("head.weight", CLASSES, 128), weight("head.bias", CLASSES)],
            ["logits"],
            transB=1,
        ),
    ]
    ends = [
        helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, shape)
        for name, shape in (
            ("image", ["batch", CHANNELS, SIDE, SIDE]),
            ("logits", ["batch", CLASSES]),
        )
    ]
    graph = helper.make_graph(nodes, "pictures", ends[:1], ends[1:], weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)


def write(folder: Path) -> None:
    """Write the files into a folder that has the script of the page."""
    for name, model in (("digits", demo_model("cnn")), ("pictures", pictures_model())):
        for optimizer, options in OPTIMIZERS.items():
            path = folder / name / optimizer
            ke.export_training(model, optimizer=optimizer, path=path, **options)
    write_digits(folder)
    if not (PACKAGE / "dist").exists():
        return
    for name in FROM_PACKAGE:
        shutil.copyfile(PACKAGE / "dist" / name, folder / name)
    runtime = folder / "ort"
    runtime.mkdir(exist_ok=True)
    for name in FROM_RUNTIME:
        shutil.copyfile(RUNTIME / "dist" / name, runtime / name)
    shutil.copyfile(PACKAGE / "LICENSE.onnxruntime.txt", runtime / "LICENSE.txt")


def write_digits(folder: Path) -> None:
    """Write the digits: their numbers, pixels from 0 to 16, and labels."""
    images, labels = shuffled()
    sizes = np.array([len(labels), TRAIN], "<u4").tobytes()
    pixels = np.rint(images * 16).astype(np.uint8).tobytes()
    (folder / "digits.bin").write_bytes(sizes + pixels + labels.astype(np.uint8).tobytes())


if __name__ == "__main__":
    write(Path(sys.argv[1]))
