"""Checkpoints: the same bits back, and nothing moved by a file that does not fit."""

import numpy as np
import pytest
from safetensors.numpy import save_file

import kfac_engine as ke
from kfac_engine.engine.checkpoint import State, load_state, save_state
from kfac_engine.system.writing import write_file
from tests import models
from tests.comparing import assert_arrays_equal
from tests.two_layers import BLOCKS, batch, estimator_of, run, weights

GENERATOR = {"bit_generator": "PCG64", "state": {"state": 2**100 + 1, "inc": 3}}


def make(*, exps=(-1, -0.5), approx="kron", hidden="x", config=None, cholesky=True):
    """An estimator with dense, diagonal and generic factors."""
    collection = ke.LayerCollection(config=config)
    collection.register_normal_predictive_distribution("z", name="loss")
    collection.register_fully_connected(BLOCKS[0], hidden, "s", approx=approx)
    collection.register_fully_connected("w2", "a", "z", approx="kron_in_diag")
    collection.register_generic("b2", "z")
    return estimator_of(collection, "gradients", exps=exps, compute_cholesky=cholesky)


def observe(estimator, seeds, refresh=True, dtype=np.float64):
    for seed in seeds:
        estimator.update_covariances(run(batch(seed, dtype=dtype)))
    if refresh:
        estimator.update_inverses()
    return estimator


def products(estimator):
    vector = [(v, n) for n, v in weights(seed=7).items()]
    found = [estimator.multiply_matpower(exp, vector) for exp in (1, -1, -0.5)]
    found.append(estimator.multiply_cholesky(vector))
    return [array for pairs in found for array, _ in pairs]


def bits_of(estimator):
    """Everything a factor knows, by value."""
    return [
        (
            factor.average.weight,
            factor.repeats,
            {name: (a.dtype.str, a.shape, a.tobytes()) for name, a in factor.arrays().items()},
        )
        for factor in estimator.factors
    ]


def save(path, estimator, *, counter=17, parameters=None):
    parameters = weights() if parameters is None else parameters
    generator = estimator.rng.bit_generator.state
    save_state(path, estimator.factors, State(counter, generator, parameters))
    return path


def load(path, estimator, parameters=None):
    present = weights() if parameters is None else parameters
    state, restore = load_state(path, estimator.factors, present)
    restore()
    return state


@pytest.fixture
def saved(tmp_path):
    """A checkpoint whose inverses are older than its averages."""
    estimator = observe(observe(make(), [0, 1]), [2], refresh=False)
    return save(tmp_path / "state.safetensors", estimator), estimator


# -- the same bits back ----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_resumed_run_gives_the_bits_of_one_that_never_stopped(tmp_path, dtype):
    straight = observe(observe(make(), [0, 1], dtype=dtype), [2], refresh=False, dtype=dtype)
    path = save(tmp_path / "s", straight)
    resumed = make()
    state = load(path, resumed)
    resumed.rng.bit_generator.state = state.generator
    assert bits_of(resumed) == bits_of(straight)
    for found, expected in zip(products(resumed), products(straight), strict=True):
        np.testing.assert_array_equal(found, expected)
    for estimator in (straight, resumed):
        observe(estimator, [3, 4], dtype=dtype)
    assert bits_of(resumed) == bits_of(straight)
    for found, expected in zip(products(resumed), products(straight), strict=True):
        np.testing.assert_array_equal(found, expected)


def test_a_resumed_run_continues_the_mean_number_of_positions(tmp_path):
    model, rng = models.token_mlp(tokens="tokens"), np.random.default_rng(0)
    lengths = [{"input": rng.normal(size=(3, t, 5)).astype("f")} for t in (2, 5, 3)]
    straight, resumed = (ke.Engine.from_onnx(model, loss="normal") for _ in range(2))
    for length in lengths[:2]:
        straight.observe(length)
    straight.save(tmp_path / "s")
    resumed.load(tmp_path / "s")
    for engine in (straight, resumed):
        (repeats,) = {factor.repeats for factor in engine.estimator.factors}
        assert repeats == pytest.approx((0.95 * 2 + 5) / 1.95)
        engine.observe(lengths[2])
    assert bits_of(resumed.estimator) == bits_of(straight.estimator)


def test_inverses_come_back_as_stale_as_they_were(saved):
    path, straight = saved
    resumed = make()
    load(path, resumed)
    refreshed = observe(make(), [0, 1, 2])
    stale, fresh = (e.factors[0].arrays()["power/0"] for e in (resumed, refreshed))
    np.testing.assert_array_equal(stale, straight.factors[0].arrays()["power/0"])
    assert not np.array_equal(stale, fresh)


def test_counters_generators_and_parameters_come_back(tmp_path):
    estimator, parameters = make(), weights(np.float32, seed=3)
    save_state(tmp_path / "s", estimator.factors, State(12345, GENERATOR, parameters))
    state = load(tmp_path / "s", make(), parameters)
    assert (state.counter, state.generator) == (12345, GENERATOR)
    assert state.parameters.keys() == parameters.keys()
    for name, value in parameters.items():
        np.testing.assert_array_equal(state.parameters[name], value)
        assert state.parameters[name].dtype == value.dtype


