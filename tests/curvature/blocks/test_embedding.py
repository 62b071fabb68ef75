"""Embedding blocks against identifiers written out as rows of zeros and ones."""

from itertools import product

import numpy as np
import pytest

import kfac_engine as ke
from tests import models
from tests.lifecycle import Block, as_matrix, damped_block, observe, plain_packing, second_moment

EXACT = 1e-12  # float64 sums of some dozen terms of size one
DAMPING = 0.2
VOCABULARY, WIDTH = 6, 3
SHAPES = [(VOCABULARY, WIDTH)]
GRAPH = {"w": (VOCABULARY, WIDTH)}
IDS = np.array([[0, 2, 2], [5, 1, 2], [1, 1, 1], [4, 2, 0]])  # 3 is absent, 1 and 2 are repeated


def batch(ids, seed=0, dtype=np.float64, positions=False):
    rng = np.random.default_rng(seed)
    rows = ids.shape if positions else ids.shape[:1]
    return {"ids": ids, "ds": rng.normal(size=(*rows, WIDTH)).astype(dtype)}


def diagonal(ids, how):
    """The input factor, by a loop over rows."""
    rows = ids.reshape(-1, 1) if how == "positions" or ids.ndim == 1 else ids
    total = np.zeros(VOCABULARY)
    for row in rows:
        n_hot = np.zeros(VOCABULARY)
        for index in row:
            n_hot[index] = n_hot[index] + 1 if how == "count_repeats" else 1
        total += n_hot if how == "count_repeats" else n_hot**2
    return total / len(rows)


def registered(kind="embedding", key="w", config=None, **options):
    collection = ke.LayerCollection(graph=GRAPH, config=config)
    getattr(collection, f"register_{kind}")(key, **{"inputs": "ids", "outputs": "s"} | options)
    return collection


HOW = {"once": {}, "count_repeats": {"count_repeats": True}, "positions": {"positions": True}}
every_count = pytest.mark.parametrize("how", HOW)


def truth(how, values):
    """``A``, ``G`` and the number of positions."""
    ds = values["ds"].reshape(-1, WIDTH)
    A = np.diag(diagonal(values["ids"], how))
    return A, second_moment(ds), len(ds) // len(values["ids"])


IDS_OF = {"2d": IDS, "1d": IDS[:, 0], "int32": IDS.astype(np.int32)}


def block_of(how, ids):
    def of_size(n, seed, dtype=np.float64):
        return batch(np.resize(ids, (n, *ids.shape[1:])), seed, dtype, how == "positions")

    def in_towers(towers):
        collection = ke.LayerCollection(graph=GRAPH)
        for tower in range(towers):
            names = [f"{name}{tower}" if towers > 1 else name for name in ("ids", "s")]
            collection.register_embedding("w", *names, **HOW[how])
        return collection

    locations = ids.shape[1] if how == "positions" and ids.ndim == 2 else 1

    def matrix(values):
        A, G, t = truth(how, values)
        return t * np.kron(A, G)

    def damped(values, damping):
        A, G, t = truth(how, values)
        return damped_block(A, G, damping, t)

    return Block(
        of_size, in_towers, matrix, damped, SHAPES, plain_packing, exact=EXACT,
        single=1e-4, locations=locations,
    )  # fmt: skip


BLOCKS = {f"{how} {name}": block_of(how, ids) for how in HOW for name, ids in IDS_OF.items()}


@every_count
def test_rows_are_multiplied_as_the_dense_vector_they_stand_for(how):
    values = batch(IDS, positions=how == "positions")
    block = observe(
        registered(**HOW[how]), [["ds"]], [values], damping=DAMPING, exps=(-1, 0.3), cholesky=True
    )
    rng = np.random.default_rng(1)
    for indices in ([4, 1], [3], [], [2, 0, 2]):
        rows = ke.Rows(np.array(indices, int), rng.normal(size=(len(indices), WIDTH)), VOCABULARY)
        vector = np.zeros(SHAPES[0])
        np.add.at(vector, rows.indices, rows.values)
        for multiply in (
            block.multiply,
            block.multiply_inverse,
            lambda v: block.multiply_matpower(v, 0.3),
            block.multiply_cholesky,
            lambda v: block.multiply_cholesky(v, transpose=True),
            block.multiply_cholesky_inverse,
            lambda v: block.multiply_cholesky_inverse(v, transpose=True),
        ):
            found = multiply(rows)
            assert isinstance(found, ke.Rows)
            assert found.num_rows == VOCABULARY
            np.testing.assert_array_equal(found.indices, rows.indices)
            dense = np.zeros(SHAPES[0])
            np.add.at(dense, found.indices, found.values)
            np.testing.assert_allclose(dense, multiply(vector), atol=EXACT)


