"""Files are written whole or not at all, where the path leads, with the permissions they had."""

import os
import stat
import sys
import time
from pathlib import Path
from threading import Barrier, Thread

import numpy as np
import pytest

import kfac_engine as ke
from kfac_engine.graph.files import ModelFiles, write_model
from kfac_engine.system import writing
from kfac_engine.system.writing import abandon_files, check_outputs, write_file
from tests import models
from tests.unprivileged import unprivileged

posix = pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such files")


def leftover(folder, age):
    path = folder / ".kfac-engine-0123456789abcdef.tmp"
    path.write_bytes(b"half")
    os.utime(path, (time.time() - age, time.time() - age))
    return path


@posix
def test_write_follows_symbolic_link(tmp_path):
    (tmp_path / "far").mkdir()
    target, link = tmp_path / "far" / "state", tmp_path / "state"
    link.symlink_to("far/state")
    for content in (b"new", b"newer"):  # first a link to nothing
        write_file(link, [content])
        assert link.is_symlink()
        assert target.read_bytes() == content
        assert not target.is_symlink()
    assert {path.name for path in tmp_path.iterdir()} == {"far", "state"}


@posix
def test_write_to_pipe_keeps_pipe(tmp_path):
    pipe, got = tmp_path / "pipe", []
    os.mkfifo(pipe)
    reader = Thread(target=lambda: got.append(pipe.read_bytes()))
    reader.start()
    write_file(pipe, [b"one ", memoryview(b"two")])
    reader.join()
    assert got == [b"one two"]
    assert stat.S_ISFIFO(pipe.stat().st_mode)


@posix
def test_write_to_null_device_keeps_device():
    write_file(os.devnull, [b"nothing"])
    assert stat.S_ISCHR(Path(os.devnull).stat().st_mode)


@posix
@pytest.mark.parametrize("mode", [0o600, 0o640, 0o755])
def test_existing_file_keeps_permissions_and_owner(tmp_path, mode):
    path = tmp_path / "state"
    path.write_bytes(b"old")
    path.chmod(mode)
    before = path.stat()
    write_file(path, [b"new"])
    after = path.stat()
    assert path.read_bytes() == b"new"
    assert (after.st_mode, after.st_uid, after.st_gid) == (
        before.st_mode,
        before.st_uid,
        before.st_gid,
    )


@posix
@pytest.mark.parametrize("mask", [0o022, 0o077])
def test_new_file_has_default_permissions(tmp_path, mask):
    old = os.umask(mask)
    try:
        write_file(tmp_path / "ours", [b"new"])
        (tmp_path / "pythons").write_bytes(b"new")
    finally:
        os.umask(old)
    modes = {(tmp_path / name).stat().st_mode for name in ("ours", "pythons")}
    assert len(modes) == 1


def test_write_protected_file_is_unchanged(tmp_path, monkeypatch):
    path = tmp_path / "state"
    path.write_bytes(b"old")
    monkeypatch.setattr(os, "access", lambda *_, **__: False)  # root may write all
    with pytest.raises(ke.InputError, match="write-protected"):
        write_file(path, [b"new"])
    assert path.read_bytes() == b"old"


@pytest.mark.parametrize("path", ["", ".", "a\0b", None], ids=repr)
def test_non_file_path_raises_error(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ke.InputError, match="cannot write"):
        write_file(path, [b"new"])
    assert not list(tmp_path.iterdir())


def test_longest_file_name_is_written(tmp_path):
    path = tmp_path / ("x" * 255)
    write_file(path, [b"new"])
    assert path.read_bytes() == b"new"


def test_concurrent_writes_to_one_path_succeed(tmp_path):
    path, failures, start = tmp_path / "state", [], Barrier(8)
    contents = [bytes([i]) * 100_000 for i in range(8)]

    def write(content):
        start.wait()
        for _ in range(10):
            try:
                write_file(path, [content])
            except Exception as failure:
                failures.append(failure)

    threads = [Thread(target=write, args=(content,)) for content in contents]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert path.read_bytes() in contents
    assert list(tmp_path.iterdir()) == [path]


