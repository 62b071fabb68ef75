"""The page "Train in your browser" in Chromium: it trains, as Python does, and without a network.

``make test-web`` installs the runtime and the driver from npm, builds the site and runs this test.
"""

import base64
import gzip
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load as load_tensors

import kfac_engine as ke
from kfac_engine.data import demo_model
from scripts.browser_files import CHANNELS, PACKAGE, RUNTIME, SIDE, TRAIN, shuffled
from tests.pages import blocks
from tests.web.browser import CHROMIUM, SITE, driven, served
from tests.web.test_package import schedule, started

COMPARED = 40  # steps

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(not SITE, reason="make test-web names the built site"),
]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    assert (PACKAGE / "dist").exists(), "run make web"
    folder = os.environ.get("PICTURES") or tmp_path_factory.mktemp("pictures")
    with served(SITE) as address:
        return driven("drive.mjs", f"{address}train_in_browser/", CHROMIUM, folder)


@pytest.fixture(params=[0, 1], ids=["kfac", "adamw"])
def run(request, results):
    return results["runs"][request.param]


def test_nothing_fails_and_no_other_server_is_asked(results):
    assert results["faults"] == []
    assert results["elsewhere"] == []
    assert results["later"] == []  # the network was off
    assert not results["overflow"]


def test_losses_equal_those_of_python(run, results):
    files = ke.TrainingFiles(Path(SITE) / "browser" / "digits" / run["name"])
    images, labels = shuffled()
    state, steps, losses = started(files), len(run["losses"]), []
    for index, numbers in enumerate(results["numbers"][:COMPARED]):
        batch = {"image": images[numbers]}
        out = files.step(state, batch, labels[numbers], rate=schedule(index / steps))
        state |= {n: out[f"new {n}"] for n in state if out[f"new {n}"].size}
        losses.append(float(out["loss"]))
    # Later steps multiply rounding: the network fits its data.
    np.testing.assert_allclose(run["losses"][:COMPARED], losses, atol=1e-3)


def test_the_network_is_accurate_and_its_weights_come_home(run):
    images, labels = shuffled()
    files = ke.TrainingFiles(Path(SITE) / "browser" / "digits" / run["name"])
    state = load_tensors(base64.b64decode(run["state"]))
    held_out = {"image": images[TRAIN:]}, labels[TRAIN:]
    metrics = files.evaluate(state, [held_out])
    last = run["points"][-1]
    np.testing.assert_allclose(metrics["accuracy"], last["accuracy"], atol=1e-6)
    np.testing.assert_allclose(metrics["loss"], last["loss"], rtol=1e-3)
    assert metrics["accuracy"] > 0.98


def test_both_runs_learn_the_classes_of_a_visitor(results):
    for run in results["pictures"]:
        assert run["losses"][0] > 0.5
        assert run["last"]["loss"] < 0.1
    assert results["answers"] == [{"kfac": 0, "adamw": 0}, {"kfac": 1, "adamw": 1}]


def test_photographs_become_examples(results):
    for photograph in results["photographs"]:
        assert (photograph["label"], photograph["size"]) == (2, CHANNELS * SIDE * SIDE)
        assert 0 <= photograph["least"] < photograph["most"] <= 1
        assert photograph["different"] > 3  # a picture, and no empty square


def test_a_worker_and_the_database_of_a_site_serve_the_package(results):
    package = results["package"]
    losses = package["losses"]
    assert losses[:5] == losses[5:]
    assert package["resumed"]
    assert package["steps"] == 5
    assert package["missing"].startswith("TrainingError: no state is saved as 'a state'")
    assert package["broken"].startswith("TrainingError: the files need 'image'")


def test_kfac_is_ahead_of_adamw_at_equal_steps(results):
    losses = [run["points"] for run in results["runs"]]
    kfac, adamw = (points[10]["loss"] for points in losses)  # each measures every sixth step
    assert kfac < adamw


def test_a_stroke_is_a_one(results):
    assert results["prediction"] == 1


def test_the_files_are_small():
    folder = Path(SITE) / "browser"
    ours = [p for p in folder.rglob("*") if p.is_file() and "ort" not in p.parts]
    assert sum(path.stat().st_size for path in ours) < 1_500_000
    packed = (len(gzip.compress(path.read_bytes())) for path in ours)
    assert sum(packed) < 450_000  # what a server sends: about as much as a picture


def test_the_page_of_the_readme_trains(tmp_path):
    ((_, code),) = blocks(PACKAGE / "README.md", "html")
    (tmp_path / "index.html").write_text(f"<!doctype html><link rel=icon href=data:,>{code}")
    files = ke.export_training(demo_model("cnn"), path=tmp_path / "train")
    shutil.copy(PACKAGE / "dist" / "kfac-engine.min.js", tmp_path)
    (tmp_path / "ort").symlink_to(RUNTIME / "dist")
    with served(tmp_path) as address:
        results = driven("readme.mjs", address, CHROMIUM)
    assert results["faults"] == []
    batch = {"image": np.zeros((1, 1, 8, 8), np.float32)}
    loss = files.step(files.initial(), batch, np.array([3]))["loss"]
    np.testing.assert_allclose(float(results["title"]), loss, rtol=1e-5)