# All uses in one tensor or listed, for identifiers and for gradients.
USES = 2
LAYOUTS = {
    "lists": lambda x: {f"{i}": u for i, u in enumerate(x)},
    "folded": lambda x: {"": x.reshape(-1, *x.shape[2:])},
    "stacked": lambda x: {"": x},
}


def laid_out(name, layout, x):
    named = {f"{name}{suffix}": array for suffix, array in LAYOUTS[layout](x).items()}
    return named, list(named) if layout == "lists" else name


# (uses, n) is missing among single identifiers: an embedding reads it as (uses·n, ids).
@pytest.mark.parametrize(
    ("kind", "ids_layout"),
    [*product(["several", "dense_inputs"], LAYOUTS), ("single", "lists"), ("single", "folded")],
)
@pytest.mark.parametrize("ds_layout", LAYOUTS)
def test_uses_are_rows_of_both_factors(kind, ids_layout, ds_layout):
    rng = np.random.default_rng(4)
    ids = np.stack([IDS, IDS[::-1] // 2])
    if kind != "several":
        ids = ids[:, :, 0]
    ds = rng.normal(size=(USES, 4, WIDTH))
    a, inputs = laid_out("ids", ids_layout, ids)
    g, gradients = laid_out("ds", ds_layout, ds)
    outputs = ["s0", "s1"] if ds_layout == "lists" else "s"
    if kind == "dense_inputs":
        options = {"dense_inputs": False, "approx": "kron_indep_in_diag"}
        collection = registered(
            "fully_connected_multi", inputs=inputs, outputs=outputs, num_uses=USES, **options
        )
    else:
        collection = registered("embedding_multi", inputs=inputs, outputs=outputs, num_uses=USES)
    block = observe(collection, [[gradients]], [a | g], damping=DAMPING, exps=(-1,))
    A = np.diag(diagonal(ids.reshape(-1, *ids.shape[2:]), "once"))
    G = second_moment(ds.reshape(-1, WIDTH))
    np.testing.assert_allclose(block.full_fisher_block(), USES * np.kron(A, G), atol=EXACT)
    inverse = as_matrix(block.multiply_inverse, SHAPES, plain_packing)
    expected = np.linalg.inv(damped_block(A, G, DAMPING, USES))
    np.testing.assert_allclose(inverse, expected, atol=1e-10)


@pytest.mark.parametrize("approx", ["kron_in_diag", "kron_both_diag"])
def test_dense_layers_take_identifiers(approx):
    values = batch(IDS[:, 0])
    block = observe(
        registered("fully_connected", approx=approx, dense_inputs=False), [["ds"]], [values]
    )
    A, G, _ = truth("once", values)
    G = np.diag(np.diag(G)) if approx == "kron_both_diag" else G
    np.testing.assert_allclose(block.full_fisher_block(), np.kron(A, G), atol=EXACT)


@pytest.mark.parametrize(
    ("name", "options", "kind"),
    [
        ("EmbeddingKFACFB", {}, "once"),
        ("EmbeddingKFACFB", {"count_repeats": True}, "count_repeats"),
        ("EmbeddingKFACFB", {"positions": True}, "positions"),
        ("EmbeddingKFACMultiIndepFB", {"num_uses": 1}, "once"),
    ],
)
def test_named_blocks_take_the_size_of_the_vocabulary(name, options, kind):
    collection = ke.LayerCollection()
    block = getattr(ke, name)(collection, VOCABULARY, **options)
    block.register_additional_tower("ids", "s")
    collection.register_block("w", block)
    values = batch(IDS, positions=kind == "positions")
    observe(collection, [["ds"]], [values])
    A, G, t = truth(kind, values)
    np.testing.assert_allclose(block.full_fisher_block(), t * np.kron(A, G), atol=EXACT)


def test_negative_identifiers_count_from_the_end():
    ids = np.array([[-1, 0], [2, -6]])
    block = observe(registered(), [["ds"]], [batch(ids)])
    expected = diagonal(ids % VOCABULARY, "once")
    np.testing.assert_allclose(block.input_factor.cov, expected, atol=EXACT)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (np.array([[0, 6]]), "from 0 to 6"),
        (np.array([[-7, 0]]), "from -7 to 0"),
        (np.array([[0.0, 1.0]]), "must be integer"),
        (np.zeros((1, 2, 2), int), "token ids need shape"),
        (np.zeros((0, 2), int), "no example"),
    ],
    ids=["above", "below", "float", "rank", "empty"],
)
def test_identifiers_that_pick_no_row_are_refused_before_anything_moves(ids, message):
    collection = registered()
    block = observe(collection, [["ds"]], [batch(IDS)])
    before = [factor.cov for factor in block.factors]
    with pytest.raises(ke.InputError, match=message):
        block.input_factor.check({"ids": ids})
    for factor, old in zip(block.factors, before, strict=True):
        np.testing.assert_array_equal(factor.cov, old)


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("embedding", {"key": ("w", "b")}, "Bias not supported"),
        ("embedding", {"approx": "diagonal"}, "Bad value 'diagonal' for approx"),
        ("embedding", {"key": "flat"}, "shape of 'flat' is needed"),
        ("embedding_multi", {}, "num_uses"),
        ("fully_connected", {"dense_inputs": False}, "Bad value 'kron' for approx"),
        (
            "fully_connected",
            {"dense_inputs": False, "key": ("w", "b"), "approx": "kron_in_diag"},
            "Bias not supported",
        ),
        ("fully_connected_multi", {"dense_inputs": False, "num_uses": 2}, "'kron_indep'"),
    ],
)
def test_what_does_not_fit_is_refused_at_registration(kind, options, message):
    with pytest.raises(ValueError, match=message):
        registered(kind, **options)


