"""Measure the accuracy of merged networks on the digits, with three seeds, into a results file.

Run: ``python -m scripts.measure_merging``. Two copies of a trained network are trained on parts of
the data. A line of the file has the accuracies of the copies, of the plain mean of their parameters
and of ``ke.merge`` for held-out digits. ``python -m scripts.draw_pruning`` prints the table.
"""

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np

import kfac_engine as ke
from kfac_engine._types import Array
from kfac_engine.data import demo_model, digits
from kfac_engine.system.writing import write_file
from scripts.measure_pruning import ROOT, SEEDS, STEPS

RESULTS = ROOT / "bench/results/2026-11-23-merging.jsonl"
_TRAINING, _FURTHER_STEPS = 1400, 20


def divisions(labels: Array) -> dict[str, tuple[Array, Array]]:
    """Return the numbers of the examples of each copy, for each division of the data."""
    order = np.arange(len(labels))
    return {
        "halves of the data": (order[: len(order) // 2], order[len(order) // 2 :]),
        "digits 0–4 and 5–9": (order[labels < 5], order[labels >= 5]),
    }


def measure(seed: int, folder: Path) -> list[dict[str, object]]:
    """Return the accuracies of the networks of a seed, one row for each division."""
    images, labels = digits()
    train = images[:_TRAINING], labels[:_TRAINING]
    engine = ke.fit(demo_model("cnn"), train, steps=STEPS, seed=seed).engine
    engine.export(folder / "trained.onnx")

    def accuracy(parameters: Mapping[str, Array]) -> float:
        engine.set_parameters(parameters)
        held_out = {"image": images[_TRAINING:]}, labels[_TRAINING:]
        return engine.evaluate(held_out, ["accuracy"])["accuracy"]

    rows: list[dict[str, object]] = []
    for parts, divided in divisions(train[1]).items():
        models, curvatures = [], []
        for chosen in divided:
            copy = ke.Engine.from_onnx(folder / "trained.onnx", loss="categorical")
            data = images[chosen], labels[chosen]
            ke.fit(copy, data, steps=_FURTHER_STEPS, seed=seed)
            copy.export(folder / "copy.onnx")
            models.append(dict(copy.parameters))
            batch = {"image": data[0]}, None
            curvatures.append(ke.curvature(folder / "copy.onnx", batch, loss="categorical"))
        first, second = models
        mean = {name: (array + second[name]) / 2 for name, array in first.items()}
        entry = {"first": first, "second": second, "mean": mean}
        entry["fisher"] = ke.merge(models, curvatures)
        accuracies = {name: accuracy(parameters) for name, parameters in entry.items()}
        rows.append({"parts": parts, "seed": seed, **accuracies})
    return rows


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        lines = [json.dumps(row) + "\n" for seed in SEEDS for row in measure(seed, Path(place))]
    write_file(RESULTS, [line.encode() for line in lines])
