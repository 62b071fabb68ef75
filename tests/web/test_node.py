"""The loop of the page in Node: the same losses as in Python."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

import kfac_engine as ke
from scripts.browser_files import OPTIMIZERS, PACKAGE, ROOT, TRAIN, shuffled, write
from tests.web.test_page import schedule, started

HERE = Path(__file__).resolve().parent
STEPS = 20

pytestmark = pytest.mark.skipif(
    not PACKAGE.exists() or shutil.which("node") is None,
    reason="make web installs onnxruntime-web for Node",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("browser")
    write(path)
    return path


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_losses_equal_those_of_python(optimizer, folder):
    files = ke.TrainingFiles(folder / optimizer)
    command = ["node", "steps.mjs", files.folder, folder / "digits.bin", STEPS]
    done = subprocess.run(
        list(map(str, command)), cwd=HERE, capture_output=True, text=True, timeout=120, check=True
    )
    results = json.loads(done.stdout)
    images, labels = shuffled()
    state, losses = started(files), []
    for index, numbers in enumerate(results["numbers"]):
        batch = {"image": images[numbers]}
        out = files.step(state, batch, labels[numbers], rate=schedule(index / STEPS))
        state |= {n: out[f"new {n}"] for n in state if out[f"new {n}"].size}
        losses.append(float(out["loss"]))
    np.testing.assert_allclose(results["losses"], losses, atol=1e-3)
    logits = files.predict(state, {"image": images[TRAIN:]})["logits"]
    accuracy = np.mean(logits.argmax(axis=1) == labels[TRAIN:])
    np.testing.assert_allclose(results["heldOut"]["accuracy"], accuracy, atol=0.01)
    for name, weights in results["weights"].items():
        np.testing.assert_allclose(np.reshape(weights, state[name].shape), state[name], atol=1e-2)


PRELUDE = """import * as ort from 'onnxruntime-web';
declare const batches: { image: ort.Tensor; targets: ort.Tensor }[];
declare const rate: ort.Tensor;
"""


def test_the_loops_of_the_texts_are_strict_typescript(folder, tmp_path):
    (tmp_path / "node_modules").symlink_to(HERE / "node_modules")
    (tmp_path / "package.json").write_text('{"type": "module"}')
    texts = ROOT / "docs" / "training_files.md", folder / "kfac" / "README.md"
    for text in texts:
        loop = re.search(r"```js\n(.*?)```", text.read_text(), re.DOTALL).group(1)
        (tmp_path / f"{text.stem}.ts").write_text(f"{PRELUDE}{loop}")
    command = ["node", HERE / "node_modules" / "typescript" / "bin" / "tsc", "--noEmit", "--strict"]
    options = ["--target", "es2022", "--module", "nodenext", "--skipLibCheck"]
    names = [f"{text.stem}.ts" for text in texts]
    done = subprocess.run(
        list(map(str, [*command, *options, *names])), cwd=tmp_path, capture_output=True, text=True,
        timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
