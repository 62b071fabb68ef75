"""The estimator's products, as dense matrices, and what it refuses."""

from typing import ClassVar

import numpy as np
import pytest

import kfac_engine as ke
from tests.lifecycle import plain_packing
from tests.two_layers import (
    BLOCKS,
    DAMPING,
    EXACT,
    WEIGHTS,
    K,
    N,
    Trace,
    batch,
    estimate,
    estimator_of,
    layers,
    run,
    weights,
)

# -- products --------------------------------------------------------------------------------------


def prepared(**options):
    estimator = estimate(exps=(-1, -0.5), compute_cholesky=True, compute_cholesky_inverse=True)
    estimator.update_covariances(run(batch()))
    estimator.update_inverses()
    return estimator


PRODUCTS = {
    "multiply": lambda e, p: e.multiply(p),
    "inverse": lambda e, p: e.multiply_inverse(p),
    "power": lambda e, p: e.multiply_matpower(-0.5, p),
    "root": lambda e, p: e.multiply_cholesky(p),
    "root transposed": lambda e, p: e.multiply_cholesky(p, transpose=True),
    "inverse root": lambda e, p: e.multiply_cholesky_inverse(p),
    "inverse root transposed": lambda e, p: e.multiply_cholesky_inverse(p, transpose=True),
}


def dense_products(estimator):
    """The same products as dense matrices, block by block."""
    found = {name: [] for name in PRODUCTS}
    for block in estimator.blocks:
        A, G = (factor.cov for factor in block.factors)
        pi = np.sqrt(np.trace(A) / len(A) / (np.trace(G) / len(G)))
        A = A + np.sqrt(DAMPING) * pi * np.eye(len(A))
        G = G + np.sqrt(DAMPING) / pi * np.eye(len(G))
        F, L = np.kron(A, G), np.kron(np.linalg.cholesky(A), np.linalg.cholesky(G))
        values, vectors = np.linalg.eigh(F)
        matrices = [F, np.linalg.inv(F), (vectors / np.sqrt(values)) @ vectors.T]
        matrices += [L, L.T, np.linalg.inv(L), np.linalg.inv(L).T]
        for name, matrix in zip(PRODUCTS, matrices, strict=True):
            found[name].append(matrix)
    return found


@pytest.mark.parametrize("name", PRODUCTS)
def test_products_are_those_of_the_dense_blocks(name):
    estimator, vector = prepared(), weights(seed=7)
    result = PRODUCTS[name](estimator, [(vector[n], n) for n in WEIGHTS])
    assert [n for _, n in result] == list(WEIGHTS)
    found = {n: v for v, n in result}
    for key, matrix in zip(BLOCKS, dense_products(estimator)[name], strict=True):
        flat = plain_packing([vector[n] for n in key]).ravel()
        expected = matrix @ flat
        np.testing.assert_allclose(
            plain_packing([found[n] for n in key]).ravel(), expected, rtol=1e-9, atol=1e-9
        )


def test_pairs_come_back_in_their_order_and_under_their_keys():
    estimator, vector = prepared(), weights(seed=7)
    plain = {n: v for v, n in estimator.multiply_inverse([(vector[n], n) for n in WEIGHTS])}
    pairs = [((vector["b2"], vector["w1"]), ("b2", "w1")), (vector["b1"], "b1")]
    pairs.append(((vector["w2"],), ("w2",)))
    result = estimator.multiply_inverse(pairs)
    assert [key for _, key in result] == [("b2", "w1"), "b1", ("w2",)]
    (b2, w1), b1, (w2,) = (v for v, _ in result)
    for array, name in [(b2, "b2"), (w1, "w1"), (b1, "b1"), (w2, "w2")]:
        np.testing.assert_array_equal(array, plain[name])


def test_the_damping_can_change_and_is_read_at_the_next_refresh():
    estimator, vector = prepared(), [(v, n) for n, v in weights(seed=7).items()]
    before = estimator.multiply_inverse(vector)
    estimator.damping = 50.0
    for (old, _), (now, _) in zip(before, estimator.multiply_inverse(vector), strict=True):
        np.testing.assert_array_equal(now, old)
    estimator.update_inverses()
    other = estimate()
    other.damping = 50.0
    other.update_covariances(run(batch()))
    other.update_inverses()
    for (now, _), (fresh, _) in zip(
        estimator.multiply_inverse(vector), other.multiply_inverse(vector), strict=True
    ):
        np.testing.assert_allclose(now, fresh, rtol=EXACT)
    # λ far above everything: the inverse is 1/λ, up to the factors' parts of √λ.
    (w1, _), *_ = estimator.multiply_inverse(vector)
    assert np.linalg.norm(w1 * 50 - vector[0][0]) < 0.5 * np.linalg.norm(vector[0][0])