def test_a_state_before_the_first_batch_comes_back_empty(tmp_path):
    path, estimator = save(tmp_path / "s", make()), observe(make(), [0])
    load(path, estimator)
    assert bits_of(estimator) == bits_of(make())
    with pytest.raises(ke.NotReadyError):
        products(estimator)


def test_views_with_any_strides_are_saved_by_value(tmp_path):
    parameters = {"w": np.arange(24.0).reshape(4, 6)[::2, ::-3].T, "scalar": np.array(2.5)}
    save_state(tmp_path / "s", [], State(0, GENERATOR, parameters))
    state, _ = load_state(tmp_path / "s", [], parameters)
    assert_arrays_equal(state.parameters, parameters)


# -- what is refused -------------------------------------------------------------------------------


def refuse(path, estimator, says, parameters=None):
    before = bits_of(estimator)
    with pytest.raises(ke.InputError, match=says) as caught:
        load(path, estimator, parameters)
    assert str(path) in str(caught.value)
    assert bits_of(estimator) == before
    return str(caught.value)


def test_a_truncated_file_is_refused_at_any_length(saved):
    path, estimator = saved
    data = path.read_bytes()
    for length in (0, 1, 7, 8, 9, 100, len(data) // 2, len(data) - 8, len(data) - 1):
        path.write_bytes(data[:length])
        refuse(path, estimator, "cannot read the state")


def test_a_changed_byte_is_refused_wherever_it_is(saved):
    path, estimator = saved
    data = path.read_bytes()
    for offset in range(0, len(data), 37):
        damaged = bytearray(data)
        damaged[offset] ^= 0x10
        path.write_bytes(damaged)
        refuse(path, estimator, "cannot read|damaged|not an engine state")


def test_missing_foreign_and_future_files_are_refused(tmp_path):
    estimator = observe(make(), [0])
    refuse(tmp_path / "none", estimator, "cannot read")
    refuse(tmp_path, estimator, "cannot read")
    (tmp_path / "text").write_text("not a checkpoint")
    refuse(tmp_path / "text", estimator, "cannot read")
    for name, metadata in {
        "plain": None,
        "other": {"format": "pt"},
        "future": {"format": "99", "factors": "[]"},
    }.items():
        save_file({"w": np.ones(3)}, tmp_path / name, metadata)
        refuse(tmp_path / name, estimator, "another program or version")
    save_file({"w": np.ones(3)}, tmp_path / "forged", {"format": "1", "factors": "[]"})
    refuse(tmp_path / "forged", estimator, "damaged")


OTHERS = {
    "input": {"hidden": "a"},
    "approximation": {"approx": "diagonal"},
    "side": {"approx": "kron_out_diag"},
    "powers": {"exps": (-1,)},
    "order of powers": {"exps": (-0.5, -1)},
    "roots": {"cholesky": False},
}


@pytest.mark.parametrize("options", OTHERS.values(), ids=OTHERS)
@pytest.mark.parametrize("observed", [False, True], ids=["fresh", "used"])
def test_a_state_of_other_layers_or_options_is_refused(saved, options, observed):
    path, _ = saved
    estimator = make(**options)
    if observed and "hidden" not in options:
        observe(estimator, [0])
    refuse(path, estimator, "another model or options: ")


def test_an_average_of_another_shape_is_refused(saved):
    path, _ = saved
    estimator = observe(make(), [0])
    estimator.factors[0].average.value = np.eye(2)
    refuse(path, estimator, r"has shape \(2, 2\) here and \(\d+, \d+\) there")


def with_parameters(**changes):
    return {name: array for name, array in (weights() | changes).items() if array is not None}


@pytest.mark.parametrize(
    ("parameters", "says"),
    [
        (with_parameters(w1=np.ones((3, 5))), r"'w1' is float64 \(3, 5\) here and .* \(3, 4\)"),
        (with_parameters(w1=np.ones((3, 4), np.float32)), "'w1' is float32 .* float64"),
        (with_parameters(w3=np.ones(2)), r"'w3' is float64 \(2,\) here and absent there"),
        (with_parameters(b2=None), "'b2' is absent here and float64"),
    ],
    ids=["shape", "type", "new", "gone"],
)
def test_a_state_of_other_parameters_is_refused(saved, parameters, says):
    path, estimator = saved
    refuse(path, estimator, says, parameters)


def test_every_difference_is_listed(saved):
    path, _ = saved
    changed = with_parameters(w1=np.ones((3, 5)), b2=None)
    message = refuse(path, make(approx="diagonal"), "another model", changed)
    for part in ("4 factors here and 5 there", "LayerSquare", "'w1'", "'b2'"):
        assert part in message


# -- writing ---------------------------------------------------------------------------------------


def test_a_place_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").write_bytes(b"old")
    (tmp_path / "folder").mkdir()
    for place in ("none/s", "file/s", "folder"):
        with pytest.raises(ke.InputError, match=f"cannot write .*{place}"):
            write_file(tmp_path / place, [b"new"])
    assert {place.name for place in tmp_path.iterdir()} == {"file", "folder"}
    assert (tmp_path / "file").read_bytes() == b"old"
