"""What is announced before a run, and what is refused."""

import re

import numpy as np
import pytest

import kfac_engine as ke
from kfac_engine.engine import memory
from kfac_engine.engine.validation import check_finite
from kfac_engine.runtime.memory import activation_bound, activation_bytes
from kfac_engine.system import memory_limits
from kfac_engine.system.memory_limits import available_memory
from tests import models


def test_step_that_cannot_fit_is_refused_with_the_figures(monkeypatch):
    engine = ke.Engine.from_onnx(models.mlp(), loss="categorical")
    inputs = models.random_inputs(models.mlp(), batch=4)
    monkeypatch.setattr(memory_limits, "available_memory", lambda: 10_000_000)
    figures = r"needs 1\d\.\d MB and 10\.0 MB.*fc0\.weight.*diagonal"
    with pytest.raises(ke.MemoryLimitError, match=figures):
        engine.observe(inputs)
    assert isinstance(ke.MemoryLimitError("x"), MemoryError)
    assert engine.counter == 0


@pytest.mark.parametrize(
    ("free", "cure"),
    [
        (
            lambda one, many: (one + many) // 2,
            r"values of 100000 examples .* smaller batch, of at most 5\d{4} examples",
        ),
        (lambda one, many: one - 1, "block of fc0.weight, fc0.bias .* 'diagonal'"),
    ],
    ids=["one example would fit", "one example would not"],
)
def test_a_smaller_batch_is_advised_only_where_it_helps(free, cure, monkeypatch):
    engine = ke.Engine.from_onnx(models.mlp(), loss="categorical", threads=1)
    x = np.zeros((100_000, 6), np.float32)
    one, many = (engine.memory(n).on_host for n in (1, len(x)))
    monkeypatch.setattr(memory_limits, "available_memory", lambda: free(one, many))
    with pytest.raises(ke.MemoryLimitError, match=cure) as error:
        engine.observe({"input": x})
    for fitting in re.findall(r"at most (\d+) examples", str(error.value)):
        engine.observe({"input": x[: int(fitting)]})


def test_available_memory_is_what_an_allocation_can_have():
    assert available_memory() > 100_000_000
    assert np.ones(1_000_000).nbytes < available_memory()


def test_reports_carry_block_sizes_and_costs():
    engine = ke.Engine.from_onnx(models.cnn(), loss="categorical", exps=(-1, -0.5))
    first, second, last = engine.layers
    assert first.factor_shapes == ((2 * 9 + 1, 2 * 9 + 1), (4, 4))
    assert second.factor_shapes == ((4 * 9 + 1, 4 * 9 + 1), (5, 5))
    assert last.inverse_flops == 6.0**3 + 3.0**3
    # One average and two stored powers of each side, four bytes a number.
    assert last.factor_bytes == 3 * 4 * (36 + 9)
    assert (first.approximation, first.formula) == ("kron", "t · A ⊗ G")


def test_the_refresh_of_an_eigenbasis_costs_the_factors_that_it_decomposes():
    engine = ke.Engine.from_onnx(
        models.cnn(), loss="categorical", approximations={"fully_connected": "ekfac"}
    )
    layer = engine.layers[-1]
    assert layer.symbols == ("A", "G", "s")
    assert layer.inverse_flops == 6.0**3 + 3.0**3
    costs = [work.cost for work in engine.fisher.works]
    assert costs.count(layer.inverse_flops) == 1


def normalized(channels):
    net = models.Net()
    scale, shift = net.positive("norm.weight", channels), net.weight("norm.bias", channels)
    x = net.op("LayerNormalization", "input", scale, shift, to="norm", axis=-1)
    net.op("ReduceMean", x, net.constant("axes", np.array([1])), to="output", keepdims=1)
    return net.model({"input": ["batch", channels]}, {"output": ["batch", 1]})


def test_scales_of_many_channels_are_diagonal_unless_chosen_otherwise():
    def approximation(channels, **options):
        engine = ke.Engine.from_onnx(normalized(channels), loss="normal", **options)
        return [(layer.kind, layer.approximation) for layer in engine.layers]

    assert approximation(256) == [("scale_and_shift", "full")]
    assert approximation(257) == [("scale_and_shift", "diagonal")]
    chosen = {"approximations": {"scale_and_shift": "full"}}
    assert approximation(257, **chosen) == [("scale_and_shift", "full")]


def test_first_step_measures_nothing_where_memory_is_ample(monkeypatch):
    engine = ke.Engine.from_onnx(models.mlp(), loss="categorical")
    monkeypatch.delattr(memory, "activation_bytes")
    engine.observe(models.random_inputs(models.mlp(), batch=4))
    assert engine.counter == 1


@pytest.mark.parametrize("batch", [1, 64])
@pytest.mark.parametrize("name", ["mlp", "cnn", "resnet_block", "layer_norm", "token_mlp"])
def test_bound_of_activations_is_above_their_measured_peak(name, batch):
    engine = ke.Engine.from_onnx(models.MODELS[name](), loss="categorical")
    found = engine.losses[0]
    assert not found.fixed_batch
    model, sample = engine._model, engine._task.batch
    assert activation_bound(model, sample, batch) >= activation_bytes(model, sample, batch, batch)


def test_finite_gradients_with_squares_that_overflow_are_finite():
    large = np.full(3, 1e30, np.float32)
    check_finite({"w": large})
    with pytest.raises(ke.NonFiniteError, match="'w'"):
        check_finite({"w": np.array([1, np.inf], np.float32)})
    with pytest.raises(ke.NonFiniteError, match="'v'"):
        check_finite({"w": large, "v": np.array([[np.nan]])})
