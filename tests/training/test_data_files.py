"""Data in files: the same batches as in memory, in an order that the test computes itself."""

import io
import os
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from onnx import save as save_model

import kfac_engine as ke
from kfac_engine.training.batches import run_data
from tests.models import parsed
from tests.nightly import nightly_but
from tests.training import softmax_net as net

COUNTS = (7, 12, 3, 9)  # examples of the shards
SIZE, SEED = 5, 4


@pytest.fixture(scope="module")
def axes():
    return net.engine().example_axes


@pytest.fixture
def data():
    return net.batch(n=sum(COUNTS))


def parts(array):
    return np.split(array, np.cumsum(COUNTS)[:-1])


@pytest.fixture(params=["npz", "packed npz", "npy"])
def folder(request, data, tmp_path):
    """The data as a folder of shards."""
    place = tmp_path / "shards"
    place.mkdir()
    (place / "README.md").write_text("ignored")
    for i, (x, y) in enumerate(zip(*map(parts, data), strict=True)):
        if request.param == "npy":
            np.save(place / f"train-{i:02}.x.npy", x)
            np.save(place / f"train-{i:02}.targets.npy", y)
        else:
            save = np.savez if request.param == "npz" else np.savez_compressed
            save(place / f"train-{i:02}.npz", x=x, targets=y)
    return place


def shuffled(epoch):
    """The order of an epoch, of numbers of examples in the whole data set."""
    starts = np.cumsum((0, *COUNTS))
    shards = np.random.default_rng([SEED, epoch, len(COUNTS)]).permutation(len(COUNTS))
    return np.concatenate(
        [
            starts[shard] + np.random.default_rng([SEED, epoch, shard]).permutation(COUNTS[shard])
            for shard in shards
        ]
    )


def whole(steps):
    """The batches of steps of one part."""
    for (batch,) in steps:
        yield batch


def same_batches(left, right):
    left, right = list(left), list(right)
    assert len(left) == len(right)
    for (x, y), (other_x, other_y) in zip(left, right, strict=True):
        assert np.array_equal(x["x"], other_x["x"])
        assert np.array_equal(y, other_y)


def by_numbers(data, numbers, size=SIZE, rest=False):
    x, y = data
    stop = len(numbers) if rest else len(numbers) - size + 1
    for i in range(0, stop, size):
        yield {"x": x[numbers[i : i + size]]}, y[numbers[i : i + size]]


@pytest.mark.parametrize("epoch", [0, 3])
@pytest.mark.parametrize("start", [0, 2, 5])
def test_shards_are_shuffled_by_seed_and_epoch(folder, data, axes, epoch, start):
    batches = run_data(folder, None, axes, SIZE, SEED).train
    assert batches.per_epoch == sum(COUNTS) // SIZE
    expected = list(by_numbers(data, shuffled(epoch)))[start:]
    same_batches(whole(batches.steps(epoch, start)), expected)


def test_one_file_has_the_order_of_arrays_in_memory(data, axes, tmp_path):
    x, y = data
    np.savez(tmp_path / "d.npz", x=x, targets=y)
    np.save(tmp_path / "x.npy", x)
    np.save(tmp_path / "y.npy", y)
    forms = [
        tmp_path / "d.npz",
        str(tmp_path / "d.npz"),
        (tmp_path / "x.npy", str(tmp_path / "y.npy")),
        ({"x": tmp_path / "x.npy"}, y),
        {"x": tmp_path / "x.npy", "targets": y},
        {"x": x, "z": y},
        (x, y),
    ]
    order = np.random.default_rng([SEED, 2]).permutation(len(y))
    for form in forms:
        batches = run_data(form, None, axes, SIZE, SEED).train.steps(2)
        inputs = [(x, y["z"] if isinstance(y, dict) else y) for x, y in whole(batches)]
        same_batches(inputs, by_numbers(data, order))


