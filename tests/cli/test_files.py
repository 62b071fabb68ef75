"""Arrays are read as NumPy wrote them; a broken or boasting file is refused in a sentence."""

import io

import numpy as np
import pytest
from safetensors.numpy import save_file

from kfac_engine.cli.precondition import read_gradients
from kfac_engine.datasets.files import opened_targets
from kfac_engine.errors import InputError, UnknownNameError
from kfac_engine.system.arrays import read_arrays

X = np.arange(6, dtype=np.float32).reshape(2, 3)


def npy_bytes(shape, data=b""):
    """A file of float32 that announces a shape, whatever it holds."""
    buffer = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        buffer, {"descr": "<f4", "fortran_order": False, "shape": shape}
    )
    return buffer.getvalue() + data


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed], ids=["plain", "compressed"])
def test_an_archive_gives_its_arrays_by_name(save, tmp_path):
    save(tmp_path / "x.npz", a=X, b=X.T)
    arrays = read_arrays(tmp_path / "x.npz")
    assert list(arrays) == ["a", "b"]
    np.testing.assert_array_equal(arrays["b"], X.T)


@pytest.mark.parametrize(
    "array",
    [X, np.asfortranarray(X), np.float64(3), np.zeros((0, 4)), np.arange(3) > 1],
    ids=["float32", "fortran", "scalar", "empty", "bool"],
)
def test_a_lone_array_comes_back_as_it_was(array, tmp_path):
    np.save(tmp_path / "x.npy", array)
    (read,) = read_arrays(tmp_path / "x.npy").values()
    np.testing.assert_array_equal(read, array)
    assert read.dtype == array.dtype


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


BROKEN = {
    "not arrays at all": b"hello world",
    "empty": b"",
    "cut header": npy_bytes((2, 3))[:20],
    "cut data": npy_bytes((2, 3), X.tobytes()[:-1]),
    "more than memory": npy_bytes((1 << 40, 1 << 10)),
    "size beyond 64 bits": npy_bytes((1 << 62, 1 << 62)),
    "unknown version": b"\x93NUMPY\x09\x00" + npy_bytes((2, 3), X.tobytes())[8:],
    "cut archive": b"PK\x03\x04" + bytes(40),
}


@pytest.mark.parametrize("content", BROKEN.values(), ids=BROKEN)
def test_a_broken_file_is_refused_by_name(content, tmp_path):
    path = tmp_path / "x.npz"
    path.write_bytes(content)
    with pytest.raises(InputError, match=r"cannot read .*x\.npz"):
        read_arrays(path)


def test_python_objects_are_never_unpickled(tmp_path):
    np.save(tmp_path / "x.npy", np.array([{}], dtype=object), allow_pickle=True)
    with pytest.raises(InputError, match="Python objects"):
        read_arrays(tmp_path / "x.npy")


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