def test_failed_write_keeps_old_file(tmp_path):
    path = tmp_path / "state"
    path.write_bytes(b"old")

    def chunks():
        yield b"half"
        raise RuntimeError

    with pytest.raises(RuntimeError):
        write_file(path, chunks())
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(("age", "stays"), [(10, True), (7200, False)])
def test_stale_temporary_files_are_removed(tmp_path, age, stays):
    old = leftover(tmp_path, age)
    write_file(tmp_path / "state", [b"new"])
    assert old.exists() == stays


@posix
def test_locked_temporary_file_is_not_removed(tmp_path):
    import fcntl

    old = leftover(tmp_path, 7200)
    with old.open("rb+") as locked:
        fcntl.flock(locked, fcntl.LOCK_EX)
        write_file(tmp_path / "state", [b"new"])
        assert old.exists()


def test_abandon_files_removes_and_prevents_temporary_files(tmp_path, monkeypatch):
    class Lock:
        locked = False

        def acquire(self, timeout):
            self.locked = True

        def __enter__(self):
            assert not self.locked, "another file was created"

        def __exit__(self, *_):
            pass

    monkeypatch.setattr(writing, "_CREATION", Lock())

    def chunks():
        yield b"half"
        assert len(list(tmp_path.iterdir())) == 1
        abandon_files()
        assert not list(tmp_path.iterdir())

    with pytest.raises(ke.InputError, match="cannot write"):
        write_file(tmp_path / "state", chunks())
    with pytest.raises(AssertionError, match="another file was created"):
        write_file(tmp_path / "state", [b"new"])


SAME = {
    "one path": (lambda a, b: (a, a)),
    "two spellings": (lambda a, b: (a, a.parent / "x" / ".." / a.name)),
    "a symbolic link": (lambda a, b: (b.symlink_to(a), (a, b))[1]),
    "a hard link": (lambda a, b: (os.link(a, b), (a, b))[1]),
}


@posix
@pytest.mark.parametrize("make", SAME.values(), ids=SAME)
def test_output_equal_to_input_raises_error(tmp_path, make):
    (tmp_path / "x").mkdir()
    (tmp_path / "a").write_bytes(b"")
    read, written = make(tmp_path / "a", tmp_path / "b")
    with pytest.raises(ke.InputError, match=r"-o '.*' would overwrite the file of --inputs"):
        check_outputs({"-o": written}, {"--inputs": read})


@pytest.mark.parametrize("make", SAME.values(), ids=SAME)
@posix
def test_output_in_a_folder_of_inputs_raises_error(tmp_path, make):
    (tmp_path / "x").mkdir()
    (tmp_path / "a").write_bytes(b"")
    read, written = make(tmp_path / "a", tmp_path / "b")
    if read.parent == written.parent:  # the folder of the inputs has one of the two names only
        (tmp_path / "data").mkdir()
        (tmp_path / "data" / "0.npz").symlink_to(read)
    folder = tmp_path / "data" if (tmp_path / "data").exists() else tmp_path
    with pytest.raises(ke.InputError, match=r"-o '.*' would overwrite the file of --data"):
        check_outputs({"-o": written}, {"--data": [tmp_path / "none", folder]})
    check_outputs({"-o": folder / "new.npz"}, {"--data": folder})


def test_new_outputs_with_different_names_are_distinct(tmp_path):
    check_outputs({"-o": tmp_path / "a", "--state": tmp_path / "b"}, {"--inputs": None})
    with pytest.raises(ke.InputError, match=r"--state .* would overwrite the file of -o"):
        check_outputs({"-o": tmp_path / "a", "--state": tmp_path / "a"})


# -- outputs that cannot be written ----------------------------------------------------------------


def dangling(folder):
    (folder / "link").symlink_to(folder / "none" / "file")
    return folder / "link"


def loop(folder):
    (folder / "one").symlink_to(folder / "other")
    (folder / "other").symlink_to(folder / "one")
    return folder / "one"


def below_a_file(folder):
    (folder / "file").write_bytes(b"old")
    return folder / "file" / "out"


def closed_folder(folder):
    (folder / "closed").mkdir(mode=0o500)
    return folder / "closed" / "out"


