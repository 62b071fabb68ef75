"""Measure the accuracy of pruned networks on two data sets, with three seeds, into a results file.

Run: ``python -m scripts.measure_pruning [--data-folder FOLDER]``, with the folder of Fashion-MNIST.
A line of the file is a pruned network. ``python -m scripts.draw_pruning`` draws the lines.
"""

import argparse
import json
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
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
# Examples of a batch of the measurement of curvature; it divides the number of all.
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

    def trained(self, seed: int) -> tuple[ke.Engine, str]:
        """Return a trained network, and the name of its input."""
        steps = STEPS if self.epochs is None else None
        examples = self.images[: self.training], self.labels[: self.training]
        engine = ke.fit(self.model, examples, epochs=self.epochs, steps=steps, seed=seed).engine
        (key,) = engine.losses[0].input_axes
        return engine, key

    def curvature(
        self, engine: ke.Engine, key: str, *, labeled: bool = False, layers: str = "all"
    ) -> ke.Curvature:
        """Return the curvature of a trained network, with or without the labels of its data."""
        parts = [slice(i, i + _BATCH) for i in range(0, self.measured, _BATCH)]
        batches = [
            ({key: self.images[part]}, self.labels[part] if labeled else None) for part in parts
        ]
        with tempfile.TemporaryDirectory() as place:
            file = Path(place) / "trained.onnx"
            engine.export(file)
            return ke.curvature(file, batches, loss="categorical", layers=layers)


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
    engine, key = job.trained(seed)
    train = job.images[: job.training], job.labels[: job.training]
    held_out = {key: job.images[job.training :]}, job.labels[job.training :]

    def accuracy() -> float:
        return engine.evaluate(held_out, ["accuracy"])["accuracy"]

    yield Pruned(name, seed, "none", 0.0, accuracy())
    curvature = job.curvature(engine, key)
    for method in METHODS:
        for zeros in (*SPARSITIES, PATTERN):
            pruned = prune(curvature, method, zeros)
            engine.set_parameters(pruned)
            yield Pruned(name, seed, method, zeros, accuracy())
            if zeros in RETRAINED:
                ke.fit(engine, train, steps=STEPS, seed=seed, callbacks=[Zeros(pruned)])
                yield Pruned(name, seed, method, zeros, accuracy(), STEPS)


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


def write_results(
    file: Path, names: Iterable[str], measure: Callable[[str, int, Path], Iterable[Any]]
) -> None:
    """Write a line for each entry that is measured for a name, a seed and the folder of images."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--data-folder", type=Path, default=DATA_FOLDER)
    folder = parser.parse_args().data_folder
    lines = []
    for name in names:
        for seed in SEEDS:
            for entry in measure(name, seed, folder):
                lines.append(json.dumps(asdict(entry)) + "\n")
                print(lines[-1], end="", flush=True)
    write_file(file, [line.encode() for line in lines])


def read_results(file: Path, entry: type[Any]) -> list[Any]:
    """Return the entries of a file of ``write_results``."""
    return [entry(**json.loads(line)) for line in file.read_text(encoding="utf-8").splitlines()]


if __name__ == "__main__":
    write_results(RESULTS, ("digits", "Fashion-MNIST"), measure)
