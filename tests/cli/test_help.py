"""The help of a command has groups of options, the names that they accept, and an example."""

import re
import shlex
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

import kfac_engine as ke
from kfac_engine.__main__ import main
from kfac_engine.analysis.fisher_matrix.options import FISHERS, STRUCTURES
from kfac_engine.analysis.pruning.pruning import METHODS
from kfac_engine.bench import run as bench
from kfac_engine.bench.roofline import Roofline
from kfac_engine.cli.app import app
from kfac_engine.curvature.approximations import KINDS
from kfac_engine.curvature.estimation_modes import MODES
from kfac_engine.data import demo_model, digits
from kfac_engine.engine.metrics import METRICS
from kfac_engine.losses import LOSSES
from kfac_engine.training.fit import OPTIMIZERS
from tests.nightly import nightly_but

COMMANDS = sorted(app.commands)


def page_of(name, capsys):
    """Return the help page of a command; of the program for an empty name."""
    assert main([*name.split(), "--help"]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("columns", ["80", "200"])
@pytest.mark.parametrize("name", ["", *COMMANDS])
def test_help_fits_80_columns(name, columns, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", columns)
    assert [line for line in page_of(name, capsys).splitlines() if len(line) > 80] == []


# Command, option and the names that it accepts.
NAMES = {
    "losses": ("train", "--loss", LOSSES),
    "losses of a gradient": ("differentiate", "--loss", LOSSES),
    "modes": ("inspect", "--mode", MODES),
    "kinds of layers": ("inspect", "--approx", KINDS),
    "metrics": ("train", "--metrics", METRICS),
    "optimizers": ("train", "--optimizer", OPTIMIZERS),
    "structures": ("curvature", "--structure", STRUCTURES),
    "Fisher matrices": ("curvature", "--fisher", FISHERS),
    "saliencies": ("saliency", "--method", METHODS),
    "saliencies of pruning": ("prune", "--method", METHODS),
}


@pytest.mark.parametrize(("name", "flag", "names"), NAMES.values(), ids=NAMES)
def test_help_of_option_lists_its_names(name, flag, names, capsys):
    entry = re.search(rf"^  {flag} .*\n(?:   +.*\n)*", page_of(name, capsys), re.M)[0]
    assert set(names) <= set(re.findall(r"\w+", entry))


# -- examples

# Training by several methods, and new processes.
SLOW = {"demo", "bench"}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The folder of the examples: bundled model and digits, two curvatures, the log of a run."""
    monkeypatch.chdir(tmp_path)
    images, labels = digits()
    np.savez("digits.npz", image=images, targets=labels)
    np.save("images.npy", images[:32])
    np.save("labels.npy", labels[:32])
    np.save("queries.npy", images[32:36])
    np.save("answers.npy", labels[32:36])
    for name, count in (("mlp", 32), ("other", 16)):
        (tmp_path / f"{name}.onnx").write_bytes(demo_model("mlp"))
        batch = {"image": images[:count]}, labels[:count]
        curvature = ke.curvature(f"{name}.onnx", batch, loss="categorical")
        curvature.save(f"{name}.curvature.safetensors")
    adapted = ke.add_adapters(demo_model("mlp"))
    (tmp_path / "adapted.onnx").write_bytes(adapted.SerializeToString())
    (tmp_path / "run.jsonl").write_text('{"step": 1, "epoch": 0, "seconds": 0.1, "loss": 2.0}\n')
    return tmp_path


@pytest.fixture
def one_small_job(monkeypatch):
    """Leaves one job of the suite in the example of ``bench``."""
    jobs = [job for job in bench.SUITES["inverse"] if job.name == "64 × 64"]
    monkeypatch.setattr(bench, "SUITES", {"inverse": jobs})
    monkeypatch.setattr(bench, "ceilings", lambda threads: [Roofline(threads, 1e9, 1e9)])
    monkeypatch.setattr(bench, "ceiling", lambda threads: Roofline(threads, 1e9, 1e9))


@pytest.mark.parametrize("name", nightly_but([n for n in COMMANDS if n not in SLOW], COMMANDS))
@pytest.mark.usefixtures("folder", "one_small_job")
def test_example_at_the_end_of_the_help_runs(name, capsys):
    page = page_of(name, capsys)
    example = page[page.index("\nExample:\n") :].split("\n", 2)[2]
    words = shlex.split(example.replace("\\\n", " "))
    assert words[:2] == ["kfac-engine", name]
    assert main(words[1:]) == 0
    written = [file for flag, file in pairwise(words) if flag in {"-o", "--log", "--json"}]
    assert all(Path(file).stat().st_size for file in written)
