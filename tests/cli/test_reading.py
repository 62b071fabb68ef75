"""What is no array, no file, or larger than memory is refused before it is read."""

import io
import os
import socket
import subprocess
import sys
import zipfile
from pathlib import Path
from threading import Thread

import numpy as np
import onnx
import pytest

import kfac_engine as ke
from kfac_engine.cli.precondition import read_gradients
from kfac_engine.graph.load import read_model
from kfac_engine.system import arrays, reading
from kfac_engine.system.arrays import read_arrays
from tests import models

posix = pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such files")
ARRAY = np.arange(12, dtype=np.float32).reshape(3, 4)


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def npy(array=ARRAY):
    stream = io.BytesIO()
    np.save(stream, array)
    return stream.getvalue()


def announcing(shape):
    """A file of float32 whose header announces a shape."""
    return npy().replace(b"(3, 4), }" + b" " * 50, f"{shape}, }}".ljust(59).encode())


def npz(**options):
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", **options) as archive:
        archive.writestr("x.npy", npy())
    return bytearray(stream.getvalue())


def marked(*places):
    """An archive with two-byte fields changed: place after the start of its headers, and value."""
    data = npz()
    entry = data.index(b"PK\x01\x02")
    for local, central, value in places:
        data[local : local + 2] = data[entry + central : entry + central + 2] = value.to_bytes(
            2, "little"
        )
    return bytes(data)


DAMAGED = {
    "encrypted": marked((6, 8, 1)),
    "unknown compression": marked((8, 10, 99)),
    "unknown format version": marked((4, 6, 99)),
    "header without its end": npy().replace(b"}", b" "),
    "header that is no dictionary": npy().replace(b"{'descr': '<f4'", b"['descr', '<f4'"),
    "header of deep brackets": npy().replace(b"{'descr': '<f4', 'fortran_order'", b"(" * 32),
    "shape that is text": npy().replace(b"(3, 4)", b"'3, 4'"),
    "negative length": npy().replace(b"(3, 4)", b"(3,-4)"),
    "length minus one": npy().replace(b"(3, 4)", b"(3,-1)"),
    "type that does not exist": npy().replace(b"'<f4'", b"'<q7'"),
    "more than memory": announcing((1 << 40, 1 << 10)),
    "size beyond 64 bits": announcing((1 << 62, 1 << 62)),
    "unknown version": npy().replace(b"NUMPY\x01", b"NUMPY\x09"),
    "Python objects": npy(np.array([{}], dtype=object)),
    "cut": npy()[:-3],
    "cut header": npy()[:20],
    "cut archive": bytes(npz()[:-30]),
    "nothing": b"",
    "text": b"not arrays",
}


@pytest.mark.parametrize("data", DAMAGED.values(), ids=DAMAGED)
def test_damaged_arrays_are_one_clear_error(data):
    Path("x").write_bytes(data)
    with pytest.raises(ke.InputError, match="cannot read 'x': "):
        read_arrays(Path("x"))


@posix
@pytest.mark.parametrize("form", [npy, npz], ids=["npy", "npz"])
def test_arrays_come_through_a_pipe(form):
    os.mkfifo("pipe")
    writer = Thread(target=Path("pipe").write_bytes, args=(form(),))
    writer.start()
    ((_, array),) = read_arrays(Path("pipe")).items()
    writer.join()
    np.testing.assert_array_equal(array, ARRAY)


@posix
@pytest.mark.parametrize("start", [b"y\n", b"\x93NUMPY"], ids=["text", "an array's beginning"])
def test_an_endless_pipe_is_read_no_further_than_the_bound(start, monkeypatch):
    monkeypatch.setattr(arrays, "available_memory", lambda: 30 << 20)
    os.mkfifo("pipe")
    code = f"f = open('pipe', 'wb')\nf.write({start!r})\nwhile True: f.write(bytes(1 << 16))"
    with subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL) as writer:
        with pytest.raises(ke.InputError, match="cannot read 'pipe'"):
            read_arrays(Path("pipe"))
        assert writer.wait() != 0  # nobody read the rest


READERS = {
    "arrays": (read_arrays, {"pipe", "socket"}),
    "gradients": (lambda path: read_gradients(path, {}), set()),
    "model": (read_model, set()),
    "state": (lambda path: engine().load(path), set()),
}
NOT_FILES = {
    "endless device": lambda path: path.symlink_to("/dev/zero"),
    "folder": Path.mkdir,
    "pipe": lambda path: os.mkfifo(path),
    "socket": lambda path: socket.socket(socket.AF_UNIX).bind(str(path)),
    "link to itself": lambda path: path.symlink_to(path.name),
    "nothing": lambda path: None,
}


def engine():
    return ke.Engine.from_onnx(models.mlp(), loss="categorical", threads=1)


@posix
@pytest.mark.filterwarnings("ignore::ResourceWarning")  # the socket's owner is gone
@pytest.mark.parametrize(("read", "allowed"), READERS.values(), ids=READERS)
@pytest.mark.parametrize(("kind", "make"), NOT_FILES.items(), ids=NOT_FILES)
def test_what_is_no_file_is_refused_without_reading(kind, make, read, allowed):
    if kind in allowed:
        pytest.skip("may be read")
    make(Path("x"))
    with pytest.raises(ke.InputError, match="'x'"):
        read(Path("x"))


@pytest.mark.parametrize("read", [entry[0] for entry in READERS.values()], ids=READERS)
def test_a_file_larger_than_the_free_memory_is_refused_without_reading(read, monkeypatch):
    with Path("x").open("wb") as file:
        file.truncate(50 << 20)  # takes no room
    monkeypatch.setattr(reading, "available_memory", lambda: 40 << 20)
    with pytest.raises(ke.InputError, match=r"'x': it has 52428800 bytes, but only 41943040 "):
        read(Path("x"))


def test_an_archive_that_unpacks_to_more_than_the_free_memory_is_refused(monkeypatch):
    with zipfile.ZipFile("x", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a.npy", npy(np.zeros(1 << 20)))
    assert Path("x").stat().st_size < 100_000
    monkeypatch.setattr(arrays, "available_memory", lambda: 1 << 20)
    with pytest.raises(ke.InputError, match=r"its arrays need 83\d+ bytes"):
        read_arrays(Path("x"))


def test_a_model_in_a_folder_of_its_name_is_explained():
    Path("m.onnx").mkdir()
    onnx.save(models.mlp(), "m.onnx/model.onnx")
    with pytest.raises(ke.ModelError, match="it is a folder, not a regular file"):
        read_model("m.onnx")
