"""Random nodes of the model in training files."""

import numpy as np
import onnx
import pytest

import kfac_engine as ke
from tests.models import parsed
from tests.training_files.nets import data, updated

GRAPH = """g (float[batch, 5] input{more}) => (float[batch, 3] output) {{
    fc = MatMul(input, w)  act = Tanh(fc)  {nodes}  output = MatMul(noisy, v) }}"""


def noisy(nodes, more="", **constants):
    """Two layers, and between them nodes from ``act`` to ``noisy``."""
    rng = np.random.default_rng(0)
    arrays = {"w": rng.standard_normal((5, 6)), "v": rng.standard_normal((6, 3)), **constants}
    arrays = {name: np.asarray(array, np.float32) for name, array in arrays.items()}
    return parsed(GRAPH.format(nodes=nodes, more=more), {"on": True, **arrays})


def dropping(ratio, masked=False):
    """A network with Dropout in training mode, or with its mask as an input."""
    if masked:
        return noisy("noisy = Mul(act, mask)", ", float[batch, 6] mask")
    return noisy("noisy = Dropout(act, ratio, on)", ratio=ratio)


@pytest.mark.parametrize("optimizer", ["kfac", "adamw"])
def test_dropout_multiplies_by_its_mask_also_in_the_statistics(optimizer, tmp_path):
    ratio, rng = 0.3, np.random.default_rng(0)
    drops, masks = (
        ke.export_training(
            dropping(ratio, masked), optimizer=optimizer, path=tmp_path / str(masked), noise="input"
        )
        for masked in (False, True)
    )
    states = [drops.initial(), masks.initial()]
    (name,) = [name for name in drops.description.noise if "noisy" in name]
    for _ in range(6):
        x, targets = rng.standard_normal((8, 5)), rng.integers(0, 3, 8)
        numbers, targets_noise = rng.random((8, 6)), rng.random(2)
        mask = (numbers.astype("float32") >= np.float32(ratio)) / (1 - ratio)
        extra = ({name: numbers, "noise": targets_noise}, {"mask": mask, "noise": targets_noise})
        for files, state, given in zip((drops, masks), states, extra, strict=True):
            given.pop("noise") if optimizer == "adamw" else None
            results = files.step(state, {"input": x, **given}, targets)
            state |= updated(state, results)
    states[0].pop("feature_powers/feature_powers", None)  # a mask has features, too
    for key, value in states[0].items():
        np.testing.assert_allclose(value, states[1][key], rtol=1e-4, atol=1e-6)


def test_the_file_draws_a_new_mask_in_each_step(tmp_path):
    model = dropping(0.25)
    files = ke.export_training(model, optimizer="sgd", learning_rate=0.0, path=tmp_path / "files")
    batch = ({"input": np.ones((64, 5), np.float32)}, np.zeros(64, np.int64))
    run = files.run([batch] * 30, steps=30)
    assert len(set(run.losses)) == 30  # nothing else changes
    again = files.run([batch] * 30, steps=30)
    assert run.losses == again.losses
    first, second = (files.predict(run.state, batch[0])["output"] for _ in range(2))
    np.testing.assert_array_equal(first, second)


@pytest.mark.parametrize("op", ["RandomNormalLike", "RandomUniformLike", "Bernoulli"])
def test_other_random_nodes_are_drawn_in_the_file(op, tmp_path):
    model = noisy(f"shares = Sigmoid(act)  drawn = {op}(shares)  noisy = Add(act, drawn)")
    files = ke.export_training(model, path=tmp_path / "files")
    operators = {node.op_type for node in onnx.load(files.folder / "training.onnx").graph.node}
    assert op not in operators
    run = files.run([data(model)] * 8, steps=8)
    assert len(set(run.losses)) == 8
    assert run.skipped == 0


def test_parts_have_masks_of_their_own(tmp_path):
    model = dropping(0.5)
    files = ke.export_training(
        model, optimizer="sgd", learning_rate=0.0, path=tmp_path / "files", accumulate=2
    )
    run = files.run([data(model)] * 5, steps=5)
    assert len(set(run.losses)) == 5
    with pytest.raises(ke.UnsupportedError, match="accumulate"):
        ke.export_training(model, path=tmp_path / "other", accumulate=2, noise="input")


def test_a_dropout_whose_mode_is_an_input_is_refused(tmp_path):
    model = noisy("noisy = Dropout(act, ratio, mode)", ", bool mode", ratio=0.5)
    with pytest.raises(ke.UnsupportedError, match="Dropout"):
        ke.export_training(model, path=tmp_path / "files")
