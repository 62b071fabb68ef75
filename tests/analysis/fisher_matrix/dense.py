"""Dense matrices of curvatures, and of the oracle, in one order of the parameters."""

from functools import partial
from unittest import mock

import numpy as np

import kfac_engine as ke
from kfac_engine.backend.cpu.backend import SCRATCH_BYTES
from kfac_engine.engine import build
from tests import models, oracle

# float64 through ONNX Runtime, one eigendecomposition and matrix products, relative to the largest
# entry. The finite differences of the oracle are good to 1e-11.
DOUBLE = 1e-10
# float32 activations and averages.
SINGLE = 1e-4

STRUCTURES = ("kron", "ekfac", "diagonal", "full")
# Models with the output "output" that any structure can measure, and their tolerances.
MODELS = {
    "mlp": (lambda: models.mlp((4, 3, 3), dtype="float64"), DOUBLE),
    "tokens": (lambda: models.token_mlp(tokens=2, widths=(2, 3, 2), dtype="float64"), DOUBLE),
    "tied": (lambda: models.tied(dtype="float64"), DOUBLE),
    "layer_norm": (models.layer_norm, SINGLE),
    "embedding": (models.embedding, SINGLE),
    "tied_table": (models.tied_table, SINGLE),
    "conv": (lambda: models.conv_linear(side=3, kernel=2, pads=0), SINGLE),
}


def example(row, n):
    """A row of ``MODELS`` as model and tolerance, with random inputs, outputs and labels."""
    make, tolerance = row
    model = make()
    inputs = models.random_inputs(model, batch=n)
    output = oracle.evaluate(model, inputs, "output")[0]
    labels = np.random.default_rng(2).integers(0, output.shape[-1], output.shape[:-1])
    return model, tolerance, inputs, output, labels


def dense(curvature, *, power=1.0, damping=0.0):
    """``(F + λI)^power``, from products with all unit vectors."""
    sizes = {name: value.size for name, value in curvature.model.parameters.items()}
    columns = np.split(np.eye(sum(sizes.values())), np.cumsum([*sizes.values()])[:-1], axis=1)
    vectors = {
        name: column.reshape(-1, *curvature.model.parameters[name].shape)
        for name, column in zip(sizes, columns, strict=True)
    }
    products = curvature.multiply(vectors, power=power, damping=damping)
    return np.hstack([products[name].reshape(len(columns[0]), -1) for name in sizes])


def within(matrix, curvature, *groups):
    """``matrix`` with zeros outside the diagonal blocks of groups of parameters."""
    names = list(curvature.model.parameters)
    number = {name: i for i, group in enumerate(groups) for name in group}
    assert number.keys() == set(names)
    of_entry = np.concatenate(
        [np.full(curvature.model.parameters[name].size, number[name]) for name in names]
    )
    return np.where(of_entry[:, None] == of_entry, matrix, 0.0)


def exact_fisher(curvature, model, inputs, loss, targets=None, **options):
    """The dense Fisher matrix of the oracle, or the empirical one where targets are given."""
    names = list(curvature.model.parameters)
    if targets is None:
        return oracle.dense_fisher(model, inputs, "output", names, loss, **options)
    return oracle.dense_empirical_fisher(model, inputs, "output", names, loss, targets, **options)


def uneven(inputs, targets=None, sizes=(1, 4)):
    """The examples in batches of these sizes, and a last batch of the remaining examples."""
    places = np.cumsum(sizes)
    parts = {name: np.split(array, places) for name, array in inputs.items()}
    labels = [None] * (len(sizes) + 1) if targets is None else np.split(targets, places)
    return [
        ({name: part[i] for name, part in parts.items()}, labels[i]) for i in range(len(labels))
    ]


def measured(model, batches, loss="categorical", scratch_bytes=SCRATCH_BYTES, **options):
    """A curvature whose temporary arrays have some bytes."""
    bounded = partial(build.select, scratch_bytes=scratch_bytes)
    with mock.patch.object(build, "select", bounded):
        return ke.curvature(model, batches, loss=loss, threads=1, backend="numpy", **options)
