"""Blocks of a table that embeddings and products read, against the sum of all their terms."""

from itertools import count

import numpy as np
import pytest
from onnx import parser

import kfac_engine as ke
from kfac_engine.curvature.blocks.embedding import TiedTableFB
from kfac_engine.layers.layer_forms import tied_form
from tests import models
from tests.lifecycle import as_matrix, damped_block, observe, power
from tests.training_files.parity import differences

EXACT = 1e-12  # float64 sums of some dozen terms of size one
SINGLE = 1e-4
VOCABULARY, WIDTH, DAMPING = 5, 3, 0.2
GRAPH = {"w": (VOCABULARY, WIDTH)}

# Positions of each use by ids, then of each use by features; towers; sources.
CASES = {
    "language_model": ([(4,)], [(4,)], 1, 1),
    "vectors_of_ids": ([()], [()], 1, 1),
    "two_embeddings": ([(4,), (2, 3)], [(2,)], 1, 1),
    "two_heads": ([(4,)], [(4,), ()], 1, 1),
    "towers": ([(4,)], [(4,)], 2, 1),
    "sources": ([()], [(2,)], 2, 3),
}


def layer(case, dtype=np.float64, n=3, approx="kron"):
    """A registered layer, its gradients ``[source][tower]``, and the values of a batch."""
    lookups, products, towers, sources = case
    rng, number, values = np.random.default_rng(0), count(), {}
    collection = ke.LayerCollection(graph=GRAPH)

    def value(shape, ids=False):
        name = f"v{next(number)}"
        array = rng.integers(-VOCABULARY, VOCABULARY, shape) if ids else rng.normal(size=shape)
        values[name] = array if ids else array.astype(dtype)
        return name

    gradients = [[] for _ in range(sources)]
    for tower in range(towers):
        inputs = [value((n, *t), ids=True) for t in lookups]
        inputs += [value((n, *t, WIDTH)) for t in products]
        outputs = [f"s{tower}.{i}" for i in range(len(inputs))]
        form = tied_form(VOCABULARY, len(lookups))
        collection.register("tied_embedding", "w", form, inputs, outputs, approx)
        for source in gradients:
            rows = [value((n, *t, WIDTH)) for t in lookups]
            source.append([*rows, *(value((n, *t, VOCABULARY)) for t in products)])
    return collection, gradients, values


def terms(collection, gradients, values, lookups):
    """Row by row: features and entries of the table whose gradients are multiplied."""
    (block,) = collection.get_blocks()
    inputs = [names for names, _ in block._parts]
    for source in gradients:
        for names, ds in zip(inputs, source, strict=True):
            for use, (a, g) in enumerate(zip(names, ds, strict=True)):
                rows = values[g].reshape(-1, values[g].shape[-1])
                if use < lookups:
                    hot = np.eye(VOCABULARY)[values[a].reshape(-1)]
                    yield from zip(rows, hot, strict=True)
                else:
                    yield from zip(values[a].reshape(-1, WIDTH), rows, strict=True)


def truth(case, *made, n=3):
    """Both factors, from the dense sum of ``h hᵀ ⊗ δ δᵀ``: the mean over the examples."""
    F = sum(np.kron(np.outer(h, h), np.outer(d, d)) for h, d in terms(*made, lookups=len(case[0])))
    F = F.reshape(WIDTH, VOCABULARY, WIDTH, VOCABULARY) / (n * case[2])
    A, G = np.einsum("ivjv->ij", F), np.diag(np.einsum("iviv->v", F))
    return A, G / np.trace(G)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.parametrize("approx", ["kron", "kron_both_diag"])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(np.float64, EXACT), (np.float32, SINGLE)], ids=["double", "single"]
)
def test_block_is_the_product_of_partial_traces(case, dtype, tolerance, approx):
    made = layer(case, dtype, approx=approx)
    block = observe(*made[:2], [made[2]], damping=DAMPING, exps=(-1, -0.5), cholesky=True)
    A, G = truth(case, *made)
    A = A if approx == "kron" else np.diag(np.diag(A))
    found = block.full_fisher_block()
    np.testing.assert_allclose(found, np.kron(A, G), atol=tolerance * np.trace(A))
    B = damped_block(A, G, DAMPING, 1)
    packed = lambda parts: parts[0].T  # noqa: E731
    for product, exp in ((block.multiply_inverse, -1), (block.multiply, 1)):
        matrix = as_matrix(product, [GRAPH["w"]], packed, dtype)
        expected = power(B, exp)
        np.testing.assert_allclose(matrix, expected, atol=10 * tolerance * abs(expected).max())
    root = as_matrix(block.multiply_cholesky, [GRAPH["w"]], packed, dtype)
    np.testing.assert_allclose(root @ root.T, B, atol=10 * tolerance * abs(B).max())


