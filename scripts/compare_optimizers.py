"""Compare the optimizers on the bundled digits: losses after a number of CPU seconds.

    python -m scripts.compare_optimizers [--models mlp,cnn] [--seconds 0.25,0.5,1] [--seeds 0,1,2]

Every optimizer has its default settings, and Adam has three learning rates. One thread computes.
The clock counts the CPU time of drawing batches and of steps, but not of sessions and evaluations.
The schedule is "tail". A seed draws the 360 held-out digits, the batches of 128 and the sampled
targets. The table has the median over the seeds.
"""

import argparse
import time
from collections.abc import Callable
from statistics import median

import numpy as np

import kfac_engine as ke
from kfac_engine.data import demo_model, digits
from kfac_engine.training.optimizer import Optimizer
from kfac_engine.training.schedules import SCHEDULES

BATCH, HELD_OUT = 128, 360

METHODS: dict[str, Callable[[ke.Engine], Optimizer]] = {
    "K-FAC, auto": ke.KfacOptimizer,
    "Adam .001": lambda engine: ke.Adam(engine, 0.001),
    "Adam .003": lambda engine: ke.Adam(engine, 0.003),
    "Adam .01": lambda engine: ke.Adam(engine, 0.01),
    "Muon": ke.Muon,
}


def train(model: str, method: str, seconds: float, seed: int) -> tuple[int, float, float]:
    """Train a demo model; return the number of steps, the training and the held-out loss."""
    engine = ke.Engine.from_onnx(demo_model(model), loss="categorical", threads=1, seed=seed)
    rng = np.random.default_rng(seed)
    images, labels = digits()
    order = rng.permutation(len(labels))
    training, held_out = order[HELD_OUT:], order[:HELD_OUT]
    optimizer = METHODS[method](engine)
    engine.gradients({"image": images[training[:BATCH]]}, labels[training[:BATCH]])
    queue, spent = training[:0], 0.0
    while spent < seconds:
        start = time.process_time()
        if len(queue) < BATCH:
            queue = rng.permutation(training)
        batch, queue = queue[:BATCH], queue[BATCH:]
        scale = SCHEDULES["tail"](spent / seconds)
        optimizer.step({"image": images[batch]}, labels[batch], scale)
        spent += time.process_time() - start
    losses = (engine.loss({"image": images[part]}, labels[part]) for part in (training, held_out))
    return optimizer.steps, *losses


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default="mlp,cnn")
    parser.add_argument("--seconds", default="0.25,0.5,1")
    parser.add_argument("--seeds", default="0,1,2")
    options = parser.parse_args()
    seeds = [int(seed) for seed in options.seeds.split(",")]
    print("| model | CPU seconds | optimizer | steps | training loss | held-out loss |")
    print("|---|---|---|---|---|---|")
    for model in options.models.split(","):
        for seconds in map(float, options.seconds.split(",")):
            # Methods take turns, so that other load of the machine meets all of them.
            runs = {(m, s): train(model, m, seconds, s) for s in seeds for m in METHODS}
            for method in METHODS:
                steps, fitted, held_out = zip(*(runs[method, s] for s in seeds), strict=True)
                print(
                    f"| {model} | {seconds:g} | {method} | {median(steps)} | "
                    f"{median(fitted):.5f} | {median(held_out):.4f} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
