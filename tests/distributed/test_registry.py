"""Every row of the table of approximations gives the results of one process over several ranks."""

import pytest

import kfac_engine as ke
from kfac_engine.curvature.approximations import KINDS
from tests import models
from tests.comparing import assert_arrays_near
from tests.distributed.test_distributions import DISTRIBUTIONS, assert_equal_to_one_process, batches

# Engines recognize depthwise convolutions as grouped ones, whose rows are the same.
NOT_RECOGNIZED = "depthwise_conv2d"
ROWS = [
    (kind, name)
    for kind, row in KINDS.items()
    if kind != NOT_RECOGNIZED
    for name in row.approximations
]

# The input, the trained parameters, and the nodes between the input and the features of a network,
# which a dense layer follows. ONNX Runtime has no convolution in float64. Without a nonlinear
# function, the output gradients of the first layer span two dimensions: rounding would determine
# the other eigenvectors of "ekfac", and later gradients have parts along them.
# fmt: off
NETWORKS = {
    "fully_connected": ("double[batch, 4] input", "w(4,5) head(5,3)",
        "h = MatMul(input, w)  features = Tanh(h)"),
    "conv2d": ("float[batch, 2, 5, 4] input", "w(3,2,3,3) b(3) head(3,3)",
        "h = Conv(input, w, b)  features = GlobalAveragePool(h)"),
    "conv1d": ("float[batch, 2, 5] input", "w(3,2,3) head(3,3)",
        "h = Conv(input, w)  features = GlobalAveragePool(h)"),
    "convolution": ("float[batch, 2, 3, 3, 3] input", "w(3,2,2,2,2) head(3,3)",
        "h = Conv(input, w)  features = GlobalAveragePool(h)"),
    "conv_transpose": ("float[batch, 2, 3, 3] input", "w(2,3,2,2) head(3,3)",
        "h = ConvTranspose(input, w)  features = GlobalMaxPool(h)"),
    "fully_connected_multi": ("double[batch, 4] input", "w(4,4) head(4,3)",
        """h = MatMul(input, w)  a = Tanh(h)  g = MatMul(a, w)
           c = Tanh(g)  features = MatMul(c, w)"""),
    "conv2d_multi": ("float[batch, 3, 5, 5] input", "w(3,3,2,2) head(3,3)",
        "h = Conv(input, w)  a = Tanh(h)  g = Conv(a, w)  features = GlobalAveragePool(g)"),
    "convolution_multi": ("float[batch, 3, 5] input", "w(3,3,2) head(3,3)",
        "h = Conv(input, w)  a = Tanh(h)  g = Conv(a, w)  features = GlobalAveragePool(g)"),
    "conv_transpose_multi": ("float[batch, 3, 3, 2] input", "w(3,3,2,2) head(3,3)",
        """h = ConvTranspose(input, w)  a = Tanh(h)  g = ConvTranspose(a, w)
           features = GlobalMaxPool(g)"""),
    "grouped_convolution": ("float[batch, 4, 4, 3] input", "w(4,2,2,2) head(4,3)",
        "h = Conv<group=2>(input, w)  features = GlobalAveragePool(h)"),
    "grouped_convolution_multi": ("float[batch, 4, 4, 3] input", "w(4,2,2,2) head(4,3)",
        """h = Conv<group=2>(input, w)  a = Tanh(h)  g = Conv<group=2>(a, w)
           features = GlobalAveragePool(g)"""),
    "stacked_dense": ("double[batch, 2, 1, 4] input", "w(2,4,3) head(6,3)",
        "h = MatMul(input, w)  features = Tanh(h)"),
    "embedding": ("int64[batch] input", "w(7,4) head(4,3)", "features = Gather(w, input)"),
    "embedding_multi": ("int64[batch, 2] input", "w(7,4) head(4,3)",
        """first = Constant<value_int=0>()  second = Constant<value_int=1>()
           i = Gather<axis=1>(input, first)  j = Gather<axis=1>(input, second)
           f = Gather(w, i)  g = Gather(w, j)  a = Tanh(g)  features = Sub(f, a)"""),
    "tied_embedding": ("int64[batch, 2] input", "w(7,4) head(14,3)",
        "f = Gather(w, input)  a = Tanh(f)  t = Transpose(w)  features = MatMul(a, t)"),
    "scale_and_shift": ("double[batch, 4] input", "w(4) b(4) head(4,3)",
        "h = Mul(input, w)  features = Add(h, b)"),
    "shift": ("double[batch, 4] input", "b(4) head(4,3)", "h = Add(input, b)  features = Tanh(h)"),
    "generic": ("double[batch, 4] input", "w(4) head(4,3)",
        "h = Sin(w)  features = Mul(input, h)"),
}
# fmt: on


def network(kind):
    """A classification network with a layer of a kind."""
    if kind not in NETWORKS:
        pytest.fail(f"add a network with a layer of kind '{kind}' to NETWORKS")
    entry, weights, nodes = NETWORKS[kind]
    return models.network(
        entry, weights, f"{nodes}  flat = Flatten(features)  output = MatMul(flat, head)"
    )


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
@pytest.mark.parametrize(("kind", "name"), ROWS)
def test_every_approximation_equals_that_of_one_process(kind, name, distribution):
    alone = assert_equal_to_one_process(
        network(kind), 3, steps=3, approximations={kind: name}, distribution=distribution
    )
    layers = [layer for layer in alone.layers if layer.kind == kind]
    assert {alone.collection.approximation_of(layer.key) for layer in layers} == {name}


@pytest.mark.parametrize(("kind", "name"), ROWS)
def test_every_approximation_in_parts_equals_that_of_the_whole_batch(kind, name):
    """Each part draws the random targets and the random patches of its rows of the batch."""
    options = {"loss": "categorical", "approximations": {kind: name}, "threads": 1}
    whole, parts = (ke.Engine.from_onnx(network(kind), **options) for _ in range(2))
    for inputs, targets in batches(network(kind), 2):
        whole.update_statistics(whole.trace(inputs, targets))
        rows = (slice(0, 5), slice(5, 6), slice(6, 12))
        parts.update_statistics([({n: a[i] for n, a in inputs.items()}, targets[i]) for i in rows])
    dtype = str(next(iter(whole.parameters.values())).dtype)
    for one, other in zip(parts.estimator.factors, whole.estimator.factors, strict=True):
        assert_arrays_near(
            {"": one.cov}, {"": other.cov}, {"float64": 1e-12, "float32": 2e-6}[dtype]
        )


def test_rows_of_depthwise_convolutions_are_those_of_grouped_ones():
    depthwise, grouped = (KINDS[k].approximations for k in (NOT_RECOGNIZED, "grouped_convolution"))
    assert dict(depthwise) == dict(grouped)


def test_a_kind_without_a_network_fails_with_its_name():
    with pytest.raises(pytest.fail.Exception, match="a layer of kind 'mine'"):
        network("mine")


def test_first_bases_of_several_sources_equal_those_of_one_process():
    assert_equal_to_one_process(
        network("fully_connected"),
        3,
        steps=2,
        approximations={"fully_connected": "ekfac"},
        estimation_mode="exact",
    )
