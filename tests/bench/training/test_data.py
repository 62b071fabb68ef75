"""The data of the suite ``train``."""

import gzip
import struct

import numpy as np
import pytest

from kfac_engine.bench.training import data
from kfac_engine.bench.training.data import TABLES, read_idx


def idx(path, array, *, magic=b"\0\0\x08", tail=b""):
    header = magic + bytes([array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape)
    with gzip.open(path, "wb") as file:
        file.write(header + array.tobytes() + tail)
    return path


PIXELS = np.arange(24, dtype=np.uint8).reshape(2, 3, 4)


def test_a_file_of_images_is_read(tmp_path):
    path = idx(tmp_path / "x.gz", PIXELS)
    np.testing.assert_array_equal(read_idx(path, (2, 3, 4)), PIXELS)


def test_batches_of_an_epoch_contain_each_example_once():
    x = np.arange(10.0)
    examples = data.Data(x, 10 * x, x, x)
    batches = examples.batches(3, 0)
    epochs = [[next(batches) for _ in range(3)] for _ in range(2)]
    for epoch in epochs:
        drawn = np.concatenate([inputs["x"] for inputs, _ in epoch])
        assert len(set(drawn)) == 9
        np.testing.assert_array_equal(np.concatenate([y for _, y in epoch]), 10 * drawn)
    first, second = ([inputs["x"].tolist() for inputs, _ in epoch] for epoch in epochs)
    assert first != second
    again = examples.batches(3, 0)
    assert [next(again)[0]["x"].tolist() for _ in range(3)] == first
    other = examples.batches(3, 1)
    assert [next(other)[0]["x"].tolist() for _ in range(3)] != first


def test_validation_examples_are_not_trained_on():
    images = data.load_digits()
    rows = {row.tobytes() for row in data.classified(images, (64,)).x}
    held = data.classified(images, (64,), 300).held_x
    assert len(held) == 300
    # No two of the digits are equal.
    assert not rows & {row.tobytes() for row in held}


def test_targets_of_a_text_are_the_next_characters(tmp_path, monkeypatch):
    content = "def f(x):\n    return x\n" * 1000
    (tmp_path / "a.py").write_text("\t" + content + "é")
    monkeypatch.setattr(data, "_LICENCES", tmp_path / "none")
    monkeypatch.setattr(data.os, "__file__", str(tmp_path / "os.py"))
    data.load_text.cache_clear()
    try:
        symbols = data.load_text().symbols
        examples = data.next_characters()
    finally:
        data.load_text.cache_clear()
    assert "".join("\n" if s == 0 else chr(s + 31) for s in symbols) == content
    assert len(examples.held_x) == 300
    assert len(examples.x) == (len(content) - 1) // 64 - 300
    np.testing.assert_array_equal(examples.x[:, 1:], examples.y[:, :-1])
    pairs = {(content[i], content[i + 1]) for i in range(len(content) - 1)}
    last = np.stack([examples.x[:, -1], examples.y[:, -1]], axis=1)
    assert {tuple("\n" if s == 0 else chr(s + 31) for s in pair) for pair in last} <= pairs


@pytest.mark.parametrize("name", TABLES)
def test_a_table_is_divided_into_rows_to_train_on_and_to_validate_on(name):
    pytest.importorskip("sklearn")
    table = TABLES[name]
    x, y = table.read()
    raw, standard = table.data(raw=True), table.data(raw=False)
    assert raw.x.shape == (int(0.8 * len(x)), table.columns)
    assert len(raw.x) + len(raw.held_x) == len(x)
    # Each row once, with its own target.
    rows = np.concatenate([raw.x, raw.held_x])
    targets = np.concatenate([raw.y, raw.held_y])
    order = np.lexsort(np.c_[rows, targets].T)
    expected = np.lexsort(np.c_[x.astype(np.float32), y.astype(targets.dtype)].T)
    np.testing.assert_array_equal(rows[order], x[expected].astype(np.float32))
    np.testing.assert_array_equal(targets[order], y[expected].astype(targets.dtype))
    both = np.concatenate([standard.x, standard.held_x]).astype(float)
    np.testing.assert_allclose(both.mean(axis=0), 0, atol=1e-5)
    assert np.all((abs(both.std(axis=0) - 1) < 1e-5) | (both.std(axis=0) == 0))
    if table.classes:
        assert set(targets) == set(range(table.outputs))
    else:
        assert np.concatenate([standard.y, standard.held_y]).std() == pytest.approx(1, rel=1e-5)
