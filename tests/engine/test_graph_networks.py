"""Graph networks, adjacency matrices and pairs of examples against NumPy and other batches."""

import numpy as np
import pytest

import kfac_engine as ke
from tests import graph_networks as net
from tests.comparing import assert_near
from tests.models import parsed

SIZES = [3, 7, 2, 5, 1]
GRAPHS, NODES = len(SIZES), sum(SIZES)
# float64; central differences with steps of 1e-6 are good to 1e-8 of the largest entry.
EXACT, DIFFERENCES = 1e-10, 1e-7


def engine(count="slots", **options):
    if count == "number":  # a generated number is 0
        options = {"sample_inputs": batch(count)[0], **options}
    return ke.Engine.from_onnx(net.graph_network(count=count), loss="normal", **options)


def batch(count="slots", sizes=SIZES, seed=0):
    return net.graphs(sizes, seed, count)


def differences(loss, theta):
    """Gradients by central differences, by name."""
    gradients = {name: np.zeros_like(array) for name, array in theta.items()}
    for name, gradient in gradients.items():
        for index in np.ndindex(gradient.shape):
            ends = []
            for step in (1e-6, -1e-6):
                moved = {n: array.copy() for n, array in theta.items()}
                moved[name][index] += step
                ends.append(loss(moved))
            gradient[index] = (ends[0] - ends[1]) / 2e-6
    return gradients


def block_of(built, name):
    (block,) = [b for b in built.collection.fisher_blocks.values() if name in b.params]
    return block


def matrix(built, name):
    block = block_of(built, name)
    return block.repeats * np.kron(block.input_factor.cov, block.output_factor.cov)


def cross_entropy(z, labels):
    return float(np.mean(np.log(np.exp(z).sum(1)) - z[np.arange(len(z)), labels]))


# -- graphs ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("count", net.COUNTS)
def test_gradients_are_those_of_the_mean_over_graphs(count, given):
    inputs, targets = batch(count)
    options = {"sample_inputs": batch(count, [2, 4], 1)[0]} if given else {}
    result = engine(count, **options).gradients(inputs, targets)

    def loss(theta):  # the loss "normal" has the variance 1/2
        return ((net.predictions(theta, inputs)[0] - targets) ** 2).sum() / GRAPHS

    for name, gradient in differences(loss, net.weights()).items():
        assert_near(result.gradients[name], gradient, DIFFERENCES)


@pytest.mark.parametrize("count", net.COUNTS)
def test_statistics_are_means_over_nodes_times_the_nodes_of_a_graph(count):
    """``Σ_nodes a aᵀ ⊗ ds dsᵀ``, divided by the graphs, with the rows of each layer as they are."""
    inputs, targets = batch(count)
    built = engine(count, estimation_mode="empirical")
    built.step(inputs, targets)
    z, read, a = net.predictions(net.weights(), inputs)
    dz = 2 * (z - targets)
    ds = (dz @ net.weights()["v"].T)[inputs["graph"]] * (1 - a**2)
    pooled = np.zeros((GRAPHS, net.H))
    np.add.at(pooled, inputs["graph"], a)
    for name, x, g in (("w", read, ds), ("v", pooled, dz)):
        block = block_of(built, name)
        assert_near(block.input_factor.cov, x.T @ x / len(x), EXACT)
        assert_near(block.output_factor.cov, g.T @ g / len(g), EXACT)
        assert block.repeats == pytest.approx(len(x) / GRAPHS)


@pytest.mark.parametrize("count", net.COUNTS)
def test_metrics_are_means_over_graphs(count):
    data = [batch(count, [9, 8], 1), batch(count, [1, 1, 1, 2], 2)]
    found = engine(count).evaluate(data, ["mean_squared_error"])["mean_squared_error"]
    errors = [net.predictions(net.weights(), x)[0] - y for x, y in data]
    assert found == pytest.approx((np.concatenate(errors) ** 2).mean())


def test_graphs_in_parts_are_one_batch_of_graphs():
    parts = [batch(sizes=sizes, seed=seed) for seed, sizes in enumerate(([3, 1], [5, 2, 4]))]
    found, expected = engine().gradients(parts), engine().gradients(*net.joined(*parts))
    assert found.loss == pytest.approx(expected.loss)
    for name, gradient in expected.gradients.items():
        assert_near(found.gradients[name], gradient, EXACT)
    whole, divided = engine(), engine()
    whole.update_statistics([net.joined(*parts)])
    divided.update_statistics(parts)
    for name in expected.gradients:  # targets are sampled part by part
        one, other = block_of(whole, name), block_of(divided, name)
        assert_near(other.input_factor.cov, one.input_factor.cov, EXACT)
        assert other.repeats == pytest.approx(one.repeats)


