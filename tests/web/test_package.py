"""The package for JavaScript in Node: the numbers of Python, its own tests, types and size."""

import gzip
import json
import os
import shutil
import subprocess

import numpy as np
import pytest

import kfac_engine as ke
from kfac_engine.data import demo_model
from scripts.browser_files import PACKAGE, RUNTIME, TRAIN, shuffled, write_digits
from tests.comparing import assert_arrays_close
from tests.models import Net
from tests.pages import blocks

DIST, MODULES = PACKAGE / "dist", RUNTIME.parent
# Later, a ReLU whose input changes its sign by rounding changes a loss by 1e-4.
STEPS = 6
# Files of the tests: model, and options of the export.
FILES = {
    "kfac": ("cnn", {}),
    "adamw": ("cnn", {"optimizer": "adamw"}),
    "weighted": ("cnn", {"optimizer": "adamw", "weights": "examples"}),
    "sequence": ("sequence", {"optimizer": "adamw"}),
}

pytestmark = pytest.mark.skipif(
    not DIST.exists() or shutil.which("node") is None, reason="make web builds the package"
)


def sequence():
    """A model whose examples are on the second axis."""
    net = Net()
    net.op("Transpose", "input", to="by_example", perm=[1, 0, 2])
    net.op("Flatten", "by_example", to="flat", axis=1)
    net.op("Identity", net.dense("head", "flat", 12, 3), to="output")
    return net.model({"input": [4, "batch", 3]}, {"output": ["batch", 3]})


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("package")
    for name, (model, options) in FILES.items():
        source = sequence() if model == "sequence" else demo_model(model)
        ke.export_training(source, path=path / name, **options)
    write_digits(path)
    (path / "plain.onnx").write_bytes(demo_model("cnn"))
    images, labels = shuffled()
    data = {"image": images[:TRAIN]}, labels[:TRAIN]
    files = ke.TrainingFiles(path / "kfac")
    state = files.run(data, steps=3).state
    files.save(state, path / "state.safetensors")
    expected = {"step": 3, "loss": files.evaluate(state, [data])["loss"]}
    (path / "state.json").write_text(json.dumps(expected))
    return path


def in_node(folder, *arguments, cwd=PACKAGE / "test", check=True):
    """Run Node with the folder of training files in FILES."""
    done = subprocess.run(
        ["node", *map(str, arguments)], cwd=cwd, capture_output=True, text=True, timeout=200,
        env={**os.environ, "FILES": str(folder)}, check=False,
    )  # fmt: skip
    assert not check or done.returncode == 0, done.stdout + done.stderr
    return done


@pytest.mark.parametrize("optimizer", ["kfac", "adamw"])
def test_losses_metrics_and_states_equal_those_of_python(optimizer, folder, tmp_path):
    files = ke.TrainingFiles(folder / optimizer)
    saved = tmp_path / "state.safetensors"
    results = json.loads(in_node(folder, "steps.mjs", optimizer, STEPS, saved).stdout)
    images, labels = shuffled()
    state, losses, accuracies = started(files), [], []
    for index, numbers in enumerate(results["numbers"]):
        batch = {"image": images[numbers]}
        out = files.step(state, batch, labels[numbers], rate=schedule(index / STEPS))
        state |= {n: out[f"new {n}"] for n in state if out[f"new {n}"].size}
        losses.append(float(out["loss"]))
        accuracies.append(float(out["accuracy"]))
    # Other kernels sum in another order.
    np.testing.assert_allclose(results["losses"], losses, atol=1e-5)
    np.testing.assert_allclose(results["accuracies"], accuracies, atol=1e-6)
    of_package = files.load(saved)
    for name, array in of_package.items():
        assert array.dtype == state[name].dtype
    for name in files.parameters:
        np.testing.assert_allclose(of_package[name], state[name], atol=1e-4)
    # From the state of the package, predictions and metrics are equal.
    held_out = {"image": images[TRAIN:]}, labels[TRAIN:]
    logits = files.predict(of_package, {"image": images[TRAIN : TRAIN + 5]})["logits"]
    assert results["dims"] == [5, 10]
    np.testing.assert_allclose(results["logits"], logits.ravel(), rtol=1e-4, atol=1e-4)
    assert_arrays_close(results["metrics"], files.evaluate(of_package, [held_out]), rtol=1e-4)


def schedule(done):
    return min(1.0, (1 - done) / 0.4)


def started(files):
    """The first state of examples that come again and again."""
    state, different = files.initial(), files.description.different
    return {**state, different: np.float32(TRAIN)} if different else state


def test_its_own_tests_pass(folder):
    printed = in_node(folder, "--test", "trainer.test.mjs").stdout
    assert "# fail 0" in printed
    assert "# pass 2" in printed  # more than twenty


# -- types -----------------------------------------------------------------------------------------


