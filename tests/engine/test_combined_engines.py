"""Two engines measure two parts of a batch; their combined statistics are those of the batch."""

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import numpy as np
import pytest

import kfac_engine as ke
from kfac_engine.distributed.shards import Rows
from tests import models

# Of the largest entry, for sums of tens of products. ONNX Runtime has no convolution in float64.
TOLERANCES = {"float64": 1e-9, "float32": 1e-5}
DTYPES = {"mlp": "float64", "token_mlp": "float64", "cnn": "float32", "layer_norm": "float32"}


class TwoProcesses:
    """Combines the measurements of two threads as two processes would."""

    def __init__(self):
        self._barrier = Barrier(2, timeout=60)
        self._sent = {}
        self.calls = [0, 0]

    def of(self, rank):
        def combine(measurements):
            self.calls[rank] += 1
            self._sent[rank] = [(m.examples, m.array.copy()) for m in measurements]
            self._barrier.wait()
            pairs = list(zip(self._sent[0], self._sent[1], strict=True))
            self._barrier.wait()
            for measurement, ((n0, first), (n1, second)) in zip(measurements, pairs, strict=True):
                measurement.array[...] = (n0 * first + n1 * second) / (n0 + n1)
                measurement.examples = n0 + n1

        return combine


def model_of(name):
    return models.MODELS[name](dtype=DTYPES[name])


def batch(name, seed, count=6):
    model = model_of(name)
    inputs = models.random_inputs(model, batch=count, seed=seed)
    trace = ke.Engine.from_onnx(model, loss="categorical").trace(inputs)
    shape = trace["output"].shape
    return inputs, np.random.default_rng(seed).integers(0, shape[-1], shape[:-1])


def part(inputs, targets, rows):
    return {key: array[rows] for key, array in inputs.items()}, targets[rows]


def observed(name, **options):
    """An engine on whole batches and two engines on parts of them, after two batches."""
    whole, *parts = (
        ke.Engine.from_onnx(model_of(name), loss="categorical", **options) for _ in range(3)
    )
    processes = TwoProcesses()
    for rank, engine in enumerate(parts):
        engine.combine = processes.of(rank)
        engine.estimator.rows = Rows.of((2, 4), rank)
    with ThreadPoolExecutor(2) as threads:
        for seed in range(2):
            inputs, targets = batch(name, seed)
            whole.observe(inputs, targets)
            halves = (part(inputs, targets, rows) for rows in (slice(0, 2), slice(2, 6)))
            runs = [
                threads.submit(engine.observe, *half)
                for engine, half in zip(parts, halves, strict=True)
            ]
            for run in runs:
                run.result()
    return whole, parts, processes


def assert_same_averages(engine, whole):
    for found, wanted in zip(engine.estimator.factors, whole.estimator.factors, strict=True):
        scale = abs(wanted.cov).max()
        close = max(TOLERANCES[str(array.dtype)] for array in engine.parameters.values())
        np.testing.assert_allclose(found.cov / scale, wanted.cov / scale, atol=close)


@pytest.mark.parametrize("mode", ["empirical", "exact", "gradients", "curvature_prop"])
@pytest.mark.parametrize("name", ["mlp", "cnn", "layer_norm", "token_mlp"])
def test_combined_averages_equal_those_of_the_whole_batch(name, mode):
    whole, parts, processes = observed(name, estimation_mode=mode)
    for engine in parts:
        assert_same_averages(engine, whole)
        assert engine.estimator.rng.bit_generator.state == whole.estimator.rng.bit_generator.state
    assert processes.calls == [2, 2]


def test_an_error_of_the_combination_leaves_the_engine_unchanged():
    engine = ke.Engine.from_onnx(models.mlp(), loss="categorical")
    inputs = models.random_inputs(models.mlp(), batch=4)
    engine.observe(inputs)
    before = [factor.cov for factor in engine.estimator.factors]
    generator = engine.estimator.rng.bit_generator.state

    def refuse(measurements):
        raise ke.NonFiniteError("another process refused the batch")

    engine.combine = refuse
    with pytest.raises(ke.NonFiniteError, match="another process"):
        engine.observe(inputs)
    for factor, old in zip(engine.estimator.factors, before, strict=True):
        np.testing.assert_array_equal(factor.cov, old)
    assert engine.counter == 1
    assert engine.estimator.rng.bit_generator.state == generator
    engine.combine = None
    engine.observe(inputs)
    assert engine.counter == 2


def test_a_failed_update_of_rows_restores_the_generator():
    engine = ke.Engine.from_onnx(models.mlp(), loss="categorical")
    engine.estimator.rows = Rows(1, 3, 6)
    before = engine.estimator.rng.bit_generator.state
    with pytest.raises(ke.ShapeError, match="for 3 examples"):
        engine.observe(models.random_inputs(models.mlp(), batch=4))
    assert engine.estimator.rng.bit_generator.state == before
    engine.observe(models.random_inputs(models.mlp(), batch=3))
    assert engine.counter == 1


def test_rows_must_be_rows():
    engine = ke.Engine.from_onnx(models.mlp(), loss="categorical")
    with pytest.raises(ke.InputError, match="rows must be"):
        engine.estimator.rows = (0, 2, 4)
    assert engine.estimator.rows is None


def test_combine_must_be_a_function():
    engine = ke.Engine.from_onnx(models.mlp(), loss="categorical")
    with pytest.raises(ke.InputError, match="combine must be a function"):
        engine.combine = "mean"
    assert engine.combine is None
