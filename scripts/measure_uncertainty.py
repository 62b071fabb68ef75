"""Measure how well predictions know turned images, on two data sets, with three seeds.

Run: ``python -m scripts.measure_uncertainty [--data-folder FOLDER]``, with the folder of
Fashion-MNIST. A line of the results file is a network and a way of predicting. ``python -m
scripts.draw_uncertainty`` draws the lines.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from scipy.special import softmax
from scipy.stats import rankdata

import kfac_engine as ke
from kfac_engine._types import Array
from scripts.measure_pruning import ROOT, task, write_results

RESULTS = ROOT / "bench/results/2026-11-23-uncertainty.jsonl"
# Name of the data to that of the task, and whether the images are shuffled before the division into
# training data and held-out data. The last digits are of other writers than the first.
DATA = {
    "digits of the same writers": ("digits", True),
    "digits of other writers": ("digits", False),
    "Fashion-MNIST": ("Fashion-MNIST", False),
}
# Number of held-out images that are predicted, upright and turned by 90 degrees.
QUERIES = 397
LAYERS = {"all": "posterior of all layers", "last": "posterior of the last layer"}


@dataclass(frozen=True, slots=True)
class Predicted:
    """Predictions of upright and turned images by the model alone, or with a posterior.

    ``auroc`` is the probability that a turned image has a larger entropy than an upright one. The
    mean negative log-likelihood, in nats, and the accuracy are of the upright images.
    """

    data: str
    seed: int
    method: str
    auroc: float
    log_loss: float
    accuracy: float


def measure(name: str, seed: int, folder: Path) -> Iterator[Predicted]:
    """Train a network, and yield its own predictions and those of two posteriors."""
    of_task, shuffled = DATA[name]
    job = task(of_task, seed, folder)
    if shuffled:
        order = np.random.default_rng(seed).permutation(len(job.images))
        job = replace(job, images=job.images[order], labels=job.labels[order])
    engine, key = job.trained(seed)
    upright = job.images[job.training :][:QUERIES]
    labels = job.labels[job.training :][:QUERIES]
    rotated = np.rot90(upright, axes=(2, 3)).copy()

    def entry(method: str, of_upright: Array, of_rotated: Array) -> Predicted:
        likelihood = np.log(of_upright[np.arange(QUERIES), labels].clip(1e-300)).mean()
        accuracy = (of_upright.argmax(axis=1) == labels).mean()
        auroc = larger(entropy(of_rotated), entropy(of_upright))
        return Predicted(name, seed, method, auroc, float(-likelihood), float(accuracy))

    plain = [softmax(engine.predict({key: images}), axis=1) for images in (upright, rotated)]
    yield entry("model alone", *plain)
    for layers, method in LAYERS.items():
        posterior = ke.Laplace(job.curvature(engine, key, labeled=True, layers=layers)).fit_prior()
        pair = [posterior.predict({key: images}).probabilities for images in (upright, rotated)]
        yield entry(method, *pair)


def entropy(probabilities: Array) -> Array:
    """Return the entropy of each row, in nats."""
    return -(probabilities * np.log(probabilities.clip(1e-300))).sum(axis=1)


def larger(one: Array, other: Array) -> float:
    """Return the probability that an entry of one array is larger than an entry of the other."""
    ranks = rankdata(np.concatenate([other, one]))[len(other) :]
    pairs = len(one) * len(other)
    return float((ranks.sum() - len(one) * (len(one) + 1) / 2) / pairs)


if __name__ == "__main__":
    write_results(RESULTS, DATA, measure)
