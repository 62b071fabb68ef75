"""Errors of a run name the example by its number in the data, not in the shuffled batch."""

import re

import numpy as np
import pytest

import kfac_engine as ke
from tests import models

MODEL = models.mlp()
X = models.random_inputs(MODEL, batch=60)
(NAME,) = X
Y = np.zeros(60, np.int64)
WRONG = 41


def spoiled(array, value):
    """A copy whose example ``WRONG`` alone is wrong."""
    copy = array.copy()
    copy[WRONG] = value
    return copy


LINEAR = models.linear()


def normal_data():
    inputs = models.random_inputs(LINEAR, batch=60)
    outputs = ke.Engine.from_onnx(LINEAR, loss="normal", threads=1).predict(inputs)
    return inputs, spoiled(outputs, np.nan)


# Data in which one example is wrong, and the loss.
DATA = {
    "class": (MODEL, lambda: (X, spoiled(Y, 99)), "categorical"),
    "input": (MODEL, lambda: ({NAME: spoiled(X[NAME], np.nan)}, Y), "categorical"),
    "number": (LINEAR, normal_data, "normal"),
    "binary target": (
        MODEL, lambda: (X, spoiled(np.zeros((60, 3), np.float32), 7)), "multi_bernoulli"),
}  # fmt: skip


def shards(data, folder):
    """The same data in three files of unequal sizes."""
    inputs, targets = data
    for number, rows in enumerate(np.split(np.arange(60), [13, 35])):
        arrays = {name: array[rows] for name, array in inputs.items()}
        np.savez(folder / f"{number}.npz", **arrays, targets=targets[rows])
    return folder


def train(model, data, loss, **options):
    ke.fit(model, data, loss=loss, epochs=2, batch_size=10, seed=3, **options)


def validate(model, data, loss):
    good = {n: np.nan_to_num(a) for n, a in data[0].items()}, np.zeros_like(data[1])
    train(model, good, loss, validation=data)


def run_of(form, folder):
    """What reads the data in one of the forms."""
    return {
        "shards": lambda model, data, loss: train(model, shards(data, folder), loss),
        "validation": validate,
        "split": lambda model, data, loss: train(model, data, loss, validation=0.3),
    }.get(form, train)


FORMS = ("arrays", "shards", "validation", "split")
CASES = [(name, form) for name in DATA for form in FORMS]


@pytest.mark.parametrize(("name", "form"), CASES)
def test_an_error_names_the_example_of_the_data(name, form, tmp_path):
    model, make, loss = DATA[name]
    data = make()
    with pytest.raises(ke.InputError, match=r"Example \d+ of the batch is") as failure:
        run_of(form, tmp_path)(model, data, loss)
    place, number = re.search(
        r"Example (\d+) of the batch is example (\d+) of the data\.$", str(failure.value)
    ).groups()
    assert int(number) == WRONG
    assert re.search(rf"example {place}\b|\({place}[,)]", str(failure.value))


def test_an_error_about_no_single_example_names_none():
    with pytest.raises(ke.InputError) as failure:
        train(MODEL, (X, Y.astype(float)), "categorical")
    assert "of the data" not in str(failure.value)