# -- arrays of other libraries ---------------------------------------------------------------------


class Foreign:
    """What a tensor of another library shows: no arithmetic, no NumPy type."""

    def __init__(self, array):
        self._array = array
        self.shape = array.shape
        self.dtype = "foreign"

    def __len__(self):
        return len(self._array)

    def __dlpack__(self, **options):
        return self._array.__dlpack__(**options)

    def __dlpack_device__(self):
        return self._array.__dlpack_device__()


@pytest.mark.parametrize("mode", ["gradients", "exact"])
def test_traces_and_vectors_of_other_libraries_are_read(mode):
    class ForeignTrace(Trace):
        def __getitem__(self, name):
            return Foreign(super().__getitem__(name))

        def vjp(self, cotangents, wrt):
            return {n: Foreign(g) for n, g in super().vjp(cotangents, wrt).items()}

    plain, estimator = (
        estimate("normal", mode, compute_params_stats=True, batch_size=N) for _ in range(2)
    )
    plain.update_covariances(run(batch()))
    estimator.update_covariances(ForeignTrace(run(batch()).values))
    for found, expected in zip(estimator.params_stats, plain.params_stats, strict=True):
        np.testing.assert_array_equal(found, expected)
    vector = weights(seed=7)
    for e in (plain, estimator):
        e.update_inverses()
    foreign = estimator.multiply_inverse([(Foreign(v), n) for n, v in vector.items()])
    own = plain.multiply_inverse([(v, n) for n, v in vector.items()])
    for (found, _), (expected, _) in zip(foreign, own, strict=True):
        assert isinstance(found, np.ndarray)
        np.testing.assert_array_equal(found, expected)


# -- refusals --------------------------------------------------------------------------------------


def state_of(estimator):
    """Everything a refused batch must leave alone, by value."""
    return {
        "arrays": [
            {k: v.copy() for k, v in factor.arrays().items()} for factor in estimator.factors
        ],
        "weights": [factor.average.weight for factor in estimator.factors],
        "repeats": [factor.repeats for factor in estimator.factors],
        "generator": str(estimator.rng.bit_generator.state),
        "stats": [array.copy() for array in estimator.params_stats],
    }


def assert_same_state(estimator, before):
    after = state_of(estimator)
    for name in ("weights", "repeats", "generator"):
        assert after[name] == before[name]
    for found, expected in zip(after["arrays"], before["arrays"], strict=True):
        assert found.keys() == expected.keys()
        for name, array in expected.items():
            np.testing.assert_array_equal(found[name], array)
            assert found[name].dtype == array.dtype
    for found, expected in zip(after["stats"], before["stats"], strict=True):
        np.testing.assert_array_equal(found, expected)


class Broken(Trace):
    """Shows something else than it computed with: a value, or the gradient of one source."""

    shown: ClassVar = {}
    failing_source = None

    def __getitem__(self, name):
        value = super().__getitem__(name)
        return self.shown.get(name, value)

    def vjp(self, cotangents, wrt):
        found = super().vjp(cotangents, wrt)
        if len(self.asked) == self.failing_source:
            found["s"] = spoiled(found["s"], np.nan)
        return found


def spoiled(array, value):
    array = array.copy()
    array.reshape(-1)[2] = value
    return array


def showing(name, change):
    trace = Broken(run(batch(3)).values)
    trace.shown = {name: change(trace.values[name])}
    return trace


def failing(source):
    trace = Broken(run(batch(3)).values)
    trace.failing_source = source
    return trace


