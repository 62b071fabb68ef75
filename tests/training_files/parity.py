"""Steps of training files next to those of the optimizers in Python, with equal random numbers."""

import copy
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx

import kfac_engine as ke
from tests.models import random_inputs
from tests.training_files.nets import updated

OPTIMIZERS = {
    "kfac": ke.KfacOptimizer, "adamw": ke.AdamW, "adam": ke.Adam, "muon": ke.Muon, "sgd": ke.SGD
}  # fmt: skip
SIZES = (8, 8, 5, 12)


def batches(
    model: onnx.ModelProto, draw, count: int, *, again: bool
) -> Iterator[tuple[dict, np.ndarray]]:
    """Batches of different sizes, with targets from ``draw(rng, n)``; the same ones come again."""
    for step in range(count):
        place = step % len(SIZES)
        n, seed = SIZES[place], place if again else step
        yield random_inputs(model, n, seed), draw(np.random.default_rng(100 + seed), n)


def normal_numbers(loss: object) -> bool:
    return loss == "normal" or isinstance(loss, ke.Normal)


def noise(
    engine: ke.Engine, files: ke.TrainingFiles, n: int, normal: bool, part: float = 0.25
) -> dict:
    """The numbers that the engine is about to draw for the targets of its statistics."""
    rng = copy.deepcopy(engine.estimator.rng)
    size, draws = max(1, round(n * part)), {}
    for name, shape in files.description.noise.items():
        draw = rng.standard_normal if normal else rng.random
        draws[name] = draw((size, *shape[1:]))
    return draws


def differences(
    model: onnx.ModelProto,
    optimizer: str,
    folder: Path,
    draw,
    loss: object = "categorical",
    steps: int = 20,
    different: float | None = None,
    **options: object,
) -> list[float]:
    """The largest relative difference of a parameter or running statistic after each step.

    With a number of different examples for the file, the examples come again.
    """
    names = ("freeze", "trainable", "train_form", "tie_weights", "reduction")
    engine_options = {k: options.pop(k) for k in names if k in options}
    names = ("probabilities", "weights", "mask", "accumulate")
    file_options = {k: options.pop(k) for k in names if k in options}
    engine = ke.Engine.from_onnx(
        model, loss=loss, threads=1, backend="numpy", gradient_dtype="float32", **engine_options
    )
    trainer = OPTIMIZERS[optimizer](engine, **options)
    files = ke.export_training(
        model, loss, optimizer, path=folder, noise="input", **engine_options, **file_options,
        **options,
    )  # fmt: skip
    state, found = files.initial(), []
    if different is not None:
        state["different examples"] = np.array(different, np.float32)
    for inputs, targets in batches(model, draw, steps, again=different is not None):
        n = len(next(iter(inputs.values())))
        measures_whole = optimizer == "kfac" and trainer.measures_whole(trainer.state().arrays)
        part = 1.0 if measures_whole else 0.25
        given = noise(engine, files, n, normal_numbers(loss), part)
        results = files.step(state, {**inputs, **given}, targets)
        report = trainer.step(inputs, targets)
        assert bool(results["finite"])
        np.testing.assert_allclose(results["loss"], report.loss, rtol=1e-3)
        state |= updated(state, results)
        expected = {**engine.parameters, **engine.buffers}
        weights = files.read(state)
        assert set(weights) == set(expected)
        found.append(max(relative(weights[n], value) for n, value in expected.items()))
    return found


def relative(found: np.ndarray, expected: np.ndarray) -> float:
    return float(np.linalg.norm(found - expected) / max(np.linalg.norm(expected), 1e-12))
