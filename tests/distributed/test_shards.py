"""Ranks draw the numbers that one process draws for the whole batch, each those of its rows."""

import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from kfac_engine.curvature.estimation_modes import MODES
from kfac_engine.distributed.shards import DrawAxis, RowGenerator, RowRange
from kfac_engine.errors import InputError, ShapeError, UnsupportedError
from kfac_engine.losses import RegisteredLoss
from tests.losses.loss_cases import CASES, by_name

RANKS = (1, 2, 3, 8)
DRAWS = {
    "random": lambda rng, size: rng.random(size),
    "signs": lambda rng, size: rng.integers(0, 2, size),
    "integers": lambda rng, size: rng.integers(-3, 10, size),
    "standard_normal": lambda rng, size: rng.standard_normal(size),
}


@st.composite
def shards(draw, least=0, most=9):
    """Numbers of examples of 1, 2, 3 or 8 ranks."""
    ranks = draw(st.sampled_from(RANKS))
    return tuple(draw(st.lists(st.integers(least, most), min_size=ranks, max_size=ranks)))


def rows_of(counts):
    return [RowRange.of(counts, rank) for rank in range(len(counts))]


def drawn_by_ranks(rngs, counts, kind, size):
    """Draws of all ranks, one after the other along the first axis; ``size`` is of one example."""
    positions, *rest = size
    parts = [
        DRAWS[kind](RowGenerator(rng, rows), (rows.count * positions, *rest))
        for rng, rows in zip(rngs, rows_of(counts), strict=True)
    ]
    return np.concatenate(parts)


def assert_same_state(rngs, one):
    for rng in rngs:
        assert rng.bit_generator.state == one.bit_generator.state


sizes = st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 5))


@given(
    seed=st.integers(0, 99),
    counts=shards(least=1),
    calls=st.lists(st.tuples(st.sampled_from(list(DRAWS)), sizes), min_size=1, max_size=5),
)
def test_draws_of_ranks_are_those_of_one_process(seed, counts, calls):
    one = np.random.default_rng(seed)
    rngs = [np.random.default_rng(seed) for _ in counts]
    for kind, size in calls:
        expected = DRAWS[kind](one, (sum(counts) * size[0], *size[1:]))
        numbers = drawn_by_ranks(rngs, counts, kind, size)
        assert numbers.dtype == expected.dtype
        np.testing.assert_array_equal(numbers, expected)
        assert_same_state(rngs, one)


@given(
    counts=shards(),
    calls=st.lists(
        st.tuples(st.sampled_from(list(DRAWS)), st.integers(1, 5)), min_size=1, max_size=5
    ),
)
def test_a_rank_without_examples_draws_nothing_and_advances(counts, calls):
    one = np.random.default_rng(3)
    rngs = [np.random.default_rng(3) for _ in counts]
    for kind, width in calls:
        expected = DRAWS[kind](one, (sum(counts), width))
        np.testing.assert_array_equal(drawn_by_ranks(rngs, counts, kind, (1, width)), expected)
        assert_same_state(rngs, one)


@given(
    counts=shards(least=1, most=4),
    kind=st.sampled_from(list(DRAWS)),
    shape=st.lists(st.integers(1, 3), min_size=1, max_size=3),
    axis=st.integers(-3, 2),
    positions=st.integers(1, 3),
    positions_first=st.booleans(),
)
def test_examples_may_lie_on_any_axis(counts, kind, shape, axis, positions, positions_first):
    axis = max(-len(shape), min(axis, len(shape) - 1))
    examples = sum(counts)
    order = (positions, examples) if positions_first else (examples, positions)
    index = axis % len(shape)
    split = (*shape[:index], *order, *shape[index + 1 :])
    one = np.random.default_rng(2)
    # The axis of the examples alone.
    expected = DRAWS[kind](one, split)
    alone = index + positions_first
    placements = {"loss": DrawAxis(axis, positions_first)}
    for rows in rows_of(counts):
        rng = np.random.default_rng(2)
        generator = RowGenerator(rng, rows, placements).of("loss")
        size = (*shape[:index], rows.count * positions, *shape[index + 1 :])
        part = np.take(expected, range(rows.start, rows.start + rows.count), alone)
        np.testing.assert_array_equal(DRAWS[kind](generator, size), part.reshape(size))
        assert_same_state([rng], one)


@pytest.mark.parametrize("kind", DRAWS)
def test_numbers_of_others_are_drawn_in_several_pieces(kind):
    counts, size = (3, 70_000, 2), (1, 2)
    one = np.random.default_rng(5)
    rngs = [np.random.default_rng(5) for _ in counts]
    expected = DRAWS[kind](one, (sum(counts), 2))
    np.testing.assert_array_equal(drawn_by_ranks(rngs, counts, kind, size), expected)
    assert_same_state(rngs, one)