def unreachable(folder):
    (folder / "closed").mkdir(mode=0o000)
    return folder / "closed" / "out"


def protected(folder):
    (folder / "file").write_bytes(b"old")
    (folder / "file").chmod(0o400)
    return folder / "file"


# Refused to everybody, and to everybody but the administrator.
NOWHERE = {
    "missing folder": lambda folder: folder / "none" / "out",
    "folder": lambda folder: folder,
    "below a file": below_a_file,
    "dangling link": dangling,
    "loop of links": loop,
    "long name": lambda folder: folder / ("x" * 300),
    "zero byte": lambda folder: folder / "x\0y",
    "/proc": lambda _: Path("/proc/out.onnx"),
    "file of /proc": lambda _: Path("/proc/version"),
    "/sys": lambda _: Path("/sys/out.onnx"),
}
PROTECTED = {
    "closed folder": closed_folder, "unreachable folder": unreachable, "protected file": protected,
}  # fmt: skip


def refused(path):
    """Check that an output is refused, by a rehearsal that leaves nothing."""
    present = sorted(path.parent.glob("*"))
    with pytest.raises(ke.InputError, match=r"-o '.*' cannot be written: .*name "):
        check_outputs({"-o": path})
    assert present == sorted(path.parent.glob("*"))


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="has no /proc and /sys")
@pytest.mark.parametrize("make", NOWHERE.values(), ids=NOWHERE)
def test_an_output_that_nobody_can_write_is_refused(tmp_path, make):
    path = make(tmp_path)
    refused(path)
    with pytest.raises((ke.InputError, OSError)):  # as the writing itself finds
        write_file(path, [b"new"])


@posix
@pytest.mark.parametrize("make", PROTECTED.values(), ids=PROTECTED)
def test_an_output_without_permission_is_refused(make):
    with unprivileged() as folder:
        path = make(folder)
        with pytest.raises(
            ke.InputError, match=r"-o '.*' cannot be written: .*; name another file"
        ):
            check_outputs({"-o": path})


@posix
def test_an_output_that_can_be_written_is_not_touched_by_the_check(tmp_path):
    (tmp_path / "old").write_bytes(b"old")
    (tmp_path / "link").symlink_to(tmp_path / "new")  # dangling, to a folder that exists
    before = (tmp_path / "old").stat()
    names = {"-o": "old", "--log": "link", "--report": "other"}
    check_outputs({name: tmp_path / path for name, path in names.items()})
    assert (tmp_path / "old").stat() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "old"]


@posix
def test_a_file_that_is_appended_to_needs_no_permission_for_its_folder():
    with unprivileged() as folder:
        (folder / "log").write_bytes(b"old")
        folder.chmod(0o500)
        check_outputs({"--log": folder / "log"}, appended=("--log",))
        with pytest.raises(ke.InputError, match="Permission denied"):
            check_outputs({"--log": folder / "log"})


@posix
def test_device_may_be_several_outputs():
    null = Path(os.devnull)
    check_outputs({"-o": null, "--state": null}, {"--targets": null})


@posix
def test_two_file_model_to_device_raises_error(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    files = ModelFiles(b"message", "pipe.data", (np.ones(3),))
    with pytest.raises(ke.InputError, match="two files"):
        write_model(tmp_path / "pipe", files)
    assert [path.name for path in tmp_path.iterdir()] == ["pipe"]


def test_equal_states_have_equal_aligned_bytes(tmp_path):
    engine = ke.Engine.from_onnx(models.mlp(), loss="categorical", threads=1)
    engine.step(models.random_inputs(models.mlp(), 4), np.array([0, 2, 1, 1]))
    for name in "abcd":  # four keys come in one of 24 orders
        engine.save(tmp_path / name)
    assert len({(tmp_path / name).read_bytes() for name in "abcd"}) == 1
    data = (tmp_path / "a").read_bytes()
    assert int.from_bytes(data[:8], "little") % 8 == 0
    other = ke.Engine.from_onnx(models.mlp(), loss="categorical", threads=1)
    other.load(tmp_path / "a")
    other.save(tmp_path / "e")
    assert (tmp_path / "e").read_bytes() == data
