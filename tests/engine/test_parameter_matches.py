"""Matches of stored exports of PyTorch with the parameters and gradients of torch.

The gradients are those of torch's autograd in float64; the files are from its exporters.
"""

import re
import warnings
from pathlib import Path

import numpy as np
import pytest

import kfac_engine as ke
from tests import models
from tests.comparing import assert_arrays_equal

EXPORTS = Path(__file__).resolve().parents[1] / "exports"
# Rounding of a batch of 7 in float32; a wrong layout or pair differs by more than 0.1.
TOLERANCE = 1e-4


def load(stem, **options):
    """The engine of a stored file, with the parameters, the gradients and the batch of torch."""
    with warnings.catch_warnings(action="ignore", category=ke.ExportWarning):
        engine = ke.Engine.from_onnx(EXPORTS / f"{stem}.onnx", loss="categorical", **options)
    with np.load(EXPORTS / f"{stem.split('-')[0]}.npz") as stored:
        arrays = dict(stored)
    state = {n.removeprefix("state/"): a for n, a in arrays.items() if n.startswith("state/")}
    gradients = {
        n.removeprefix("gradient/"): a for n, a in arrays.items() if n.startswith("gradient/")
    }
    for twin, first in (("out.weight", "embed.weight"), *SHARED):
        if twin in state and first in state:  # one tensor in torch
            state[twin] = state[first]
    return engine, state, gradients, ({"x": arrays["x"]}, arrays["targets"])


SHARED = (("blocks.2.weight", "blocks.0.weight"), ("blocks.2.bias", "blocks.0.bias"))
MATCHED = [
    *(f"{name}-plain" for name in ("mlp", "cnn", "encoder", "lstm", "tied", "depthwise", "shared")),
    *(f"{name}-legacy" for name in ("mlp", "depthwise", "shared")),
    *(f"{name}-dynamo" for name in ("mlp", "depthwise", "shared", "tied")),
]


def check_gradients(engine, matches, gradients, batch):
    result = engine.gradients(*batch)
    module = matches.to_module(result.gradients)
    assert gradients.keys() <= module.keys()
    for name, truth in gradients.items():
        assert module[name].flags.c_contiguous
        assert module[name].flags.writeable
        scale = max(abs(truth).max(), 1e-3)  # gradients of key biases are zero
        np.testing.assert_allclose(module[name], truth, atol=TOLERANCE * scale, rtol=0)
    assert_arrays_equal(result.gradients, matches.to_engine(module))


@pytest.mark.parametrize("stem", MATCHED)
def test_gradients_in_module_layout_equal_autograd(stem):
    engine, state, gradients, batch = load(stem)
    matches = ke.match_parameters(engine, state)
    assert matches.layouts.keys() == engine.parameters.keys()
    check_gradients(engine, matches, gradients, batch)


def test_copy_of_a_tied_embedding_needs_tie_weights():
    engine, state, gradients, batch = load("tied-legacy")
    with pytest.raises(ke.InputError, match=r"copy of .*tie_weights=True"):
        ke.match_parameters(engine, state)
    engine, *_ = load("tied-legacy", tie_weights=True)
    matches = ke.match_parameters(engine, state)
    check_gradients(engine, matches, gradients, batch)


@pytest.mark.parametrize("moved", [False, True])
@pytest.mark.parametrize("stem", ["encoder-legacy", "encoder-dynamo"])
def test_merged_weights_are_refused_by_name(stem, moved):
    engine, state, _, _ = load(stem)
    if moved:
        state = {name: array + 0.5 for name, array in state.items()}
    with pytest.raises(ke.InputError, match=r"merged .*layers\.1\..*optimize=False"):
        ke.match_parameters(engine, state)


@pytest.mark.parametrize("stem", ["cnn-legacy", "cnn-dynamo"])
def test_folded_normalizations_are_refused_by_name(stem):
    engine, state, _, _ = load(stem)
    name = re.escape(engine.export_changes.folded[0])
    with pytest.raises(ke.InputError, match=rf"folded a normalization into '{name}'"):
        ke.match_parameters(engine, state)


def test_computed_weights_are_refused_by_name():
    engine, state, _, _ = load("lstm-legacy")
    with pytest.raises(ke.InputError, match=r"'onnx::LSTM_\d+' .* computed in the export"):
        ke.match_parameters(engine, state)


@pytest.mark.parametrize(
    ("producer", "advice", "absent"),
    [
        ("pytorch", "torch.onnx.export", "coefs_"),
        ("skl2onnx", "coefs_ and intercepts_", "torch"),
        ("tf2onnx", "with the names of the model", "torch"),
    ],
)
def test_refusal_advises_by_the_producer_of_the_file(producer, advice, absent):
    model = models.mlp()
    model.producer_name = producer
    engine = ke.Engine.from_onnx(model, loss="categorical")
    rng = np.random.default_rng(1)
    for arrays in ({"a": rng.normal(size=1)}, {"a": np.zeros(1), "b": np.zeros(1)}):
        with pytest.raises(ke.InputError) as refused:
            ke.match_parameters(engine, arrays)
        assert advice in str(refused.value)
        assert absent not in str(refused.value)


