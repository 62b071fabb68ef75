"""Compares products of the Fisher matrix with a dense slice of it."""

import numpy as np

from kfac_engine.errors import UnsupportedOpError
from kfac_engine.losses.output import OutputLoss
from kfac_engine.verification.checks import FAINT, MOST_TOLERANCE, Check, Measurement
from kfac_engine.verification.dense_fisher import CURVED_ERROR, DenseFisher, Entries, dense_fisher
from kfac_engine.verification.differences import sizes
from kfac_engine.verification.specimen import Floats, Specimen, wide

NAME = "curvature products"
REMEDY = (
    "products of engine.curvature_products are wrong, and training with them is unreliable: set "
    "the learning rate of KfacOptimizer to a number, and report the model"
)
NOT_NATURAL = (
    "it depends on the targets, so the inputs of this loss are not natural parameters: set "
    "ggn_equals_fisher = False in its class. Its method fisher was taken for the Fisher matrix"
)
# Errors of correct products in float32, relative to the product.
_TOLERANCE = 2e-3
# Slices below this part of their expected size are compared with this part.
_FLOOR = 1e-2
_VECTORS = 2
# The change of a product by one rounding of the probabilities, times this, is a rounding error.
_ROUNDINGS = 8


def verify_products(
    specimen: Specimen, names: tuple[str, ...], entries: int, rng: np.random.Generator
) -> Check:
    """Compare products of the Fisher matrix with random vectors and with the gradient.

    The slice of the products has ``entries`` rows, drawn from the parameters ``names``.
    """
    terms = specimen.engine.objective.terms
    if any(isinstance(term, OutputLoss) for term in terms):
        return Check.without(NAME, "a loss that the file computes has no distribution of targets")
    if not all(term.has_products for term in terms):
        return Check.without(NAME, "products of the Fisher matrix of the loss have no closed form")
    scales = sizes(specimen.parameters)
    vectors = {
        f"random vector {number}": {
            n: scales[n] * rng.choice([-1.0, 1.0], a.shape) for n, a in specimen.parameters.items()
        }
        for number in range(1, _VECTORS + 1)
    }
    # A gradient of certain predictions could underflow in float32.
    largest = max(float(abs(g).max(initial=0.0)) for g in specimen.gradients.values()) or 1.0
    vectors["gradient"] = {name: g / largest for name, g in specimen.gradients.items()}
    rows = Entries.draw(specimen.parameters, names, entries, int(rng.integers(2**31)))
    dense = dense_fisher(specimen, rows, list(vectors.values()))
    if not isinstance(dense, DenseFisher):
        return Check.without(NAME, dense)
    products = specimen.engine.curvature_products(specimen.trace)
    unit = _ROUNDINGS * max(specimen.rounding, CURVED_ERROR)
    measurements: list[Measurement] = []
    skipped = {f"Hessian matrix of {name}": NOT_NATURAL for name in dense.other_parameters}
    for (subject, vector), expected, errors in zip(
        vectors.items(), dense.products(), dense.product_errors(unit), strict=True
    ):
        try:
            result = products.multiply_fisher(vector)
        except UnsupportedOpError as error:
            return Check.without(NAME, str(error))
        assert isinstance(result, dict), "products are by parameter"
        product = wide(specimen.engine, {name: result[name] for name in specimen.parameters})
        size = _size(rows, product, expected)
        tolerance = max(_TOLERANCE, float(np.linalg.norm(errors)) / size)
        if tolerance > MOST_TOLERANCE:
            skipped[subject] = FAINT
        else:
            distance = float(np.linalg.norm(rows.of(product) - expected))
            measurements.append(Measurement(subject, distance / size, tolerance))
    detail = f"{len(rows)} rows of the Fisher matrix, from {dense.method}"
    return Check(NAME, tuple(measurements), detail, skipped, REMEDY)


def _size(rows: Entries, product: dict[str, Floats], expected: Floats) -> float:
    """Return the size of a product on a slice, to which its error is related."""
    whole = sum(float(np.sum(np.square(array))) for array in product.values())
    count = sum(array.size for array in product.values())
    floor = _FLOOR * float(np.sqrt(whole * len(rows) / count))
    return max(float(np.linalg.norm(expected)), floor) or 1.0
