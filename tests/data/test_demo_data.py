"""The shipped data and models are what their sources say."""

import io
from pathlib import Path
from zipfile import ZipFile

import numpy as np
import onnx
import pytest
from onnx import numpy_helper
from onnx.reference import ReferenceEvaluator

from kfac_engine.data import MODELS, demo_model, digits
from scripts import make_demo_data

# Examples of each class in the test set, from the description at the UCI repository.
CLASS_COUNTS = (178, 182, 177, 183, 181, 182, 181, 179, 174, 180)


def test_digits_have_the_published_class_counts():
    _, labels = digits()
    assert tuple(np.bincount(labels)) == CLASS_COUNTS


def test_digits_are_sixteenths_between_zero_and_one():
    images, labels = digits()
    assert (images.shape, images.dtype, labels.dtype) == ((1797, 1, 8, 8), np.float32, np.int64)
    assert (images.min(), images.max()) == (0, 1)
    np.testing.assert_array_equal(images * 16, np.round(images * 16))


def test_digits_equal_those_of_scikit_learn():
    datasets = pytest.importorskip("sklearn.datasets", reason="scikit-learn carries the original")
    original = datasets.load_digits()
    images, labels = digits()
    np.testing.assert_array_equal(images[:, 0] * 16, original.images)
    np.testing.assert_array_equal(labels, original.target)


def test_digits_file_is_compressed_without_pickle():
    path = Path(make_demo_data.TARGET) / "digits.npz"
    with ZipFile(path) as archive:
        assert all(entry.compress_size < entry.file_size / 2 for entry in archive.infolist()[:1])
    with np.load(io.BytesIO(path.read_bytes()), allow_pickle=False) as stored:
        assert sorted(stored) == ["images", "labels"]


@pytest.mark.parametrize("name", MODELS)
def test_script_reproduces_shipped_models(name, tmp_path):
    make_demo_data.write_models(tmp_path)
    again, shipped = (
        onnx.load_from_string(data)
        for data in ((tmp_path / f"{name}.onnx").read_bytes(), demo_model(name))
    )
    for left, right in zip(again.graph.initializer, shipped.graph.initializer, strict=True):
        np.testing.assert_array_equal(numpy_helper.to_array(left), numpy_helper.to_array(right))
    for model in (again, shipped):
        model.producer_name = model.producer_version = ""
        del model.graph.initializer[:]
    assert again == shipped


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("batch", [1, 3])
def test_demo_models_map_any_batch_of_images_to_ten_logits(name, batch):
    images, _ = digits()
    (logits,) = ReferenceEvaluator(demo_model(name)).run(None, {"image": images[:batch]})
    assert logits.shape == (batch, 10)
    assert np.isfinite(logits).all()