def test_running_statistics_are_unmatched():
    engine, state, _, _ = load("cnn-plain")
    matches = ke.match_parameters(engine, state)
    assert {"1.running_mean", "4.running_var", "1.num_batches_tracked"} <= {*matches.unmatched}
    assert matches.to_engine(state).keys() == engine.parameters.keys()


def renamed(state):
    """Arrays of a framework with other names and layouts: filters HWIO, dense weights (in, out)."""
    layouts = {4: (2, 3, 1, 0), 2: (1, 0), 1: (0,), 0: ()}
    return {
        f"variable/{i}": np.ascontiguousarray(a.transpose(layouts[a.ndim]))
        for i, a in enumerate(state.values())
    }


def test_values_match_permuted_axes_under_other_names():
    engine, state, gradients, batch = load("depthwise-plain")
    matches = ke.match_parameters(engine, renamed(state))
    check_gradients(engine, matches, renamed(gradients), batch)


def test_values_match_permuted_axes_of_filters_with_different_channels():
    engine, state, gradients, batch = load("cnn-plain")

    def with_last_channels(arrays):
        return {n: a.transpose(2, 3, 1, 0) if a.ndim == 4 else a for n, a in arrays.items()}

    filters = {n: f"kernel/{n}" if a.ndim == 4 else n for n, a in state.items()}
    matches = ke.match_parameters(
        engine, {filters[n]: a for n, a in with_last_channels(state).items()}
    )
    assert matches.layouts["3.weight"].axes == (3, 2, 0, 1)  # its inverse is another order
    truth = {filters[n]: a for n, a in with_last_channels(gradients).items()}
    check_gradients(engine, matches, truth, batch)


def test_values_match_another_shape():
    engine, state, gradients, batch = load("mlp-plain")
    rows = {name: a[None] if a.ndim == 1 else a for name, a in state.items()}
    matches = ke.match_parameters(engine, {f"p/{n}": a for n, a in rows.items()})
    truth = {f"p/{n}": g[None] if g.ndim == 1 else g for n, g in gradients.items()}
    check_gradients(engine, matches, truth, batch)


def test_shapes_match_after_training_where_one_array_has_them():
    engine, state, gradients, batch = load("mlp-plain")
    moved = {f"p{i}": a + 1 for i, a in enumerate(state.values())}
    matches = ke.match_parameters(engine, moved)
    check_gradients(engine, matches, {f"p{i}": g for i, g in enumerate(gradients.values())}, batch)


def test_shapes_do_not_match_a_computed_weight_of_a_module_with_equal_values():
    engine, state, _, _ = load("mlp-plain")
    state = {f"p{i}": a for i, a in enumerate(state.values())}
    state["p0"] = state["p0"] + 1
    with pytest.raises(ke.InputError, match=r"'0.weight' .* computed in the export"):
        ke.match_parameters(engine, state)


def test_arrays_with_equal_values_are_refused_by_name():
    engine, state, _, _ = load("cnn-plain")
    with pytest.raises(ke.InputError, match=r"'1\.weight' equals 'variable/2', 'variable/5'"):
        ke.match_parameters(engine, renamed(state))


def test_wrong_arrays_raise_errors_with_their_names():
    engine, state, _, _ = load("mlp-plain")
    matches = ke.match_parameters(engine, state)
    with pytest.raises(ke.UnknownNameError, match=r"'weight' \(.*2\.weight'\?\) is not the name"):
        matches.to_engine({"weight": state["0.weight"]})
    with pytest.raises(ke.InputError, match=r"'0\.bias' is None"):
        matches.to_engine({"0.bias": None})
    with pytest.raises(ke.ShapeError, match=r"'0\.bias' has shape \(3,\), not \(5,\)"):
        matches.to_engine({"0.bias": np.zeros(3)})
    with pytest.raises(ke.UnknownNameError, match=r"'bias' \(.*2\.bias'\?\) is not a parameter"):
        matches.to_module({"bias": np.zeros(3)})
    with pytest.raises(ke.ShapeError, match=r"'0\.bias' has shape \(4,\), not \(5,\)"):
        matches.to_module({"0.bias": np.zeros(4)})


def test_natural_gradients_of_gradients_from_the_module_equal_those_of_a_step():
    engine, state, _, batch = load("depthwise-plain")
    matches = ke.match_parameters(engine, state)
    result = engine.step(*batch)
    again = engine.precondition(matches.to_engine(matches.to_module(result.gradients)))
    assert_arrays_equal(again, result.natural_gradients)