def test_only_embeddings_multiply_rows():
    collection = ke.LayerCollection(graph=GRAPH)
    collection.register_fully_connected("w", "x", "s")
    values = {"x": np.ones((2, VOCABULARY)), "ds": np.ones((2, WIDTH))}
    block = observe(collection, [["ds"]], [values])
    rows = ke.Rows(np.array([1]), np.ones((1, WIDTH)), VOCABULARY)
    with pytest.raises(NotImplementedError, match="not rows"):
        block.multiply(rows)


@pytest.mark.parametrize(
    ("indices", "values", "error"),
    [
        ([1, 2], np.ones((1, 3)), ke.ShapeError),
        ([1], np.ones(3), ke.ShapeError),
        ([6], np.ones((1, 3)), ke.InputError),
        ([-1], np.ones((1, 3)), ke.InputError),
        ([0.5], np.ones((1, 3)), ke.InputError),
    ],
    ids=["count", "rank", "above", "below", "float"],
)
def test_rows_check_themselves(indices, values, error):
    with pytest.raises(error):
        ke.Rows(np.array(indices), values, VOCABULARY)


def test_rows_of_another_table_are_refused():
    block = observe(registered(), [["ds"]], [batch(IDS)])
    with pytest.raises(ke.ShapeError, match="x has 7 rows"):
        block.multiply(ke.Rows(np.array([1]), np.ones((1, WIDTH)), 7))


def test_whole_numbers_in_rows_give_no_whole_products():
    block = observe(registered(), [["ds"]], [batch(IDS)], damping=DAMPING)
    values = np.arange(2 * WIDTH).reshape(2, WIDTH)
    found, expected = (
        block.multiply(ke.Rows(np.array([0, 3]), values.astype(dtype), VOCABULARY)).values
        for dtype in (np.int64, np.float64)
    )
    np.testing.assert_array_equal(found, expected)


def test_an_estimator_multiplies_rows():
    model = models.embedding()
    engine = ke.Engine.from_onnx(model, loss="categorical")
    engine.observe(models.random_inputs(model, batch=3))
    rng = np.random.default_rng(5)
    vectors = {
        name: rng.normal(size=value.shape).astype(np.float32)
        for name, value in engine.parameters.items()
    }
    table = vectors["table"]
    table[1:] = 0
    whole = engine.estimator.multiply_inverse([(v, name) for name, v in vectors.items()])
    vectors["table"] = ke.Rows(np.array([0]), table[:1], len(table))
    rows = engine.estimator.multiply_inverse([(v, name) for name, v in vectors.items()])
    for (expected, name), (found, _) in zip(whole, rows, strict=True):
        if name == "table":
            expected, found = expected[:1], found.values
        np.testing.assert_allclose(found, expected, rtol=1e-6)  # float32 rounding
