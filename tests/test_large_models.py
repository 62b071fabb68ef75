"""A model of more than 2 GB, whose weights stay where they are: in a file that is mapped."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto

from tests.models import parsed

ROOT = Path(__file__).parents[1]

# A table that is larger than any message can be: 2.2 GB, as a sparse file of a few kilobytes.
ROWS, WIDTH, CLASSES = 8_600_000, 64, 3
SIZE = ROWS * WIDTH * 4
FILLED = 5  # the last rows, which the batch reads

# Python with the libraries takes 150 MB.
MOST_BYTES = 400_000_000

MEASURED = """
import json, sys
import numpy as np
import kfac_engine as ke
from kfac_engine.engine.profiling import peak_bytes
path, batch = sys.argv[1:]
engine = ke.Engine.from_onnx(path, loss="categorical", trainable=["fc_*"])
ids = np.load(batch)
result = engine.step({"input": ids}, np.arange(len(ids)) % 3)
engine.memory(len(ids))
print(json.dumps({
    "gradient": result.gradients["fc_weight"].tolist(),
    "layers": [layer.kind for layer in engine.layers],
    "peak": peak_bytes(),
}))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """``model.onnx``, its weights, a batch and the classifier's weights."""
    where = tmp_path_factory.mktemp("large")
    if shutil.disk_usage(where).free < 1 << 30:
        pytest.skip("the disk has less than 1 GB left")
    rng = np.random.default_rng(0)
    weight = rng.standard_normal((WIDTH, CLASSES)).astype(np.float32)
    rows = rng.standard_normal((FILLED, WIDTH)).astype(np.float32)
    with (where / "weights.bin").open("wb") as file:
        file.truncate(SIZE)
        file.seek(SIZE - rows.nbytes)
        file.write(rows.tobytes())
    onnx.save(_model(weight), where / "model.onnx")
    np.save(where / "ids.npy", ROWS - FILLED + np.arange(FILLED, dtype=np.int64)[:, None])
    np.savez(where / "truth.npz", weight=weight, rows=rows)
    return where


def _model(weight):
    table = TensorProto(
        name="table",
        data_type=TensorProto.FLOAT,
        dims=(ROWS, WIDTH),
        data_location=TensorProto.EXTERNAL,
    )
    table.external_data.add(key="location", value="weights.bin")
    text = f"""large (int64[batch,1] input) => (float[batch,{CLASSES}] output) {{
        rows = Gather (table, input)  flat = Flatten (rows)  output = MatMul (flat, fc_weight) }}"""
    model = parsed(text, {"fc_weight": weight})
    model.graph.initializer.append(table)
    return model


def _gradient(folder):
    """Of the mean cross-entropy with targets 0, 1, 2, 0, 1: closed form, in float64."""
    truth = {
        name: array.astype(np.float64) for name, array in np.load(folder / "truth.npz").items()
    }
    z = truth["rows"] @ truth["weight"]
    p = np.exp(z - z.max(axis=1, keepdims=True))
    p /= p.sum(axis=1, keepdims=True)
    p[np.arange(FILLED), np.arange(FILLED) % CLASSES] -= 1
    return truth["rows"].T @ p / FILLED


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's /proc")
def test_weights_of_large_model_are_not_copied(folder):
    done = subprocess.run(
        [sys.executable, "-c", MEASURED, folder / "model.onnx", folder / "ids.npy"],
        cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True,
    )  # fmt: skip
    found = json.loads(done.stdout)
    np.testing.assert_allclose(found["gradient"], _gradient(folder), rtol=1e-4, atol=1e-6)
    assert found["layers"] == ["fully_connected"]
    assert found["peak"] < MOST_BYTES


def test_command_line_preconditions_large_model(folder):
    from safetensors.numpy import load_file

    np.save(folder / "targets.npy", np.arange(FILLED) % CLASSES)
    subprocess.run(
        [sys.executable, "-m", "kfac_engine", "precondition", "model.onnx", "--inputs", "ids.npy",
         "--targets", "targets.npy", "--trainable", "fc_*", "-o", "out.safetensors"],
        cwd=folder, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=True,
    )  # fmt: skip
    found = load_file(folder / "out.safetensors")
    np.testing.assert_allclose(found["gradient/fc_weight"], _gradient(folder), rtol=1e-4, atol=1e-6)
    assert np.isfinite(found["natural_gradient/fc_weight"]).all()