@pytest.mark.parametrize(("mode", "sources"), [("gradients", 1), ("exact", K)])
def test_a_batch_that_does_not_fit_moves_nothing(mode, sources):
    estimator = estimate(mode=mode, compute_params_stats=True, batch_size=N)
    estimator.update_covariances(run(batch()))
    estimator.update_inverses()
    before = state_of(estimator)
    refused = [
        (showing("x", lambda x: spoiled(x, np.nan)), ke.NonFiniteError),
        (showing("a", lambda a: spoiled(a, -np.inf)), ke.NonFiniteError),
        (showing("a", lambda a: spoiled(a, 1e200)), ke.NonFiniteError),
        (showing("z", lambda z: spoiled(z, np.nan)), ke.NonFiniteError),
        (failing(1), ke.NonFiniteError),
        (failing(sources), ke.NonFiniteError),
        (showing("x", lambda x: x[:, 1:]), ke.ShapeError),
        (showing("x", lambda x: x[1:]), ke.InputError),
        (showing("a", lambda a: a[0]), ke.ShapeError),
    ]
    for trace, error in refused:
        with pytest.raises(error):
            estimator.update_covariances(trace)
        assert_same_state(estimator, before)


def test_a_value_that_the_trace_does_not_have_is_named():
    estimator, trace = estimate(mode="gradients"), run(batch())
    del trace.values["a"]
    with pytest.raises(KeyError, match="'a'"):
        estimator.update_covariances(trace)


def test_an_estimator_needs_losses_a_known_mode_and_all_parameters():
    with pytest.raises(ValueError, match="at least one registered loss"):
        estimator_of(layers())
    with pytest.raises(
        ValueError, match=r"estimation_mode must be one of .*exact.*; got 'exactly' .*exact"
    ):
        estimate(mode="exactly")
    with pytest.raises(ValueError, match="Batch size needs to be passed"):
        estimate(compute_params_stats=True)
    collection = layers()
    collection.register_normal_predictive_distribution("z")
    with pytest.raises(ValueError, match="b2 is registered, but not listed"):
        ke.FisherEstimator(("w1", "b1", "w2"), 0.9, DAMPING, collection)
    with pytest.raises(ValueError, match="w3 is not registered"):
        ke.FisherEstimator((*WEIGHTS, "w3"), 0.9, DAMPING, collection)


@pytest.mark.parametrize(
    ("pairs", "error", "says"),
    [
        ([("w1", "w1")], ValueError, "missing: .*'b1', 'b2', 'w2'"),
        ([*((n, n) for n in WEIGHTS), ("w1", "w3")], ValueError, "not registered: .*'w3'"),
        ([*((n, n) for n in WEIGHTS), ("w1", "w1")], ValueError, "once"),
        ([(("w1",), BLOCKS[0]), ("w2", "w2"), ("b2", "b2")], ValueError, "needs 2 array"),
    ],
    ids=["missing", "unknown", "twice", "count"],
)
def test_products_take_every_parameter_once(pairs, error, says):
    estimator, arrays = prepared(), weights()

    def look_up(names):
        return arrays[names] if isinstance(names, str) else tuple(arrays[n] for n in names)

    with pytest.raises(error, match=says):
        estimator.multiply([(look_up(names), key) for names, key in pairs])


def test_powers_that_were_not_asked_for_are_unknown():
    estimator = estimate()
    estimator.update_covariances(run(batch()))
    vector = [(v, n) for n, v in weights().items()]
    with pytest.raises(ke.NotReadyError, match="refresh"):
        estimator.multiply_inverse(vector)
    with pytest.raises(KeyError, match="not registered"):
        estimator.multiply_matpower(-0.5, vector)
    with pytest.raises(KeyError, match="not registered"):
        estimator.multiply_cholesky(vector)


@pytest.mark.parametrize("damping", [-0.1, np.nan, np.inf])
def test_a_damping_that_is_none_is_refused_when_it_is_set(damping):
    estimator = estimate()
    before = estimator.damping
    with pytest.raises(ValueError, match="damping must"):
        estimator.damping = damping
    assert estimator.damping == before


def test_a_collection_serves_one_estimator_and_is_closed_by_it():
    collection = layers()
    collection.register_normal_predictive_distribution("z")
    estimator_of(collection)
    with pytest.raises(ValueError, match="estimator"):
        estimator_of(collection)
    with pytest.raises(ValueError, match="estimator"):
        collection.register_fully_connected("w3", "z", "y")
    with pytest.raises(ValueError, match="estimator"):
        collection.register_normal_predictive_distribution("z")