def test_batches_are_averaged_before_the_division_by_the_trace():
    case = CASES["language_model"]
    collection, gradients, first = layer(case)
    second = {n: v if v.dtype.kind == "i" else 3 * v for n, v in first.items()}
    block = observe(collection, gradients, [first, second], decay=0.5)
    sums = [np.kron(*truth(case, collection, gradients, v)) for v in (first, second)]
    assert np.trace(block.full_fisher_block()) == pytest.approx(
        np.trace(sums[0]) / 3 + 2 * np.trace(sums[1]) / 3
    )


def test_ids_outside_the_table_add_nothing():
    """As in OneHot, whose row of zeros selects no row of the table."""
    case = CASES["vectors_of_ids"]
    collection, gradients, values = layer(case)
    (ids,) = [name for name, array in values.items() if array.dtype.kind == "i"]
    outside = values | {ids: np.array([0, VOCABULARY, -VOCABULARY - 1])}
    epsilon = values[gradients[0][0][0]].copy()
    epsilon[1:] = 0
    inside = values | {ids: np.array([0, 1, 1]), gradients[0][0][0]: epsilon}
    found = observe(collection, gradients, [outside])
    expected = np.kron(*truth(case, collection, gradients, inside))
    np.testing.assert_allclose(found.full_fisher_block(), expected, atol=EXACT)


# -- in an engine ----------------------------------------------------------------------------------


def test_block_of_one_feature_is_the_dense_fisher_matrix():
    """Sigmoids have independent entries, and a head and an embedding have losses of their own."""
    model = parser.parse_model(
        f"""<ir_version: 8, opset_import: ["": 18]>
        g (int64[N] ids, float[N,1] h) => (float[N,{VOCABULARY}] z, float[N,1] rows)
        <float[{VOCABULARY},1] table = {{0.1, -0.4, 0.8, 0.3, -0.7}}>
        {{ rows = Gather(table, ids)  t = Transpose(table)  z = MatMul(h, t) }}"""
    )
    rng = np.random.default_rng(0)
    inputs = {"ids": np.array([0, 3, 3, 1]), "h": rng.normal(size=(4, 1)).astype(np.float32)}
    engine = ke.Engine.from_onnx(
        model,
        loss={"z": "multi_bernoulli", "rows": "normal"},
        estimation_mode="exact",
        reduction="batch_mean",
    )
    assert [layer.kind for layer in engine.layers] == ["tied_embedding"]
    trace = engine.trace(inputs)
    targets = {"z": np.zeros((4, VOCABULARY), np.int64), "rows": np.zeros((4, 1), np.float32)}
    engine.step(inputs, targets)
    p = 1 / (1 + np.exp(-trace["z"].astype(np.float64)))
    expected = (inputs["h"] ** 2 * p * (1 - p)).mean(axis=0)
    single = ke.Engine.from_onnx(
        model, loss="normal", output="rows", estimation_mode="exact", reduction="batch_mean"
    )
    single.step(inputs, targets["rows"])
    ((variance,),) = single.estimator.factors[1].cov
    expected += variance * np.bincount(inputs["ids"], minlength=VOCABULARY) / 4
    (block,) = engine.collection.get_blocks()
    np.testing.assert_allclose(block.full_fisher_block(), np.diag(expected), atol=1e-6)


