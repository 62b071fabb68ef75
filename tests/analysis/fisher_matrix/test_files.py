"""A saved curvature equals the original, belongs to its weights, and damaged files are refused."""

import json

import numpy as np
import pytest
from onnx import numpy_helper
from safetensors import safe_open
from safetensors.numpy import save_file

import kfac_engine as ke
from tests import models
from tests.analysis.fisher_matrix.dense import dense, measured, uneven
from tests.comparing import assert_arrays_equal

MODEL = models.mlp(dtype="float64")
INPUTS = models.random_inputs(MODEL, batch=5)
LABELS = np.array([0, 2, 1, 1, 0])


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "mlp.curvature.safetensors"
    measured(MODEL, uneven(INPUTS, LABELS, sizes=(2,))).save(path)
    return path


def load(path, model=MODEL, **options):
    return ke.Curvature.load(path, model, threads=1, backend="numpy", **options)


@pytest.mark.parametrize(
    "options",
    [
        {"structure": "kron", "biases": "separate"},
        {"structure": "ekfac", "trainable": ["fc0*", "fc1*"]},
        {"structure": "diagonal", "fisher": "empirical"},
        {"structure": "full"},
        {"layers": "last"},
    ],
)
def test_loaded_curvature_equals_the_saved_one(tmp_path, options):
    saved = measured(MODEL, uneven(INPUTS, LABELS, sizes=(2,)), **options)
    saved.save(tmp_path / "file.safetensors")
    loaded = load(tmp_path / "file.safetensors")
    assert loaded.examples == 5
    assert loaded.log_likelihood == saved.log_likelihood
    assert loaded.predictions == saved.predictions == 5 * 3
    assert repr(loaded) == repr(saved)
    np.testing.assert_array_equal(dense(loaded, power=-0.5, damping=0.1),
                                  dense(saved, power=-0.5, damping=0.1))  # fmt: skip
    assert_arrays_equal(loaded.eigenvalues(), saved.eigenvalues())
    if options.get("structure", "kron") in ("kron", "ekfac") and "layers" not in options:
        moment = saved.input_moment("fc1.weight")
        np.testing.assert_array_equal(loaded.input_moment("fc1.weight"), moment)


def test_equal_curvatures_have_equal_files(tmp_path):
    for name in ("a", "b"):
        measured(MODEL, (INPUTS, LABELS)).save(tmp_path / name)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def changed(name):
    """The model with another value in one weight."""
    model = models.mlp(dtype="float64")
    for tensor in model.graph.initializer:
        if tensor.name == name:
            array = numpy_helper.to_array(tensor).copy()
            array.flat[-1] += 1e-12
            tensor.CopyFrom(numpy_helper.from_array(array, name))
    return model


@pytest.mark.parametrize("name", ["fc0.weight", "fc2.bias"])
def test_other_weights_are_refused_by_name(path, name):
    with pytest.raises(ke.InputError, match=f"other weights: '{name}' differ"):
        load(path, changed(name))


def test_frozen_weights_are_bound_as_well(tmp_path):
    """The curvature of the last layer depends on the weights of all layers."""
    path = tmp_path / "last"
    measured(MODEL, (INPUTS, None), layers="last").save(path)
    with pytest.raises(ke.InputError, match=r"'fc0.weight' differ"):
        load(path, changed("fc0.weight"))


def test_another_model_is_refused(path):
    with pytest.raises(ke.InputError, match="other weights"):
        load(path, models.mlp((6, 4, 3), dtype="float64"))


def test_loss_object_is_needed_again(tmp_path):
    path, loss = tmp_path / "file", ke.NormalMeanNegativeLogProbLoss("output")
    measured(MODEL, (INPUTS, None), loss).save(path)
    with pytest.raises(ke.InputError, match="pass loss="):
        load(path)
    assert load(path, loss=loss).examples == 5


@pytest.mark.parametrize(
    "loss",
    [
        ke.Categorical(ignore_index=7, class_weights=np.array([1.0, 2.0, 0.5]), weight=2),
        [ke.MultiBernoulli(find_logits=False)],
        {"output": ke.Normal(var=2.0)},
    ],
    ids=repr,
)
def test_a_loss_with_options_is_stored(loss, tmp_path):
    path = tmp_path / "file"
    labels = LABELS if isinstance(loss, ke.Categorical) else None
    measured(MODEL, (INPUTS, labels), loss).save(path)
    found = load(path).layout.options.engine.losses.choices[0]
    expected = next(iter(loss.values() if isinstance(loss, dict) else [*np.ravel(loss)]))
    assert (found.name, found.weight, found.find_logits) == (
        expected.name, expected.weight, expected.find_logits,
    )  # fmt: skip
    assert_arrays_equal(found.options, expected.options)


