"""Writes the files of the page "Train in your browser": two training steps, digits and the runtime.

The hooks of the site call ``write``. The runtime is the package onnxruntime-web in ``tests/web``,
which ``make web`` installs from npm; without it, the page says that it cannot train.
"""

import shutil
import sys
from pathlib import Path

import numpy as np

import kfac_engine as ke
from kfac_engine.data import demo_model, digits

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "tests" / "web" / "node_modules" / "onnxruntime-web"
RUNTIME = ("ort.wasm.min.mjs", "ort-wasm-simd-threaded.mjs", "ort-wasm-simd-threaded.wasm")
TRAIN, SEED = 1400, 0
OPTIMIZERS = {"kfac": {}, "adamw": {"learning_rate": 0.003}}


def shuffled() -> tuple[np.ndarray, np.ndarray]:
    """Return the digits in another order: the last ones in the file are of other writers."""
    images, labels = digits()
    order = np.random.default_rng(SEED).permutation(len(labels))
    return images[order], labels[order]


def write(folder: Path) -> None:
    """Write the files into a folder that has the scripts of the page."""
    for optimizer, options in OPTIMIZERS.items():
        target = folder / optimizer
        ke.export_training(demo_model("cnn"), optimizer=optimizer, path=target, **options)
    write_digits(folder)
    if not PACKAGE.exists():
        return
    runtime = folder / "ort"
    runtime.mkdir(exist_ok=True)
    for name in RUNTIME:
        shutil.copyfile(PACKAGE / "dist" / name, runtime / name)
    shutil.copyfile(ROOT / "tests" / "web" / "LICENSE.onnxruntime.txt", runtime / "LICENSE.txt")


def write_digits(folder: Path) -> None:
    """Write the digits: their numbers, pixels from 0 to 16, and labels."""
    images, labels = shuffled()
    sizes = np.array([len(labels), TRAIN], "<u4").tobytes()
    pixels = np.rint(images * 16).astype(np.uint8).tobytes()
    (folder / "digits.bin").write_bytes(sizes + pixels + labels.astype(np.uint8).tobytes())


if __name__ == "__main__":
    write(Path(sys.argv[1]))