@pytest.mark.parametrize("mask", [[1, 0, 1, 1, 0], [0, 0, 0, 0, 1]])
def test_a_graph_that_does_not_count_is_absent(mask):
    inputs, targets = batch()
    kept = np.flatnonzero(mask)
    nodes = np.isin(inputs["graph"], kept)
    new = np.cumsum(nodes) - 1
    edges = inputs["edges"][:, nodes[inputs["edges"][0]]]
    rest = {
        "feat": inputs["feat"][nodes],
        "edges": new[edges],
        "graph": np.searchsorted(kept, inputs["graph"][nodes]),
        "slots": inputs["slots"][kept],
    }
    masked, without = (engine(estimation_mode="empirical") for _ in range(2))
    masked.step([(inputs, targets, np.array(mask, float))])
    without.step(rest, targets[kept])
    for name in ("w", "v"):
        assert_near(matrix(masked, name), matrix(without, name), EXACT)


TRAINED = [
    *((count, {}) for count in net.COUNTS),
    ("slots", {"weight_decay": 0.0}),
    ("largest", {"learning_rate": "quadratic"}),
]


@pytest.mark.parametrize(("count", "options"), TRAINED)
def test_kfac_trains_graph_networks_without_an_option(count, options):
    rng = np.random.default_rng(0)
    data = []
    for seed in range(4):
        inputs, _ = batch(count, rng.integers(1, 8, 6), seed)
        data.append((inputs, net.predictions(net.weights(5), inputs)[0]))
    history = ke.fit(
        net.graph_network(count=count), data, loss="normal", epochs=12, validation=data, **options
    )
    first, last = (history.records[i]["loss"] for i in (0, -1))
    assert last < 0.5 * first


def test_other_graphs_come_again_with_their_batch_only():
    optimizer = ke.KfacOptimizer(engine())
    inputs, targets = batch()
    optimizer.step(inputs, targets)
    optimizer.step(*batch(seed=1))
    assert optimizer._basis.seen.scarcity == 0
    optimizer.step(inputs, targets)
    assert optimizer._basis.seen.count == 3 * GRAPHS
    # A third of the examples came again, of 2 × GRAPHS different ones.
    assert optimizer._basis.seen.scarcity == pytest.approx(1 / (3 * GRAPHS) / 2)


def test_batches_of_graphs_are_cut_by_the_caller():
    data = batch()
    with pytest.raises(ke.InputError, match=r"'feat', 'edges', 'graph' belong.*such as \[\(inputs"):
        ke.fit(engine(), data, epochs=1)
    assert ke.fit(engine(), [data], epochs=1, validation=data).records


@pytest.mark.parametrize("mode", ["empirical", "gradients"])
def test_a_graph_of_weight_two_counts_as_two_graphs(mode):
    """Also in the rows of its nodes, whose weights follow from gradients."""
    parts = [batch(sizes=[size], seed=size) for size in (3, 1, 4)]
    copies = net.joined(*(parts[i] for i in (0, 0, 1, 2)))
    weighted, copied = engine(estimation_mode=mode), engine(estimation_mode=mode)
    weighted.step([(*net.joined(*parts), np.array([2.0, 1.0, 1.0]))])
    copied.step(*copies)
    for name in ("w", "v"):
        one, other = block_of(weighted, name), block_of(copied, name)
        assert_near(one.input_factor.cov, other.input_factor.cov, EXACT)
        if mode == "empirical":  # other modes draw other targets
            assert_near(matrix(weighted, name), matrix(copied, name), EXACT)


def test_updates_end_with_the_residuals_of_single_nodes():
    """The nodes of a graph are no targets of one example, which would lengthen the step."""
    built = ke.Engine.from_onnx(net.adjacency(), loss="categorical")
    built.set_parameters({"v": 500 * built.parameters["v"]})
    inputs, _ = net.one_graph(9)
    z = built.predict(inputs)
    labels, p = z.argmax(axis=1), np.exp(z - z.max(axis=1, keepdims=True))
    errors = p / p.sum(axis=1, keepdims=True) - np.eye(net.C)[labels]
    residual = np.sqrt((errors**2).sum() / (len(z) * (1 - 1 / net.C)))
    assert 0 < residual < 0.01
    rate = ke.KfacOptimizer(built).step(inputs, labels).learning_rate
    assert rate == pytest.approx(0.03 * 10 * residual)


ONE = """net (double[N, 4] x, double[N, N] adj) => (double[1, 3] y) {
    r = MatMul (adj, x)  s = MatMul (r, w)  h = Tanh (s)
    first = Constant <value_ints = [0]> ()  m = ReduceMean <keepdims = 1> (h, first)
    y = MatMul (m, v)
}"""


def test_a_batch_of_one_graph_is_one_example():
    model = parsed(ONE, net.weights())
    data = [(net.one_graph(nodes, nodes)[0], np.array([nodes % net.C])) for nodes in (4, 9, 11)]
    built = ke.Engine.from_onnx(model, loss="categorical")

    def output(theta, inputs):
        h = np.tanh(inputs["adj"] @ inputs["x"] @ theta["w"])
        return h.mean(axis=0, keepdims=True) @ theta["v"]

    def loss(theta):
        return np.mean([cross_entropy(output(theta, inputs), y) for inputs, y in data])

    found = built.gradients(data).gradients
    for name, gradient in differences(loss, net.weights()).items():
        assert_near(found[name], gradient, DIFFERENCES)
    assert built.evaluate(data)["loss"] == pytest.approx(loss(net.weights()))
    built.update_statistics([data[0]])
    assert block_of(built, "w").repeats == 4
    history = ke.fit(built, data, epochs=20, accumulate=3)
    assert history.records[-1]["loss"] < 0.5 * history.records[0]["loss"]
    assert "one prediction for all of axis 0 of 'x'" in built.losses[0].joint_batch