def heads(spelling, width=4):
    """A table with an embedding and a head, written in another way."""
    net = models.Net()
    table = net.weight("table", models.VOCABULARY, width)
    net.op("Gather", table, "input", to="rows")
    if spelling == "gemm":
        axes = net.constant("axes", np.array([1]))
        x = net.op("ReduceMean", "rows", axes, to="mean", keepdims=0)
        net.op("Gemm", x, table, net.weight("b", models.VOCABULARY), to="output", transB=1)
        return net.model({"input": ["batch", 3]}, {"output": ["batch", models.VOCABULARY]}, "int64")
    if spelling == "shifted":  # a decoder whose encoder reads the table, too
        minus = net.op("Neg", "input", to="other")
        both = net.op("Add", "rows", net.op("Gather", table, minus, to="rows2"), to="both")
    else:
        both = net.op("Tanh", "rows", to="both")
    columns = net.op("Transpose", table, to="columns", perm=[1, 0])
    logits = net.op("MatMul", both, columns, to="output" if spelling != "soft" else "logits")
    outputs = models.VOCABULARY
    if spelling == "soft":  # a mixture of rows
        net.op("MatMul", net.op("Softmax", logits, to="p"), table, to="output")
        outputs = width
    return net.model({"input": ["batch", 3]}, {"output": ["batch", 3, outputs]}, "int64")


@pytest.mark.parametrize(
    ("spelling", "inputs"),
    [
        ("plain", ("input", "both")),
        ("gemm", ("input", "mean")),
        ("shifted", ("input", "other", "both")),
    ],
)
def test_table_with_an_embedding_and_a_head_has_a_layer(spelling, inputs):
    layer, *rest = ke.Engine.from_onnx(heads(spelling), loss="categorical").layers
    assert (layer.kind, layer.parameters, layer.inputs) == ("tied_embedding", ("table",), inputs)
    assert layer.factor_shapes == ((4, 4), (models.VOCABULARY,))
    assert [other.parameters for other in rest] == ([("b",)] if spelling == "gemm" else [])


def test_wide_features_have_a_diagonal():
    (layer,) = ke.Engine.from_onnx(heads("plain", 1026), loss="categorical").layers
    assert layer.approximation == "kron_both_diag"
    assert layer.factor_shapes == ((1026,), (models.VOCABULARY,))


def test_table_whose_rows_are_mixed_has_no_layer():
    (layer,) = ke.Engine.from_onnx(heads("soft"), loss="normal").layers
    assert layer.kind == "generic"
    assert "used 3 times, by Gather, MatMul: no approximation covers a product" in layer.reason


def test_checkpoint_restores_the_steps(tmp_path):
    model = models.tied_table()
    inputs = models.random_inputs(model, 4)
    targets = np.random.default_rng(0).integers(0, models.VOCABULARY, (4, 3))
    one, two = (ke.Engine.from_onnx(model, loss="categorical", seed=i) for i in range(2))
    one.step(inputs, targets)
    one.save(tmp_path / "state")
    two.load(tmp_path / "state")
    results = [engine.step(inputs, targets).natural_gradients["table"] for engine in (one, two)]
    np.testing.assert_array_equal(*results)


def test_training_file_has_the_steps_of_the_default(tmp_path):
    # Long texts do not come again; then the decay of Python would grow, and that of the file not.
    draw = lambda rng, n: rng.integers(0, models.VOCABULARY, (n, 12))  # noqa: E731
    found = differences(models.tied_table(length=12), "kfac", tmp_path / "files", draw, steps=6)
    assert max(found) < 1e-3


def test_block_is_that_of_its_class():
    engine = ke.Engine.from_onnx(models.tied_table(), loss="categorical")
    block = engine.collection.fisher_blocks["table"]
    assert isinstance(block, TiedTableFB)
    assert repr(block).startswith("<TiedTableFB of table")