def test_validation_files_are_read_in_their_order(folder, data, axes):
    batches = run_data(data, folder, axes, SIZE, SEED).validation
    for _ in range(2):  # once at the end of each epoch
        same_batches(batches, by_numbers(data, np.arange(sum(COUNTS)), rest=True))


@pytest.mark.parametrize("fraction", [0.1, 0.5, np.float32(0.9)])
def test_a_fraction_is_split_off_by_the_seed(folder, data, axes, fraction):
    held = np.random.default_rng(np.random.SeedSequence(SEED, spawn_key=(1,)))
    held = np.sort(held.permutation(sum(COUNTS))[: round(float(fraction) * sum(COUNTS))])
    sources = run_data(folder, fraction, axes, SIZE, SEED)
    same_batches(sources.validation, by_numbers(data, held, rest=True))
    # The other examples are those of an epoch, each once.
    batches = list(whole(sources.train.steps(0)))
    used = sum(COUNTS) - len(held)
    size = min(SIZE, used)
    assert [len(y) for _, y in batches] == [size] * (used // size)
    rows = np.concatenate([x["x"] for x, _ in batches])
    kept = np.delete(data[0], held, axis=0)
    assert len(np.unique(rows, axis=0)) == len(rows)
    assert all((row == kept).all(1).any() for row in rows)
    assert (
        any(
            not np.array_equal(x["x"], other["x"])
            for (x, _), (other, _) in zip(batches, whole(sources.train.steps(1)), strict=True)
        )
        or len(batches) == 1
    )


def test_a_run_on_shards_resumes_with_equal_bits(folder, tmp_path):
    class StopError(Exception):
        pass

    def stop(record, optimizer):
        if record["step"] == 9:
            raise StopError

    options = {"optimizer": "adam", "epochs": 3, "batch_size": SIZE, "seed": SEED}
    whole = ke.fit(net.engine(), folder, validation=0.2, **options)
    store = {"checkpoint": tmp_path / "run", "checkpoint_every": 4, "validation": 0.2}
    with pytest.raises(StopError):
        ke.fit(net.engine(), folder, callbacks=[stop], **store, **options)
    resumed = ke.fit(net.engine(), folder, resume=True, **store, **options)
    expected = whole.engine.parameters
    assert all(np.array_equal(v, expected[n]) for n, v in resumed.engine.parameters.items())
    losses = [[record["loss"] for record in history.records] for history in (whole, resumed)]
    assert losses[0] == losses[1]


# -- refusals --------------------------------------------------------------------------------------


def shard(**arrays):
    x, y = net.batch()
    return {"x": x, "targets": y} | arrays


@pytest.mark.parametrize(
    ("second", "message"),
    [
        (shard(x=net.batch()[0].astype("float32")), r"'x' is float32 \(n, 5\) in 'b.npz', but flo"),
        (shard(x=np.zeros((12, 6))), r"'x' is float64 \(n, 6\) in 'b.npz', but float64 \(n, 5\)"),
        (shard(more=np.zeros(12)), r"'more' is float64 \(12\) in 'b.npz', but absent in 'a.npz'"),
        ({"x": net.batch()[0]}, "'targets' is absent in 'b.npz', but int64"),
        (shard(targets=np.zeros(3, int)), r"b\.npz': the targets have shape \(3,\)"),
    ],
)
def test_shards_that_differ_are_refused(second, message, axes, tmp_path):
    np.savez(tmp_path / "a.npz", **shard())
    np.savez(tmp_path / "b.npz", **second)
    with pytest.raises(ke.InputError, match=message):
        run_data(tmp_path, None, axes, SIZE, SEED)


def test_a_shard_that_changes_during_the_run_is_refused(axes, tmp_path):
    for name in "ab":
        np.savez(tmp_path / f"{name}.npz", **shard())
    train = run_data(tmp_path, None, axes, SIZE, SEED).train
    x, y = net.batch(n=20)
    for name in "ab":
        np.savez(tmp_path / f"{name}.npz", x=x, targets=y)
    with pytest.raises(ke.InputError, match=r"the shard '.*' has changed since the run began"):
        list(train.steps(0))


def test_data_in_another_form_are_refused(axes, tmp_path):
    x, y = net.batch()
    np.save(tmp_path / "lone.npy", x)
    np.savez(tmp_path / "untargeted.npz", x=x)
    np.savez(tmp_path / "unnamed.npz", y=x, targets=y)
    empty, both, unknown, none = (tmp_path / name for name in ("empty", "both", "other", "none"))
    for place in (empty, both, unknown, none):
        place.mkdir()
    np.savez(both / "a.npz", x=x, targets=y)
    np.save(both / "a.x.npy", x)
    np.save(unknown / "a.image.npy", x)
    np.savez(none / "a.npz", x=x[:0], targets=y[:0])
    cases = {
        tmp_path / "missing.npz": "there is no such file",
        tmp_path / "lone.npy": "holds one array; give an .npz file with the inputs by name",
        tmp_path / "untargeted.npz": "no array is named 'targets' or 'z'",
        tmp_path / "unnamed.npz": "input 'x' is missing; the arrays are: 'y', 'targets'",
        empty: "has no .npz and no .npy file",
        both: "has shards of both kinds",
        unknown: r"must end with one of x.npy, targets.npy, weights.npy, z.npy",
        none: "the data have no examples",
    }
    for path, message in cases.items():
        with pytest.raises(ke.InputError, match=message):
            run_data(path, None, axes, SIZE, SEED)


@pytest.mark.parametrize("fraction", [0, 1, 1.5, -0.1, float("nan"), 0.001, 0.999])
def test_a_fraction_without_examples_is_refused(data, fraction, axes):
    with pytest.raises(ke.InputError, match=r"must lie in \(0, 1\)|leaves a part without|finite"):
        run_data(data, fraction, axes, SIZE, SEED)


def test_a_fraction_of_batches_is_refused(data, axes):
    with pytest.raises(ke.InputError, match="but data are batches; pass separate validation"):
        run_data([data], 0.1, axes, SIZE, SEED)


# -- loaders of frameworks -------------------------------------------------------------------------


class Tensor:
    """An array of another library, which shares its memory through DLPack only."""

    def __init__(self, array):
        self._array, self.shape = array, array.shape

    def __dlpack__(self, **options):
        return self._array.__dlpack__(**options)

    def __dlpack_device__(self):
        return self._array.__dlpack_device__()

    def __getitem__(self, index):
        return Tensor(self._array[index])


class Bfloat16(Tensor):
    def __dlpack__(self, **options):
        raise RuntimeError("Unsupported dtype in DLTensor.")


def test_a_tensor_of_a_type_that_numpy_lacks_is_refused(data, axes):
    x, y = data
    with pytest.raises(
        ke.InputError, match="Bfloat16 is not an array of numbers: Unsupported dtype"
    ):
        run_data((Bfloat16(x), y), None, axes, SIZE, SEED)


class Loader:
    """A loader that shuffles by its epoch, yields lists or dictionaries, and counts its batches."""

    def __init__(self, data, form, wrap):
        self._data, self._form, self._wrap, self._epoch = data, form, wrap, 0

    def set_epoch(self, epoch):
        self._epoch = epoch

    def __len__(self):
        return 3

    def __iter__(self):
        x, y = self._data
        for numbers in np.split(np.random.default_rng(self._epoch).permutation(12), 3):
            x_part, y_part = self._wrap(x[numbers]), self._wrap(y[numbers])
            yield self._form(x_part, y_part)


@pytest.mark.parametrize("wrap", [np.asarray, Tensor])
@pytest.mark.parametrize(
    "form", [lambda x, y: [x, y], lambda x, y: ({"x": x}, y), lambda x, y: {"x": x, "targets": y}]
)
@pytest.mark.parametrize("optimizer", ["sgd", "kfac"])
def test_the_loader_of_a_framework_is_taken_as_it_is(wrap, form, optimizer, tmp_path):
    x, y = net.batch()
    batches = [
        ({"x": x[numbers]}, y[numbers])
        for epoch in (0, 1)
        for numbers in np.split(np.random.default_rng(epoch).permutation(12), 3)
    ]
    options = {"optimizer": optimizer, "schedule": "constant"}
    expected = ke.fit(net.engine(), batches, epochs=1, **options).engine.parameters
    loader = Loader((x, y), form, wrap)
    history = ke.fit(net.engine(), loader, epochs=2, validation=loader, **options)
    assert all(np.array_equal(v, expected[n]) for n, v in history.engine.parameters.items())


# -- larger than memory ----------------------------------------------------------------------------

ROWS, FEATURES = 49_152, 1 << 14  # three gigabytes of float32

# A process that may allocate one gigabyte: each thread takes a stack of it. Pages of mapped files
# do not count for this limit, and the peak of the resident memory shows how many of them are read.
PROGRAM = r"""
import resource, sys
resource.setrlimit(resource.RLIMIT_DATA, (1 << 30, 1 << 30))
import kfac_engine as ke
from kfac_engine.engine.profiling import peak_bytes
engine = ke.Engine.from_onnx("model.onnx", loss="categorical", threads=1)
history = ke.fit(engine, sys.argv[1], optimizer="sgd", steps=10, batch_size=16)
print(len(history.records), peak_bytes() >> 20)
"""


def wide_model(path):
    weight = np.zeros((FEATURES, 2), np.float32)
    graph = f"net (float[n,{FEATURES}] x) => (float[n,2] z) {{ z = MatMul (x, w) }}"
    save_model(parsed(graph, {"w": weight}), path)


def sparse_npy(file):
    """Write an array of zeros that takes no space on the disk; return its bytes."""
    start = file.tell()
    header = {"descr": "<f4", "fortran_order": False, "shape": (ROWS, FEATURES)}
    np.lib.format.write_array_header_1_0(file, header)
    file.truncate(file.tell() + 4 * ROWS * FEATURES)
    return file.seek(0, 2) - start


def sparse_npz(path):
    """Write an archive of such an array and targets, without compression."""
    targets = io.BytesIO()
    np.save(targets, np.arange(ROWS) % 2)
    with path.open("wb") as file:
        entries = []
        for name in (b"x.npy", b"targets.npy"):
            offset = file.tell()
            file.seek(30 + len(name), 1)
            size = sparse_npy(file) if name == b"x.npy" else file.write(targets.getvalue())
            fields = struct.pack("<5H3L2H", 20, 0, 0, 0, 0, 0, size, size, len(name), 0)
            entries.append(b"PK\1\2\x14\0" + fields + bytes(10) + struct.pack("<L", offset) + name)
            end = file.tell()
            file.seek(offset)
            file.write(b"PK\3\4" + fields + name)
            file.seek(end)
        directory = b"".join(entries)
        file.write(directory + b"PK\5\6" + bytes(4))
        file.write(struct.pack("<2H2LH", 2, 2, len(directory), end, 0))


@pytest.mark.skipif(sys.platform != "linux", reason="limits memory as Linux does")
@pytest.mark.parametrize("form", nightly_but(["npz"], ["npz", "npy"]))
def test_data_larger_than_memory_are_not_read_whole(form, tmp_path):
    wide_model(tmp_path / "model.onnx")
    if form == "npz":
        sparse_npz(tmp_path / "data.npz")
        data = "data.npz"
    else:
        data = "folder"
        (tmp_path / data).mkdir()
        with (tmp_path / data / "x.npy").open("wb") as file:
            sparse_npy(file)
        np.save(tmp_path / data / "targets.npy", np.arange(ROWS) % 2)
    paths = {"PYTHONPATH": str(Path(__file__).parents[2])}
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM, data], cwd=tmp_path,
        env=os.environ | paths | {"OPENBLAS_NUM_THREADS": "1"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    steps, megabytes = map(int, ended.stdout.split())
    assert steps == 10
    # The process without data has less than 300 MB, and ten batches have 10 MB.
    assert megabytes < 800
