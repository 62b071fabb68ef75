"""The rows of a batch that an engine has, as one of several processes."""

import pytest

import kfac_engine as ke
from kfac_engine.distributed.shards import RowRange
from tests import models


def test_a_failed_update_of_rows_restores_the_generator():
    engine = ke.Engine.from_onnx(models.mlp(), loss="categorical")
    engine.estimator.set_rows(RowRange(1, 3, 6))
    before = engine.estimator.rng.bit_generator.state
    with pytest.raises(ke.ShapeError, match="for 3 examples"):
        engine.observe(models.random_inputs(models.mlp(), batch=4))
    assert engine.estimator.rng.bit_generator.state == before
    engine.observe(models.random_inputs(models.mlp(), batch=3))
    assert engine.counter == 1


def test_rows_must_be_rows():
    engine = ke.Engine.from_onnx(models.mlp(), loss="categorical")
    with pytest.raises(ke.InputError, match="rows must be"):
        engine.estimator.set_rows((0, 2, 4))
    assert engine.estimator.sources.rows is None