def test_numbers_of_others_take_little_memory():
    generator = RowGenerator(np.random.default_rng(0), RowRange(1_000_000, 3, 3_000_000))
    tracemalloc.start()
    try:
        generator.standard_normal((3, 1))
        assert tracemalloc.get_traced_memory()[1] < 2e6  # all of them: 24 MB
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("kind", ["random", "signs"])
def test_numbers_of_others_are_skipped_without_a_draw(kind):
    """More numbers than a machine could draw."""
    rng = np.random.default_rng(0)
    half = RowGenerator(rng, RowRange(1 << 60, 3, 1 << 61))
    assert DRAWS[kind](half, (3, 1)).shape == (3, 1)


def batch_of(case, copies=3):
    """Values of a case, repeated, with different inputs in each copy."""
    noise = np.random.default_rng(11)
    values = {}
    for name, array in case.values().items():
        tiled = np.concatenate([array] * copies)
        moved = tiled * noise.uniform(0.8, 1.2, tiled.shape)
        values[name] = moved if name in case.loss.inputs else tiled
    return values


def cotangents(mode, case, values, rng):
    losses = [RegisteredLoss(name, case.loss, 2.0) for name in ("first", "second")]
    return list(MODES[mode](losses, values, rng))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("case", CASES, ids=by_name)
@settings(max_examples=6)
@given(data=st.data())
def test_cotangents_of_ranks_are_those_of_one_process(mode, case, data):
    if MODES[mode].mat_type == "GGN" and not case.loss.ggn_equals_fisher:
        return
    values = batch_of(case)
    examples = len(values["z"])
    ranks = data.draw(st.sampled_from(RANKS))
    cuts = sorted(data.draw(st.permutations(range(1, examples)))[: ranks - 1])
    counts = np.diff([0, *cuts, examples]).tolist()
    one = np.random.default_rng(examples)
    expected = cotangents(mode, case, values, one)
    parts = []
    for rows in rows_of(counts):
        rng = np.random.default_rng(examples)
        shard = {k: v[rows.start : rows.start + rows.count] for k, v in values.items()}
        parts.append(cotangents(mode, case, shard, RowGenerator(rng, rows)))
        assert_same_state([rng], one)
    for source, of_ranks in zip(expected, zip(*parts, strict=True), strict=True):
        for name in case.loss.inputs:
            joined = np.concatenate([part[name] for part in of_ranks])
            # Other random numbers differ by more than a tenth. Elementary functions may round
            # differently at the end of an array.
            np.testing.assert_allclose(joined, source[name], rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(
    ("counts", "expected"),
    [((5,), [(0, 5)]), ((2, 0, 3), [(0, 2), (2, 0), (2, 3)]), ((0, 4), [(0, 0), (0, 4)])],
)
def test_rows_of_ranks_are_consecutive(counts, expected):
    assert [(rows.start, rows.count) for rows in rows_of(counts)] == expected
    assert {rows.whole for rows in rows_of(counts)} == {sum(counts)}


@pytest.mark.parametrize("numbers", [(2, 3, 4), (-1, 1, 4), (0, 1.5, 4), (5, 0, 4)])
def test_rows_outside_the_batch_are_refused(numbers):
    with pytest.raises(InputError):
        RowRange(*numbers)


@pytest.mark.parametrize(("count", "length"), [(4, 6), (4, 2), (0, 3)])
def test_a_draw_that_is_not_of_the_examples_is_refused(count, length):
    rng = np.random.default_rng(0)
    before = rng.bit_generator.state
    with pytest.raises(ShapeError, match=f"for {count} examples"):
        RowGenerator(rng, RowRange(1, count, 8)).random((length, 2))
    assert rng.bit_generator.state == before


def test_other_draws_are_refused_by_name():
    rng = RowGenerator(np.random.default_rng(0), RowRange(0, 1, 2))
    with pytest.raises(UnsupportedError, match=r"rng\.poisson"):
        rng.poisson(3.0, (1, 2))
    assert not hasattr(rng, "no_method_of_a_generator")


def test_the_state_of_the_process_can_be_saved_and_restored():
    inner = np.random.default_rng(0)
    rng = RowGenerator(inner, RowRange(1, 2, 4))
    state = rng.bit_generator.state
    first = rng.random((2, 3))
    rng.bit_generator.state = state
    np.testing.assert_array_equal(rng.random((2, 3)), first)
    assert rng.bit_generator is inner.bit_generator
