"""The page "Train in your browser" in Chromium: it trains, as Python does, and without a network.

``make test-web`` installs the runtime and the driver from npm, builds the site and runs this test.
"""

import os
from pathlib import Path

import numpy as np
import pytest

import kfac_engine as ke
from scripts.browser_files import PACKAGE, TRAIN, shuffled
from tests.web.browser import CHROMIUM, SITE, driven, served

COMPARED = 40  # steps

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(not SITE, reason="make test-web names the built site"),
]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    assert PACKAGE.exists(), "run npm ci in tests/web"
    folder = os.environ.get("PICTURES") or tmp_path_factory.mktemp("pictures")
    with served(SITE) as address:
        return driven("drive.mjs", f"{address}train_in_browser/", CHROMIUM, folder)


@pytest.fixture(params=[0, 1], ids=["kfac", "adamw"])
def run(request, results):
    return results["runs"][request.param]


def schedule(done):
    """The schedule of the page."""
    return min(1.0, (1 - done) / 0.4)


def started(files):
    """The first state in the page, whose examples come again and again."""
    state, different = files.initial(), "different examples"
    return {**state, different: np.float32(TRAIN)} if different in state else state


def test_nothing_fails_and_no_other_server_is_asked(results):
    assert results["faults"] == []
    assert results["elsewhere"] == []
    assert results["later"] == []  # the network was off
    assert not results["overflow"]


def test_losses_equal_those_of_python(run):
    files = ke.TrainingFiles(Path(SITE) / "browser" / run["name"])
    images, labels = shuffled()
    state, steps, losses = started(files), len(run["losses"]), []
    for index, numbers in enumerate(run["numbers"][:COMPARED]):
        batch = {"image": images[numbers]}
        out = files.step(state, batch, labels[numbers], rate=schedule(index / steps))
        state |= {n: out[f"new {n}"] for n in state if out[f"new {n}"].size}
        losses.append(float(out["loss"]))
    # Later steps multiply rounding: the network fits its data.
    np.testing.assert_allclose(run["losses"][:COMPARED], losses, atol=1e-3)


def test_the_network_is_accurate_and_its_weights_come_home(run):
    images, labels = shuffled()
    files = ke.TrainingFiles(Path(SITE) / "browser" / run["name"])
    shapes = files.description.state
    weights = {n: np.array(a, np.float32).reshape(shapes[n]) for n, a in run["weights"].items()}
    assert set(weights) == set(files.parameters)
    logits = files.predict(weights, {"image": images[TRAIN:]})["logits"]
    accuracy = np.mean(logits.argmax(axis=1) == labels[TRAIN:])
    last = run["points"][-1]
    np.testing.assert_allclose(accuracy, last["accuracy"], atol=1e-9)
    assert accuracy > 0.98


def test_kfac_is_ahead_of_adamw_at_equal_steps(results):
    losses = [run["points"] for run in results["runs"]]
    kfac, adamw = (points[10]["loss"] for points in losses)  # each measures every sixth step
    assert kfac < adamw


def test_a_stroke_is_a_one(results):
    assert results["prediction"] == 1


def test_the_files_are_small():
    folder = Path(SITE) / "browser"
    ours = [p for p in folder.rglob("*") if p.is_file() and "ort" not in p.parts]
    assert sum(path.stat().st_size for path in ours) < 1_000_000
