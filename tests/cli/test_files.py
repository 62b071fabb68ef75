"""Targets and gradients in files are found by their names."""

import numpy as np
import pytest
from safetensors.numpy import save_file

from kfac_engine.cli.precondition import read_gradients
from kfac_engine.datasets.files import opened_targets
from kfac_engine.errors import InputError, UnknownNameError

X = np.arange(6, dtype=np.float32).reshape(2, 3)


@pytest.mark.parametrize(
    "arrays", [{"targets": X, "other": X}, {"y": X}], ids=["by name", "the only one"]
)
def test_targets_are_found(arrays, tmp_path):
    np.savez(tmp_path / "y.npz", **arrays)
    np.testing.assert_array_equal(opened_targets(tmp_path / "y.npz", ["z"]), X)


def test_two_arrays_without_one_named_targets_are_refused(tmp_path):
    np.savez(tmp_path / "y.npz", a=X, b=X)
    with pytest.raises(InputError, match=r"y\.npz.*one named 'targets', .*; it holds 'a', 'b'"):
        opened_targets(tmp_path / "y.npz", ["z"])


def test_gradients_are_read_with_or_without_prefix_and_natural_ones_passed_over(tmp_path):
    save_file({"gradient/w": X, "b": X[0], "natural_gradient/w": -X}, tmp_path / "g.safetensors")
    gradients = read_gradients(tmp_path / "g.safetensors", {"w": X, "b": X[0]})
    assert sorted(gradients) == ["b", "w"]
    np.testing.assert_array_equal(gradients["w"], X)


def test_a_gradient_of_nothing_known_is_refused(tmp_path):
    save_file({"gradient/v": X}, tmp_path / "g.safetensors")
    with pytest.raises(UnknownNameError, match=r"'gradient/v'.*they are: w"):
        read_gradients(tmp_path / "g.safetensors", {"w": X})


@pytest.mark.parametrize("content", [b"", b"hello world, this is no tensor file"])
def test_a_broken_tensor_file_is_refused(content, tmp_path):
    (tmp_path / "g.safetensors").write_bytes(content)
    with pytest.raises(InputError, match=r"g\.safetensors.* as safetensors"):
        read_gradients(tmp_path / "g.safetensors", {"w": X})
