"""Compares products of the Fisher matrix with a dense slice of it."""

import numpy as np

from kfac_engine.backend.namespace import on_host
from kfac_engine.errors import UnsupportedOpError
from kfac_engine.verification.checks import Check, Measurement
from kfac_engine.verification.dense_fisher import DenseFisher, Entries, dense_fisher
from kfac_engine.verification.differences import sizes
from kfac_engine.verification.specimen import Floats, Specimen

NAME = "curvature products"
REMEDY = (
    "products of engine.curvature_products are wrong, and training with them is unreliable: set "
    "the learning rate of KfacOptimizer to a number, and report the model"
)
# Errors of correct products in float32, relative to the product.
_TOLERANCE = 2e-3
# Slices below this part of their expected size are compared with this part.
_FLOOR = 1e-2
_VECTORS = 2


def check_products(
    specimen: Specimen, names: tuple[str, ...], entries: int, rng: np.random.Generator
) -> Check:
    """Compare products with random vectors and with the gradient.

    Args:
        specimen: The model and the batch.
        names: The parameters of the slice.
        entries: Number of rows of the slice.
        rng: Generator of the vectors and of the slice.

    Returns:
        The check.
    """
    scales = sizes(specimen.parameters)
    vectors = {
        f"random vector {number}": {
            n: scales[n] * rng.choice([-1.0, 1.0], a.shape) for n, a in specimen.parameters.items()
        }
        for number in range(1, _VECTORS + 1)
    }
    vectors["gradient"] = specimen.gradients
    rows = Entries.draw(specimen.parameters, names, entries, int(rng.integers(2**31)))
    dense = dense_fisher(specimen, rows, list(vectors.values()))
    if not isinstance(dense, DenseFisher):
        return Check(NAME, (), "", {"": dense})
    products = specimen.engine.curvature_products(specimen.trace)
    measurements = []
    for (subject, vector), expected in zip(vectors.items(), dense.products(), strict=True):
        try:
            result = products.multiply_fisher(vector)
        except UnsupportedOpError as error:
            return Check(NAME, (), "", {"": str(error)})
        wide = _wide(specimen, result)
        measurements.append(Measurement(subject, _error(rows, wide, expected), _TOLERANCE))
    detail = f"{len(rows)} rows of the Fisher matrix, from {dense.method}"
    return Check(NAME, tuple(measurements), detail, {}, REMEDY)


def _wide(specimen: Specimen, arrays: object) -> dict[str, Floats]:
    assert isinstance(arrays, dict), "products are by parameter"
    host = on_host(arrays, specimen.engine.collection.backend)
    return {name: host[name].astype(np.float64) for name in specimen.parameters}


def _error(rows: Entries, product: dict[str, Floats], expected: Floats) -> float:
    """Return the error of a product on a slice, relative to the larger of slice and floor."""
    whole = sum(float(np.sum(np.square(array))) for array in product.values())
    count = sum(array.size for array in product.values())
    floor = _FLOOR * float(np.sqrt(whole * len(rows) / count))
    size = max(float(np.linalg.norm(expected)), floor) or 1.0
    return float(np.linalg.norm(rows.of(product) - expected)) / size