def test_options_of_losses_in_files_of_older_versions_are_read(tmp_path):
    path, old = tmp_path / "file", {"loss_weights": [2.0], "find_logits": False, "ignore_index": 7}
    measured(MODEL, (INPUTS, None), loss=ke.Categorical(ignore_index=7)).save(path)
    header, tensors = read(path)
    header["options"] |= {"loss": "categorical", **old}
    del header["checksum"]
    save_file(tensors, path, {"curvature": json.dumps(header)})
    (found,) = load(path).layout.options.engine.losses.choices
    assert (found.weight, found.find_logits, found.options) == (2.0, False, {"ignore_index": 7})


def read(path):
    with safe_open(str(path), framework="numpy") as file:
        header = json.loads(file.metadata()["curvature"])
        return header, {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118


def rewritten(path, change):
    """Change a file, and remove its checksum as in files of earlier versions."""
    header, arrays = read(path)
    del header["checksum"]
    change(header, arrays)
    save_file(arrays, path, {"curvature": json.dumps(header)})


def without(key):
    return lambda header, arrays: arrays.pop(key)


def set_array(key, array):
    return lambda header, arrays: arrays.update({key: array})


def set_header(name, value):
    return lambda header, arrays: header.update({name: value})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without("0/eigenvalues"), "eigenvalues of fc0.weight, fc0.bias are not valid"),
        (set_array("0/eigenvalues", -np.ones((1, 7, 5))), "not valid"),
        (
            set_array("1/left", np.eye(6)[None].astype("float32")),
            "'1/left' is not a finite float64",
        ),
        (set_array("1/left", np.eye(5)[None]), "shape \\(1, 6, 6\\)"),
        (set_array("2/right", np.full((1, 3, 3), np.nan)), "'2/right' is not a finite"),
        (set_header("format", 2), "not a curvature of format 1"),
        (set_header("about", {"examples": 0, "log_likelihood": None, "predictions": 3}), "not a c"),
        (set_header("about", {"examples": 5, "log_likelihood": None}), "not a curvature"),
        (set_header("positions", [1]), "it has 1 blocks, the model has 3"),
        (set_header("positions", ["a", 1, 1]), "not a curvature"),
        (set_header("options", {"loss": "categorical", "speed": 1}), "damaged: .*speed"),
        (set_header("options", {"loss": "categorical", "structure": "cube"}), "structure must be"),
        (set_header("weights", {}), "other weights"),
        (set_header("chexksum", "0"), "not a curvature"),
        (set_header("checksum", "00000000"), "damaged: its checksum is wrong"),
        (set_header("checksum", None), "damaged: its checksum is wrong"),
        (without("0/left"), "fc0.weight, fc0.bias have no eigenvectors"),
        (without("2/right"), "fc2.weight, fc2.bias have no eigenvectors"),
        (without("1/inputs"), "fc1.weight, fc1.bias have no eigenvectors"),
    ],
)
def test_damaged_files_are_refused(path, change, message):
    rewritten(path, change)
    with pytest.raises(ke.InputError, match=message):
        load(path)


def test_files_of_earlier_versions_are_read(path):
    before = dense(load(path), damping=0.1)
    rewritten(path, lambda header, arrays: None)
    np.testing.assert_array_equal(dense(load(path), damping=0.1), before)


@pytest.mark.parametrize("structure", ["kron", "diagonal", "full"])
def test_every_flipped_bit_and_missing_array_is_detected(path, structure):
    measured(MODEL, (INPUTS, LABELS), structure=structure).save(path)
    good, rng = path.read_bytes(), np.random.default_rng(0)
    header, arrays = read(path)
    for place in rng.integers(8, len(good), 60):
        data = bytearray(good)
        data[place] ^= 1 << int(rng.integers(8))
        path.write_bytes(data)
        with pytest.raises(ke.InputError):
            load(path)
    for name in arrays:
        rest = {key: array for key, array in arrays.items() if key != name}
        save_file(rest, path, {"curvature": json.dumps(header)})
        with pytest.raises(ke.InputError, match="checksum is wrong"):
            load(path)
    path.write_bytes(good)
    assert load(path).examples == 5


@pytest.mark.parametrize("content", [b"", b"no safetensors", b"\xff" * 64])
def test_other_files_are_refused(tmp_path, content):
    path = tmp_path / "file"
    path.write_bytes(content)
    with pytest.raises(ke.InputError, match="cannot read the curvature"):
        load(path)


@pytest.mark.parametrize(("dtype", "size"), [("BF16", 2), ("F8_E4M3", 1)])
def test_element_types_that_numpy_lacks_are_refused(tmp_path, dtype, size):
    text = json.dumps({"w": {"dtype": dtype, "shape": [1], "data_offsets": [0, size]}}).encode()
    path = tmp_path / "file"
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(size))
    with pytest.raises(ke.InputError, match=r"cannot read the curvature|not a curvature"):
        load(path)


def test_missing_and_truncated_files_are_refused(path, tmp_path):
    with pytest.raises(ke.InputError, match="no such file"):
        load(tmp_path / "absent")
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(ke.InputError, match="cannot read the curvature"):
        load(path)


def test_failed_save_leaves_the_old_file(path):
    before = path.read_bytes()
    with pytest.raises(ke.InputError):
        measured(MODEL, (INPUTS, None)).save(path / "below")
    assert path.read_bytes() == before
