"""Spectra against eigenvalues of statistics that the test computes itself, and damping by hand."""

import numpy as np
import pytest

import kfac_engine as ke
from kfac_engine.engine.spectra import FactorSpectrum
from tests.models import Net
from tests.training import softmax_net as net

DAMPING = 0.03


@pytest.fixture
def observed():
    """The engine of the classifier after one batch, and the inputs of its two layers."""
    engine = net.engine(damping=DAMPING)
    x, y = net.batch()
    engine.step({"x": x}, y)
    hidden, _ = net.forward(net.weights(), x)
    return engine, (x, hidden)


def by_factor(engine, **options):
    return {(s.parameters[0], s.factor): s for s in ke.factor_spectra(engine, **options)}


def spectrum(eigenvalues, damping):
    damping = None if damping is None else np.array(damping)
    return FactorSpectrum(("w",), "A", (2, 2), 1e-9, np.array(eigenvalues), damping)


def test_condition_numbers_of_groups_are_those_of_the_worst_group():
    entry = spectrum([[1.0, 2.0], [0.1, 5.0]], [1.0, 0.3])
    assert entry.condition == pytest.approx(50)
    assert entry.damped_condition == pytest.approx(5.3 / 0.4)
    assert entry.below_damping == 1


def test_a_factor_without_damping_has_no_damped_condition():
    entry = spectrum([1.0, 4.0], None)
    assert entry.condition == 4
    assert entry.damped_condition is None
    assert entry.below_damping is None


def depthwise():
    """A convolution in two groups, then a dense layer."""
    net = Net()
    x = net.op("Conv", "input", net.weight("conv.weight", 4, 1, 3, 3), group=2, to="conv")
    x = net.op("Flatten", x, to="flat")
    net.op("MatMul", x, net.weight("fc.weight", 16, 3), to="output")
    return net.model({"input": ["batch", 2, 4, 4]}, {"output": ["batch", 3]})


@pytest.mark.parametrize(
    ("kind", "approximation", "symbols"),
    [
        ("fully_connected", "diagonal", ["F"]),
        ("fully_connected", "ekfac", ["A", "G", "s"]),
        ("grouped_convolution", "kron", ["A", "G"]),
    ],
)
def test_every_form_of_a_block_has_the_spectrum_of_its_matrix(kind, approximation, symbols):
    engine = ke.Engine.from_onnx(
        depthwise(), loss="categorical", approximations={kind: approximation}, backend="numpy"
    )
    rng = np.random.default_rng(0)
    x = rng.standard_normal((6, 2, 4, 4), np.float32)
    engine.step({"input": x}, rng.integers(0, 3, 6))
    layer = next(layer for layer in engine.layers if layer.kind == kind)
    block = engine.collection.fisher_blocks[layer.key]
    spectra = [s for s in ke.factor_spectra(engine) if s.parameters == layer.parameters]
    assert [entry.factor for entry in spectra] == symbols
    assert [entry.shape for entry in spectra] == list(layer.factor_shapes)
    for entry, factor in zip(spectra, block.factors, strict=True):
        dense = factor.get_cov().astype(np.float64)
        expected = np.linalg.eigvalsh((dense + dense.T) / 2)
        computed = np.sort(entry.eigenvalues, axis=None)
        # The averages are float32.
        np.testing.assert_allclose(computed, expected, atol=1e-5 * expected[-1])
    dampings = [entry.damping for entry in spectra]
    if approximation == "ekfac":
        assert dampings[:2] == [None, None]
    if approximation != "kron":
        assert float(dampings[-1]) == pytest.approx(engine.damping)
    else:
        assert dampings[0].shape == (2,)


def test_matrices_with_too_many_rows_have_no_eigenvalues(observed):
    engine, _ = observed
    spectra = by_factor(engine, most_rows=4)
    computed = {key for key, entry in spectra.items() if entry.eigenvalues is not None}
    assert computed == {("w1", "G"), ("w2", "G")}  # 6, 4, 5 and 3 rows
    left_out = spectra["w1", "A"]
    assert (left_out.condition, left_out.damped_condition, left_out.below_damping) == (None,) * 3


def test_spectra_need_statistics():
    with pytest.raises(ke.NotReadyError, match="no statistics"):
        ke.factor_spectra(net.engine())


@pytest.mark.parametrize("bound", [0, 2.5])
def test_a_bound_of_rows_is_a_positive_whole_number(observed, bound):
    with pytest.raises(ke.InputError, match="most_rows"):
        ke.factor_spectra(observed[0], most_rows=bound)
