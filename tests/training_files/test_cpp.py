"""The loop in C++ has the losses of Python.

ONNXRUNTIME_INCLUDE names a folder with ``onnxruntime_cxx_api.h``, which the package of ONNX Runtime
for Python does not have; its library is that of the package.
"""

import os
import shutil
import subprocess
from pathlib import Path

import numpy as np
import onnxruntime
import pytest

import kfac_engine as ke
from kfac_engine.data import demo_model
from scripts.browser_files import TRAIN, shuffled, write_digits

HEADERS = os.environ.get("ONNXRUNTIME_INCLUDE", "")
LIBRARIES = sorted((Path(onnxruntime.__file__).parent / "capi").glob("libonnxruntime.so.*"))
SOURCE = Path(__file__).resolve().parent.parent.parent / "examples" / "cpp" / "train.cpp"
STEPS, BATCH = 12, 64

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(
        not (HEADERS and LIBRARIES and shutil.which("g++")),
        reason="needs g++ and the headers of ONNX Runtime in ONNXRUNTIME_INCLUDE",
    ),
]


@pytest.mark.parametrize("optimizer", ["kfac", "adamw"])
def test_losses_equal_those_of_python(optimizer, tmp_path):
    for name in ("libonnxruntime.so", "libonnxruntime.so.1"):
        (tmp_path / name).symlink_to(LIBRARIES[-1])
    program = tmp_path / "train"
    options = ["-I", HEADERS, "-L", tmp_path, "-l", "onnxruntime", "-o", program]
    subprocess.run(["g++", "-std=c++17", SOURCE, *options], check=True)
    files = ke.export_training(demo_model("cnn"), optimizer=optimizer, path=tmp_path / "files")
    write_digits(tmp_path)
    printed = subprocess.run(
        [program, files.folder, tmp_path / "digits.bin", str(STEPS)],
        env={**os.environ, "LD_LIBRARY_PATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    images, labels = shuffled()
    state, losses = files.initial(), []
    for step in range(STEPS):
        numbers = (step * BATCH + np.arange(BATCH)) % TRAIN
        results = files.step(state, {"image": images[numbers]}, labels[numbers])
        state |= {n: results[f"new {n}"] for n in state if results[f"new {n}"].size}
        losses.append(float(results["loss"]))
    np.testing.assert_allclose([float(line) for line in printed.stdout.split()], losses, atol=1e-3)