# -- adjacency matrices ----------------------------------------------------------------------------

SPELLINGS = {"one symbol": ("N",) * 3, "other": ("nodes",) * 3, "three": ("a", "b", "c")}


@pytest.mark.parametrize("symbols", SPELLINGS.values(), ids=SPELLINGS)
def test_adjacency_matrices_of_all_sizes_have_exact_gradients(symbols):
    sample = net.one_graph(4)[0] if len({*symbols}) > 1 else None
    model = net.adjacency(symbols)
    built = ke.Engine.from_onnx(model, loss="categorical", sample_inputs=sample)
    for nodes in (9, 14):
        inputs, labels = net.one_graph(nodes, nodes)

        def loss(theta, inputs=inputs, labels=labels):
            h = np.tanh(inputs["adj"] @ inputs["x"] @ theta["w"])
            return cross_entropy(inputs["adj"] @ h @ theta["v"], labels)

        found = built.gradients(inputs, labels).gradients
        for name, gradient in differences(loss, net.weights()).items():
            assert_near(found[name], gradient, DIFFERENCES)


@pytest.mark.parametrize("optimizer", ["kfac", "adamw"])
def test_networks_of_adjacency_matrices_are_trained(optimizer):
    data = [net.one_graph(nodes, seed) for seed, nodes in enumerate((12, 20, 7, 9))]
    for inputs, labels in data:
        h = np.tanh(inputs["adj"] @ inputs["x"] @ net.weights(3)["w"])
        labels[:] = (inputs["adj"] @ h @ net.weights(3)["v"]).argmax(axis=1)
    options = {"learning_rate": 0.02} if optimizer == "adamw" else {}
    history = ke.fit(
        net.adjacency(),
        data,
        loss="categorical",
        optimizer=optimizer,
        epochs=30,
        validation=data,
        **options,
    )
    assert history.records[-1]["loss"] < 0.8 * history.records[0]["loss"]


def test_the_memory_of_an_adjacency_matrix_grows_with_its_square():
    built = ke.Engine.from_onnx(net.adjacency(), loss="categorical")
    few, many = (built.memory(nodes).activations for nodes in (1000, 2000))
    assert 3.5 < many / few < 4.5


# -- pairs of examples -----------------------------------------------------------------------------


def of_pairs(**options):
    return ke.Engine.from_onnx(net.contrastive(), loss="categorical", **options)


@pytest.mark.parametrize("options", [{}, {"batch_axes": {"image": 0}}])
def test_logits_of_pairs_have_exact_gradients(options):
    for count in (3, 8):
        inputs, labels = net.pairs(count)
        theta = {"w": net.weights()["w"], "u": net.weights(1)["w"]}

        def loss(theta, inputs=inputs, labels=labels):
            z = (inputs["image"] @ theta["w"]) @ (inputs["text"] @ theta["u"]).T
            return cross_entropy(z, labels)

        result = of_pairs(**options).gradients(inputs, labels)
        assert result.loss == pytest.approx(loss(theta))
        for name, gradient in differences(loss, theta).items():
            assert_near(result.gradients[name], gradient, DIFFERENCES)


def test_statistics_of_pairs_are_those_of_each_row():
    """A sample of labels for each image: ``ds`` of a text is its sum over the images."""
    inputs, labels = net.pairs(6)
    built = of_pairs(estimation_mode="empirical")
    built.step(inputs, labels)
    i, t = inputs["image"] @ net.weights()["w"], inputs["text"] @ net.weights(1)["w"]
    z = i @ t.T
    dz = np.exp(z) / np.exp(z).sum(1, keepdims=True) - np.eye(6)[labels]
    for name, x, g in (("w", inputs["image"], dz @ t), ("u", inputs["text"], dz.T @ i)):
        block = block_of(built, name)
        assert_near(block.input_factor.cov, x.T @ x / 6, EXACT)
        assert_near(block.output_factor.cov, g.T @ g / 6, EXACT)


def test_kfac_trains_pairs_in_whole_batches():
    data = [net.pairs(8, seed) for seed in range(3)]
    history = ke.fit(net.contrastive(), data, loss="categorical", epochs=20, validation=data)
    assert history.records[-1]["loss"] < 0.5 * history.records[0]["loss"]
    with pytest.raises(ke.UnsupportedError, match="'logits' has an entry for each pair"):
        history.engine.gradients(data)
    with pytest.raises(ke.InputError, match="'logits' has an entry for each pair"):
        ke.fit(net.contrastive(), data[0], loss="categorical", epochs=1)
