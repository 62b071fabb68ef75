"""A device that takes steps on its own data, with training files and ONNX Runtime alone."""

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnxruntime

Arrays = dict[str, np.ndarray]
# A step of the far past: the next step computes new inverses, of the factors that have come.
LONG_AGO = np.array(-(10**6), np.int64)


def session(path: Path) -> onnxruntime.InferenceSession:
    """Return a session on one thread."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    return onnxruntime.InferenceSession(path, options)


def outputs(model: onnxruntime.InferenceSession, feeds: Mapping[str, np.ndarray]) -> Arrays:
    """Return the outputs of a file by name; ``feeds`` may have more than its inputs."""
    read = {entry.name: feeds[entry.name] for entry in model.get_inputs()}
    return dict(zip([o.name for o in model.get_outputs()], model.run(None, read), strict=True))


class Device:
    """Training files with a state.

    Args:
        folder: Folder of ``kfac_engine.export_training``.
        factors: Whether Kronecker factors are shared as well as weights.
    """

    def __init__(self, folder: Path, factors: bool = False) -> None:
        self.training = session(folder / "training.onnx")
        self.state = outputs(session(folder / "initial.onnx"), {})
        metadata = self.training.get_modelmeta().custom_metadata_map["kfac_engine.training"]
        averages = [name for name in self.state if name.startswith("average/")] if factors else []
        self.shared = [*json.loads(metadata)["parameters"], *averages]

    def train(
        self, given: Mapping[str, np.ndarray], batches: list[Arrays], rate: float = 1.0
    ) -> Arrays:
        """Take a step on each batch, from the arrays of the server; return the new arrays."""
        self.state |= given
        if len(given) > 0 and any(name.startswith("average/") for name in given):
            self.state["last refresh"] = LONG_AGO
        for batch in batches:
            feeds = {**self.state, **batch, "rate": np.array(rate, np.float32)}
            results = outputs(self.training, feeds)
            new = {name: results[f"new {name}"] for name in self.state}
            self.state |= {name: array for name, array in new.items() if array.size}
        return {name: self.state[name] for name in self.shared}


def evaluate(folder: Path, weights: Arrays, batch: Arrays) -> dict[str, float]:
    """Return the metrics of weights on data."""
    results = outputs(session(folder / "predict.onnx"), {**weights, **batch})
    sums = outputs(session(folder / "evaluate.onnx"), {**batch, **results})
    metrics = [name.removesuffix(" sum") for name in sums if name.endswith(" sum")]
    return {name: float(sums[f"{name} sum"][0] / sums[f"{name} count"][0]) for name in metrics}


def split(labels: np.ndarray, parts: int, skewed: bool) -> list[np.ndarray]:
    """Return the numbers of the examples of each device; skewed ones have few classes each."""
    order = np.random.default_rng(0).permutation(len(labels))
    if skewed:
        order = order[np.argsort(labels[order], kind="stable")]
    return np.array_split(order, parts)


def batches_of(data: Arrays, steps: int, size: int, seed: int) -> list[Arrays]:
    """Return random batches of examples."""
    rng, count = np.random.default_rng(seed), len(next(iter(data.values())))
    chosen = [rng.choice(count, size, replace=False) for _ in range(steps)]
    return [{name: array[numbers] for name, array in data.items()} for numbers in chosen]