def compiled(tmp_path, **programs):
    """Return what the strict compiler says about programs, by name."""
    (tmp_path / "node_modules").mkdir(exist_ok=True)
    for name, target in {"kfac-engine": PACKAGE}.items():
        (tmp_path / "node_modules" / name).symlink_to(target)
    for entry in MODULES.iterdir():
        (tmp_path / "node_modules" / entry.name).symlink_to(entry)
    (tmp_path / "package.json").write_text('{"type": "module"}')
    for name, text in programs.items():
        (tmp_path / f"{name}.ts").write_text(text)
    options = ["--noEmit", "--strict", "--exactOptionalPropertyTypes", "--noUncheckedIndexedAccess"]
    options += ["--target", "es2022", "--module", "nodenext", "--skipLibCheck"]
    names = [f"{name}.ts" for name in programs]
    compiler = MODULES / "typescript" / "bin" / "tsc"
    return in_node(tmp_path, compiler, *options, *names, cwd=tmp_path, check=False).stdout


PROGRAM = """import * as node from 'onnxruntime-web';
import { Trainer, type Signature, type StepRecord } from 'kfac-engine';
import type { Digits } from './digits.js';

const trainer = await Trainer.load<Digits>('train/', { runtime: node });
const image = new Float32Array(64);
const control = new AbortController();
const options = { signal: control.signal };
for await (const { step, loss, accuracy } of trainer.fit([{ image, targets: [3] }], options)) {
  const sum: number = step + loss + accuracy;
  console.log(sum);
}
const { logits } = await trainer.predict({ image });
const numbers: Float32Array = logits.data;
type Both = { loss: number; accuracy: number };
const metrics: Both = await trainer.evaluate([{ image, targets: Uint8Array.of(1) }]);
const saved: Uint8Array = await trainer.save();
await trainer.save('name');
const again: Trainer<Digits> = await Trainer.resume<Digits>('train/', saved);
const any = await Trainer.load('train/');
await any.predict({ something: { data: [1, 2], dims: [1, 2] } });
console.log(numbers, metrics, again);
"""
# Lines that must not compile, and what the compiler says.
WRONG = {
    "name": ("await trainer.predict({ imgae: image });", "imgae"),
    "fractions": ("trainer.fit([{ image, targets: new Float32Array(1) }]);", "Float32Array"),
    "missing": ("trainer.fit([{ image }]);", "targets"),
    "output": ("(await trainer.predict({ image })).scores;", "scores"),
    "metric": ("(await trainer.evaluate([])).top5;", "top5"),
    "option": ("trainer.fit([], { rates: 1 });", "rates"),
}  # fmt: skip
HEAD = """import { Trainer } from 'kfac-engine';
import type { Digits } from './digits.js';
const trainer = await Trainer.load<Digits>('train/');
const image = new Float32Array(64);
"""


def types_of(folder, name):
    return in_node(folder, DIST / "cli.js", folder / "kfac", name).stdout


def test_a_strict_program_compiles_with_the_types_of_a_file(folder, tmp_path):
    wrong = {f"wrong_{name}": f"{HEAD}{line}\n" for name, (line, _) in WRONG.items()}
    programs = {"digits": types_of(folder, "Digits"), "program": PROGRAM, **wrong}
    found = compiled(tmp_path, **programs).splitlines()
    errors = [line for line in found if ".ts(" in line]
    for name, (_, says) in WRONG.items():
        assert any(
            line.startswith(f"wrong_{name}.ts") and says in line for line in [*errors, *found]
        ), f"{name} compiles: {found}"
    assert [line for line in errors if not line.startswith("wrong_")] == []


def test_the_types_name_each_array_of_a_file(folder):
    text = types_of(folder, "Digits")
    assert "export interface Digits extends Signature {" in text
    assert '/** float32, batch × 1 × 8 × 8 */\n    "image": Floats;' in text
    assert '/** int64, batch */\n    "targets": Integers;' in text
    assert '"logits": Float32Array;' in text
    weighted = in_node(folder, DIST / "cli.js", folder / "weighted").stdout
    assert '"weights"?: Floats;' in weighted
    assert in_node(folder, DIST / "cli.js", folder, check=False).returncode == 2
    assert in_node(folder, DIST / "cli.js", folder / "kfac", "a b", check=False).returncode == 2


def test_the_programs_of_the_texts_are_strict(folder, tmp_path):
    """The README of the package and the pages compile; their functions are those of the package."""
    root = PACKAGE.parent
    texts = [
        PACKAGE / "README.md",
        root / "docs" / "javascript.md",
        root / "docs" / "training_files.md",
    ]
    programs = {"digits": types_of(folder, "Digits")}
    for text in texts:
        for i, (_, code) in enumerate(blocks(text, "ts")):
            programs[f"{text.stem.lower()}_{text.parent.name}_{i}"] = code
    assert len(programs) > 4
    assert compiled(tmp_path, **programs) == ""


# -- size ------------------------------------------------------------------------------------------


def test_the_bundle_is_small():
    for name in ("kfac-engine.min.js", "kfac-engine-worker.min.js"):
        assert len(gzip.compress((DIST / name).read_bytes(), 9)) < 12_000


def test_the_version_is_that_of_the_library():
    about = json.loads((PACKAGE / "package.json").read_text())
    assert about["version"] == ke.__version__
    assert "dependencies" not in about
