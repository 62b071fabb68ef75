"""Inner products of vectors with gradients, rotated or not, equal those of whole matrices."""

import numpy as np
import pytest

from kfac_engine.analysis.fisher_matrix.blocks import Spectrum
from kfac_engine.analysis.influence.influence import Products
from kfac_engine.engine.layer_gradients import FactoredGradients, WholeGradients

# Sums of at most 60 products in float64.
TOLERANCE = 1e-12
D_IN, D_OUT, QUERIES = 6, 4, 3


def orthonormal(groups, d, generator):
    return np.linalg.qr(generator.standard_normal((groups, d, d))).Q


def factored(generator, m, t):
    inputs = generator.standard_normal((m, t, D_IN))
    return FactoredGradients(inputs, generator.standard_normal((m, 2, t, D_OUT)))


def whole(groups):
    def make(generator, m, _):
        return WholeGradients(generator.standard_normal((m, 2, groups, D_IN, D_OUT)))

    return make


@pytest.mark.parametrize(("make", "groups"), [(factored, 1), (whole(1), 1), (whole(3), 3)])
@pytest.mark.parametrize("sides", ["both", "left", "right"])
@pytest.mark.parametrize("t", [1, 2])
def test_products_are_those_of_rotated_matrices_before_and_after_the_switch(make, groups, sides, t):
    generator = np.random.default_rng(0)
    U, W = (orthonormal(groups, d, generator) for d in (D_IN, D_OUT))
    spectrum = Spectrum(
        np.ones((groups, D_IN, D_OUT)),
        None if sides == "right" else U, None if sides == "left" else W,
    )  # fmt: skip
    vectors = generator.standard_normal((QUERIES, groups, D_IN, D_OUT))
    products, switches = Products(vectors.copy()), []
    for m in (1, 1, 5, 40):
        gradients = make(generator, m, t)
        rotated = spectrum.into(gradients.matrices())
        expected = np.einsum("qgij,mkgij->qm", vectors, rotated)
        actual = products.of(gradients, spectrum)
        np.testing.assert_allclose(actual, expected, rtol=0, atol=TOLERANCE * abs(expected).max())
        switches.append(products.is_back)
    assert switches[0] is False
    assert switches[-1] is True
