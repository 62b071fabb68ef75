"""Layers of several uses and convolutions in a collection: towers, defaults, estimator, state."""

import numpy as np
import pytest

import kfac_engine as ke
from kfac_engine.engine.checkpoint import State, load_state, save_state
from tests.lifecycle import observe, second_moment

EXACT = 1e-12  # float64 sums of a few dozen terms
B, D_IN, D_OUT = 5, 3, 2
GRAPH = {"w": (D_IN, D_OUT), "filter": (2, 2, 3, 2), "line": (2, 3, 2)}


class TwoUses(dict):
    """``z = x0 · W + 2 · x1 · W``, with the derivatives written out."""

    def vjp(self, cotangents, wrt):
        c = cotangents["z"]
        known = {"z": c, "s0": c, "s1": 2 * c}
        return {name: known[name] for name in wrt}


def two_uses(seed):
    rng = np.random.default_rng(seed)
    trace = TwoUses(x0=rng.normal(size=(B, D_IN)), x1=rng.normal(size=(B, D_IN)))
    trace["z"] = (trace["x0"] + 2 * trace["x1"]) @ np.ones((D_IN, D_OUT))
    return trace


@pytest.mark.parametrize("approx", ["kron_indep", "kron_series_1", "kron_series_2"])
def test_an_estimator_differentiates_every_use(approx):
    collection = ke.LayerCollection(graph=GRAPH)
    collection.register_fully_connected_multi("w", ["x0", "x1"], ["s0", "s1"], approx=approx)
    collection.register_normal_predictive_distribution("z", var=1.0)
    estimator = ke.FisherEstimator(["w"], 0.9, 0.1, collection, estimation_mode="exact")
    assert set(estimator.differentiated) == {"s0", "s1"}
    trace = two_uses(0)
    estimator.update_covariances(trace)
    estimator.update_inverses()
    block = collection.fisher_blocks["w"]
    A = second_moment(np.concatenate([trace["x0"], trace["x1"]]))
    np.testing.assert_allclose(block.input_factor.cov, A, atol=EXACT)
    # Sources e_k reach the uses as e_k and 2·e_k: a mean of (1 + 4) / 2 on the diagonal.
    np.testing.assert_allclose(block.output_factor.cov, 2.5 * np.eye(D_OUT), atol=EXACT)
    if approx != "kron_indep":
        # One pair of uses over two: 2·e_k e_kᵀ / 2, summed over sources.
        np.testing.assert_allclose(block.output_factor.cov_dt1, np.eye(D_OUT), atol=EXACT)
    v = np.random.default_rng(1).normal(size=(D_IN, D_OUT))
    ((product, _),) = estimator.multiply([(v, "w")])
    ((back, _),) = estimator.multiply_inverse([(product, "w")])
    np.testing.assert_allclose(back, v, atol=1e-9)  # through one damped inverse


def images(seed):
    rng = np.random.default_rng(seed)
    return {"x": rng.normal(size=(4, 5, 5, 3)), "ds": rng.normal(size=(4, 5, 5, 2))}


REGISTRATIONS = {
    "sua": lambda lc: lc.register_conv2d("filter", [1, 1], "SAME", "x", "s", approx="kron_sua"),
    "sampled": lambda lc: lc.register_conv2d(
        "filter", [1, 1], "SAME", "x", "s", sub_sample_patches=True, sub_sample_inputs=True
    ),
    "series": lambda lc: lc.register_fully_connected_multi(
        "w", "x", "s", num_uses=2, approx="kron_series_2"
    ),
}


@pytest.mark.parametrize("kind", REGISTRATIONS)
def test_a_checkpoint_goes_on_bit_for_bit(tmp_path, kind):
    def run(batches, resume=None):
        config = ke.CollectionConfig(max_num_patches=20)
        collection = ke.LayerCollection(graph=GRAPH, config=config)
        REGISTRATIONS[kind](collection)
        values = [uses(seed) if kind == "series" else images(seed) for seed in batches]
        block = observe(collection, [["ds"]], values, exps=(-1,))
        factors = collection.get_factors()
        if resume is not None:
            _, restore = load_state(tmp_path / "s.safetensors", factors, {})
            restore()
            for factor in factors:
                factor.update(resume, 0.9)
        return block, factors

    def uses(seed):
        rng = np.random.default_rng(seed)
        return {"x": rng.normal(size=(2, 6, D_IN)), "ds": rng.normal(size=(12, D_OUT))}

    last = uses(9) if kind == "series" else images(9)
    saved, factors = run([1, 2])
    save_state(tmp_path / "s.safetensors", factors, State(0, {}, {}))
    for factor in factors:
        factor.update(last, 0.9)
    resumed, _ = run([3], resume=last)
    shape = GRAPH["w"] if kind == "series" else GRAPH["filter"]
    v = np.random.default_rng(0).normal(size=shape)
    np.testing.assert_array_equal(resumed.multiply(v), saved.multiply(v))
    # The inverse is that of the saved refresh, stale as it was.
    np.testing.assert_array_equal(resumed.multiply_inverse(v), saved.multiply_inverse(v))


@pytest.mark.parametrize(
    ("kind", "accepted"),
    [
        (
            "fully_connected_multi",
            {
                "kron_indep",
                "kron_indep_in_diag",
                "kron_indep_out_diag",
                "kron_indep_both_diag",
                "kron_series_1",
                "kron_series_2",
            },
        ),
        ("conv2d_multi", {"kron_indep"}),
        ("conv1d", {"kron"}),
        ("convolution", {"kron"}),
    ],
)
def test_a_kind_accepts_what_the_specification_lists_and_no_more(kind, accepted):
    collection = ke.LayerCollection()
    for value in accepted:
        collection.set_default_approximation(kind, value)
        assert collection.default_approximation(kind) == value
    with pytest.raises(ValueError, match="not a valid approximation"):
        collection.set_default_approximation(kind, "diagonal")


@pytest.mark.parametrize("value", ["kron", "diagonal", "kron_sua"])
def test_conv2d_has_three_approximations(value):
    collection = ke.LayerCollection(graph=GRAPH)
    collection.set_default_approximation("conv2d", value)
    collection.register_conv2d("filter", [1, 1], "SAME", "x", "s")
    assert collection.approximation_of("filter") == value


CALLS = {
    "multi": (
        "w",
        lambda lc, **o: lc.register_fully_connected_multi("w", ["a", "b"], ["c", "d"], **o),
    ),
    "conv2d_multi": (
        "filter",
        lambda lc, **o: lc.register_conv2d_multi(
            "filter", [1, 1, 1, 1], "SAME", ["a", "b"], ["c", "d"], **o
        ),
    ),
    "conv1d": ("line", lambda lc, **o: lc.register_conv1d("line", [1], "SAME", "x", "s", **o)),
    "convolution": ("line", lambda lc, **o: lc.register_convolution("line", "x", "s", "SAME", **o)),
}


@pytest.mark.parametrize(("key", "register"), CALLS.values(), ids=CALLS)
def test_reuse_says_whether_a_tower_is_meant(key, register):
    collection = ke.LayerCollection(graph=GRAPH)
    with pytest.raises(KeyError):
        register(collection, reuse=True)
    register(collection, reuse=False)
    with pytest.raises(ValueError, match="already in LayerCollection"):
        register(collection, reuse=False)
    register(collection, reuse=True)
    register(collection)
    assert collection.fisher_blocks[key].num_registered_towers == 3
