"""Measure the accuracy of pruned networks on two data sets, with three seeds, into a results file.

Run: ``python -m scripts.measure_pruning [--data-folder FOLDER]``, with the folder of Fashion-MNIST.
A line of the file is a pruned network. ``python -m scripts.draw_pruning`` draws the lines.
"""

import argparse
import json
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import kfac_engine as ke
from kfac_engine._types import Array
from kfac_engine.bench.training.data import DATA_FOLDER, load_images
from kfac_engine.bench.training.models import cnn
from kfac_engine.data import demo_model, digits
from kfac_engine.system.writing import write_file

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench/results/2026-11-23-pruning.jsonl"
SEEDS = (0, 1, 2)
SPARSITIES = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95)
PATTERN = "2:4"
# Method to its damping.
METHODS = {"magnitude": 0.0, "obd": 0.0, "obs": 1e-3}
# Zeros whose networks are trained after the pruning, and the number of steps.
RETRAINED, STEPS = (0.9, 0.95, PATTERN), 60
# Examples of a batch of the measurement of curvature.
_BATCH = 200


@dataclass(frozen=True, slots=True)
class Task:
    """A model and its data: images to train on, then held-out images, with their classes.

    The curvature is measured with the first ``measured`` images. Without ``epochs``, the training
    has ``STEPS``.
    """

    model: bytes
    images: Array
    labels: Array
    training: int
    measured: int
    epochs: int | None


@dataclass(frozen=True, slots=True)
class Pruned:
    """A network, pruned by a method of ``ke.prune`` or ``"none"``, and its held-out accuracy.

    The zeros remain in the ``steps`` of training after the pruning.
    """

    data: str
    seed: int
    method: str
    zeros: float | str
    accuracy: float
    steps: int = 0


def task(name: str, seed: int, folder: Path) -> Task:
    """Return the task of a data set; the seed is that of the initial weights of Fashion-MNIST."""
    if name == "digits":
        return Task(demo_model("cnn"), *digits(), training=1400, measured=1400, epochs=None)
    images = load_images(folder)
    pixels = images.pixels[:, None]
    return Task(
        cnn(images.side, seed).data, pixels, images.labels, images.training, measured=5000, epochs=2
    )


def measure(name: str, seed: int, folder: Path) -> Iterator[Pruned]:
    """Train a network, and yield its accuracy before and after each pruning."""
    job = task(name, seed, folder)
    steps = STEPS if job.epochs is None else None
    train = job.images[: job.training], job.labels[: job.training]
    engine = ke.fit(job.model, train, epochs=job.epochs, steps=steps, seed=seed).engine
    (key,) = engine.losses[0].input_axes
    held_out = {key: job.images[job.training :]}, job.labels[job.training :]

    def accuracy() -> float:
        return engine.evaluate(held_out, ["accuracy"])["accuracy"]

    yield Pruned(name, seed, "none", 0.0, accuracy())
    curvature = measured(job, engine, key)
    for method in METHODS:
        for zeros in (*SPARSITIES, PATTERN):
            pruned = prune(curvature, method, zeros)
            engine.set_parameters(pruned)
            yield Pruned(name, seed, method, zeros, accuracy())
            if zeros in RETRAINED:
                ke.fit(engine, train, steps=STEPS, seed=seed, callbacks=[Zeros(pruned)])
                yield Pruned(name, seed, method, zeros, accuracy(), STEPS)


def measured(job: Task, engine: ke.Engine, key: str) -> ke.Curvature:
    """Return the curvature of a trained network; it needs no labels."""
    with tempfile.TemporaryDirectory() as place:
        file = Path(place) / "trained.onnx"
        engine.export(file)
        starts = range(0, job.measured, _BATCH)
        batches = [({key: job.images[i : min(i + _BATCH, job.measured)]}, None) for i in starts]
        return ke.curvature(file, batches, loss="categorical")


def prune(curvature: ke.Curvature, method: str, zeros: float | str) -> dict[str, Array]:
    """Return the parameters of a network with a sparsity or a pattern."""
    options = {"method": method, "damping": METHODS[method]}
    if zeros != PATTERN:
        return ke.prune(curvature, sparsity=zeros, **options)
    # The first convolution has nine inputs, which are no groups of four.
    shapes = curvature.vector.shapes
    grouped = [name for name in shapes if len(shapes[name]) > 1 and shapes[name][1:] != (1, 3, 3)]
    return ke.prune(curvature, pattern=PATTERN, parameters=grouped, **options)


class Zeros:
    """Sets pruned weights to zero after each step of training."""

    def __init__(self, pruned: Mapping[str, Array]) -> None:
        self._masks = {name: array != 0 for name, array in pruned.items() if array.ndim > 1}

    def __call__(self, record: object, optimizer: Any) -> None:
        """Set the zeros in the parameters of the optimizer's engine."""
        engine = optimizer.engine
        now = engine.parameters
        engine.set_parameters({name: now[name] * mask for name, mask in self._masks.items()})


def main() -> None:
    """Measure all networks, and write the results file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data-folder", type=Path, default=DATA_FOLDER)
    folder = parser.parse_args().data_folder
    lines = []
    for name in ("digits", "Fashion-MNIST"):
        for seed in SEEDS:
            for entry in measure(name, seed, folder):
                lines.append(json.dumps(asdict(entry)) + "\n")
                print(lines[-1], end="", flush=True)
    write_file(RESULTS, [line.encode() for line in lines])


if __name__ == "__main__":
    main()
