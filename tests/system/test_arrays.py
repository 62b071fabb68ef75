"""Arrays that are mapped have the values that NumPy reads, and damaged files are refused."""

import zipfile

import numpy as np
import pytest

import kfac_engine as ke
from kfac_engine.system.arrays import array_headers, map_arrays, read_arrays

RNG = np.random.default_rng(0)
ARRAYS = {
    "c": RNG.standard_normal((5, 3)).astype(np.float32),
    "f": np.asfortranarray(RNG.standard_normal((4, 6, 2))),
    "bytes": RNG.integers(0, 255, 7).astype(np.uint8),
    "bool": np.arange(3) > 1,
    "scalar": np.float64(3.5) + np.zeros(()),
    "empty": np.zeros((0, 3), np.float32),
    "big": np.arange(6, dtype=">i4").reshape(2, 3),
}


def equal(left, right):
    return left.dtype == right.dtype and np.array_equal(left, right)


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
@pytest.mark.parametrize("open_arrays", [map_arrays, read_arrays])
def test_archive_arrays_equal_numpy(save, open_arrays, tmp_path):
    path = tmp_path / "x.npz"
    save(path, **ARRAYS)
    arrays = open_arrays(path)
    assert list(arrays) == list(ARRAYS)
    assert all(equal(arrays[name], array) for name, array in ARRAYS.items())


@pytest.mark.parametrize("open_arrays", [map_arrays, read_arrays])
@pytest.mark.parametrize("name", ARRAYS)
def test_npy_array_equals_numpy(name, open_arrays, tmp_path):
    path = tmp_path / "x.npy"
    np.save(path, ARRAYS[name])
    ((key, array),) = open_arrays(path).items()
    assert key is None
    assert equal(array, ARRAYS[name])
    assert array_headers(path)[None].shape == ARRAYS[name].shape


@pytest.mark.parametrize(
    ("save", "mapped"), [(np.savez, True), (np.savez_compressed, False)], ids=["stored", "packed"]
)
def test_only_uncompressed_members_are_mapped(save, mapped, tmp_path):
    path = tmp_path / "x.npz"
    save(path, x=ARRAYS["c"])
    array = map_arrays(path)["x"]
    assert isinstance(array, np.memmap) == mapped
    # A mapped array shows what another program writes into the file.
    content = path.read_bytes()
    place = content.find(ARRAYS["c"].tobytes()) if mapped else 0
    with path.open("r+b") as file:
        file.seek(place)
        file.write(np.float32(42).tobytes())
    assert (array[0, 0] == 42) == mapped
    if mapped:
        with pytest.raises(ValueError, match="read-only"):
            array[0, 0] = 1


def test_archive_with_prefix_and_extra_field_is_read(tmp_path):
    path = tmp_path / "x.npz"
    path.write_bytes(b"#!/bin/sh\n")
    with zipfile.ZipFile(path, "a") as archive:
        entry = zipfile.ZipInfo("x.npy")
        entry.extra = b"\xfe\xca\x04\x00abcd"
        with archive.open(entry, "w") as file:
            np.lib.format.write_array(file, ARRAYS["c"])
    with zipfile.ZipFile(path) as archive:
        assert archive.infolist()[0].extra
    array = map_arrays(path)["x"]
    assert isinstance(array, np.memmap)
    assert equal(array, ARRAYS["c"])


def damaged(folder, change):
    """An archive of one array with changed bytes."""
    path = folder / "x.npz"
    np.savez(path, x=ARRAYS["c"])
    data = bytearray(path.read_bytes())
    change(data)
    path.write_bytes(data)
    return path


def _longer_name(data):
    data[26:28] = b"\xff\xff"  # the local header announces a name of 65535 bytes


def _no_signature(data):
    data[:4] = b"PK\x07\x07"


def _more_rows(data):
    place = data.index(b"(5, 3)")
    data[place : place + 6] = b"(9, 3)"


def _objects(data):
    place = data.index(b"'<f4'")
    data[place : place + 5] = b"'|O' "


@pytest.mark.parametrize("change", [_longer_name, _no_signature, _more_rows, _objects])
@pytest.mark.parametrize("open_arrays", [map_arrays, array_headers])
def test_damaged_archive_raises_error(change, open_arrays, tmp_path):
    path = damaged(tmp_path, change)
    with pytest.raises(ke.InputError, match=r"cannot read '.*x\.npz'"):
        open_arrays(path)


def test_missing_file_and_folder_raise_error(tmp_path):
    with pytest.raises(ke.InputError, match="there is no such file"):
        map_arrays(tmp_path / "x.npz")
    with pytest.raises(ke.InputError, match="it is a folder"):
        map_arrays(tmp_path)


def test_compressed_arrays_above_memory_raise_error(tmp_path, monkeypatch):
    from kfac_engine.system import arrays

    np.savez_compressed(tmp_path / "packed.npz", x=np.zeros(1 << 20, np.uint8))
    np.savez(tmp_path / "stored.npz", x=np.zeros(1 << 20, np.uint8))
    monkeypatch.setattr(arrays, "available_memory", lambda: 1 << 19)
    with pytest.raises(ke.InputError, match="its arrays need"):
        map_arrays(tmp_path / "packed.npz")
    assert map_arrays(tmp_path / "stored.npz")["x"].size == 1 << 20
