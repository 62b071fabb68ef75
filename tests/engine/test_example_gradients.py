"""Blocks of parameters without a layer against the dense Fisher matrix, for several examples.

The parameters below enter in ways that make no layer, or one whose block is the exact one. Their
full and diagonal blocks must therefore equal those of the mode's Fisher matrix, whatever the batch.
"""

import numpy as np
import onnx
import pytest

import kfac_engine as ke
from tests import oracle
from tests.comparing import assert_arrays_equal

N, T, D, C = 16, 3, 4, 2
# float64 throughout; the oracle differentiates numerically and is good to 1e-11.
EXACT = 1e-9
PARAMETERS = ("divisor", "free", "odd", "left", "right", "angle")
LOSSES = ("categorical", "normal", "multi_bernoulli")

HEADER = '<ir_version: 8, opset_import: ["": 18]> g (double[{shape}] x) => (double[{out}] y)'
WEIGHTS = f"""<double[{D}] divisor, double[{T}, 1] free, double[1, {T}, 1] odd, double[{D}, 3] left,
double[3, {C}] right, double[{C}] angle>"""
# A divisor, a bias along positions, a scale along positions, a weight that is a product of two, and
# a bias that is a sine: their gradients reach them through broadcasts, products and functions.
BODY = """
    a = Div(h, divisor)  b = Add(a, free)  c = Mul(b, odd)
    w = MatMul(left, right)  z = MatMul(c, w)  s = Sin(angle)  o = Add(z, s)
"""
SPELLINGS = {
    "batch first": (f"N, {T}, {D}", f"N, {T}, {C}", "h = Identity(x)" + BODY + "y = Identity(o)"),
    "time first": (
        f"{T}, N, {D}", f"{T}, N, {C}",
        "h = Transpose<perm=[1,0,2]>(x)" + BODY + "y = Transpose<perm=[1,0,2]>(o)"),
    "examples before positions in rows": (
        f"N, {T}, {D}", f"M, {C}",
        f"h = Identity(x) {BODY} r = Constant<value_ints=[-1,{C}]>() y = Reshape(o, r)"),
    "positions before examples in rows": (
        f"{T}, N, {D}",
        f"M, {C}",
        f"h = Transpose<perm=[1,0,2]>(x) {BODY} q = Transpose<perm=[1,0,2]>(o)"
        f" r = Constant<value_ints=[-1,{C}]>() y = Reshape(q, r)",
    ),
    "one batch size only": (
        f"{N}, {T}, {D}", f"{N}, {T}, {C}",
        f"k = Constant<value_ints=[{N},{T},{D}]>() h = Reshape(x, k)" + BODY + "y = Identity(o)"),
}  # fmt: skip


def build(spelling="batch first"):
    """A model with weights of its own, and the batch with the examples where they belong."""
    shape, out, body = SPELLINGS[spelling]
    text = HEADER.format(shape=shape, out=out) + WEIGHTS + "{" + body + "}"
    model = onnx.parser.parse_model(text)
    rng = np.random.default_rng(3)
    for info in list(model.graph.value_info):
        if info.name in PARAMETERS:
            dims = [side.dim_value for side in info.type.tensor_type.shape.dim]
            value = rng.uniform(0.3, 1.2, dims)
            model.graph.initializer.append(onnx.numpy_helper.from_array(value, info.name))
    x = rng.normal(size=(N, T, D))
    return model, {"x": x.transpose(1, 0, 2) if shape.startswith(f"{T}, N") else x}


def targets_of(loss, spelling="batch first"):
    rng = np.random.default_rng(4)
    t = {
        "categorical": rng.integers(0, C, (N, T)),
        "normal": rng.normal(size=(N, T, C)),
        "multi_bernoulli": rng.integers(0, 2, (N, T, C)).astype(float),
    }[loss]
    if spelling.startswith(("time", "positions")):
        t = t.swapaxes(0, 1)
    return t.reshape(-1, *t.shape[2:]) if "rows" in spelling else t


def blocks_of(engine):
    """The dense block of each parameter by name; of a joint block the part of each."""
    found = {}
    for key, block in engine.collection.fisher_blocks.items():
        dense, start = block.full_fisher_block(), 0
        for name in (key,) if isinstance(key, str) else key:
            size = engine.parameters[name].size
            found[name] = dense[start : start + size, start : start + size]
            start += size
    return found


def check(engine, fisher, model, diagonal=True):
    where = oracle.parameter_slices(model, PARAMETERS)
    found = blocks_of(engine)
    assert set(found) == set(PARAMETERS)
    for name in PARAMETERS:
        expected = fisher[where[name], where[name]]
        if diagonal:
            found[name], expected = np.diag(found[name]), np.diag(expected)
        np.testing.assert_allclose(found[name], expected, rtol=1e-8, atol=EXACT, err_msg=name)


SCALES = {"mean": 1 / T, "batch_mean": 1, "sum": N}


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("reduction", SCALES)
@pytest.mark.parametrize("mode", ["exact", "empirical"])
def test_the_diagonal_is_that_of_the_modes_fisher_for_sixteen_examples(loss, reduction, mode):
    model, inputs = build()
    t = targets_of(loss)
    engine = ke.Engine.from_onnx(model, loss=loss, reduction=reduction, estimation_mode=mode)
    engine.observe(inputs, t)
    if mode == "exact":
        fisher = oracle.dense_fisher(model, inputs, "y", PARAMETERS, loss)
    else:
        fisher = oracle.dense_empirical_fisher(model, inputs, "y", PARAMETERS, loss, t)
    check(engine, SCALES[reduction] * fisher, model)


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_it_does_not_matter_where_the_examples_lie(spelling):
    plain, first = build()
    model, inputs = build(spelling)
    engine = ke.Engine.from_onnx(
        model,
        loss="categorical",
        estimation_mode="empirical",
        reduction="batch_mean",
        sample_inputs=inputs,
    )
    engine.observe(inputs, targets_of("categorical", spelling))
    t = targets_of("categorical")
    fisher = oracle.dense_empirical_fisher(plain, first, "y", PARAMETERS, "categorical", t)
    check(engine, fisher, plain)


def test_a_model_of_one_batch_size_has_the_same_blocks_in_mode_exact():
    model, inputs = build("one batch size only")
    options = {"estimation_mode": "exact", "reduction": "batch_mean"}
    engine = ke.Engine.from_onnx(model, loss="categorical", **options)
    engine.observe(inputs)
    check(engine, oracle.dense_fisher(*build(), "y", PARAMETERS, "categorical"), model)


def test_random_draws_of_the_model_are_the_same_in_all_examples():
    # The noise of a batch belongs to its examples: the blocks are those of the drawn network.
    body = "u = RandomNormalLike<seed=1.0>(x) h = Mul(x, u)" + BODY + "y = Identity(o)"
    SPELLINGS["noise"] = (f"N, {T}, {D}", f"N, {T}, {C}", body)
    model, inputs = build("noise")
    del SPELLINGS["noise"]
    t = targets_of("normal")
    engine = ke.Engine.from_onnx(model, loss="normal", reduction="batch_mean")
    trace = ke.load_model(model).run(inputs)
    engine.estimator.update_covariances(trace, draws={"loss_0": t})
    plain, _ = build()
    drawn = {"x": inputs["x"] * trace["u"]}
    fisher = oracle.dense_empirical_fisher(plain, drawn, "y", PARAMETERS, "normal", t)
    check(engine, fisher, plain)


@pytest.mark.parametrize("loss", LOSSES)
def test_sampled_targets_give_the_squares_of_each_example(loss):
    model, inputs = build()
    t = targets_of(loss)
    engine = ke.Engine.from_onnx(model, loss=loss)
    trace = ke.load_model(model).run(inputs)
    engine.estimator.update_covariances(trace, draws={"loss_0": t})
    fisher = oracle.dense_empirical_fisher(model, inputs, "y", PARAMETERS, loss, t)
    check(engine, fisher, model)


def test_random_signs_give_the_squares_of_each_example():
    model, inputs = build()
    signs = np.random.default_rng(5).choice([-1.0, 1.0], (N, T, C))
    engine = ke.Engine.from_onnx(model, loss="normal", estimation_mode="curvature_prop")
    engine.estimator.update_covariances(ke.load_model(model).run(inputs), draws={"loss_0": signs})
    # The Fisher matrix of a normal distribution of variance 1/2 is 2·I.
    jac = oracle.jacobian(model, inputs, "y", PARAMETERS)
    g = np.einsum("btc,btcp->bp", np.sqrt(2) * signs, jac)
    check(engine, g.T @ g / N, model)


@pytest.mark.parametrize("mode", ["exact", "empirical"])
def test_the_full_block_is_that_of_the_modes_fisher(mode):
    model, inputs = build()
    t = targets_of("categorical")
    options = {"estimation_mode": mode, "reduction": "batch_mean"}
    engine = ke.Engine.from_onnx(
        model, loss="categorical", approximations={"generic": "full"}, **options
    )
    engine.observe(inputs, t)
    fisher = {
        "exact": lambda: oracle.dense_fisher(model, inputs, "y", PARAMETERS, "categorical"),
        "empirical": lambda: oracle.dense_empirical_fisher(
            model, inputs, "y", PARAMETERS, "categorical", t
        ),
    }[mode]()
    generic = {layer.key for layer in engine.layers if layer.kind == "generic"}
    where = oracle.parameter_slices(model, PARAMETERS)
    found = blocks_of(engine)
    assert {"left", "right", "angle"} <= generic
    for name in generic:
        expected = fisher[where[name], where[name]]
        np.testing.assert_allclose(found[name], expected, rtol=1e-8, atol=EXACT, err_msg=name)


def test_a_refused_batch_changes_neither_blocks_nor_draws():
    model, inputs = build()
    engine = ke.Engine.from_onnx(model, loss="categorical")
    engine.observe(inputs)
    before, state = blocks_of(engine), engine.estimator.rng.bit_generator.state
    with pytest.raises(ke.NonFiniteError):
        engine.observe({"x": inputs["x"] * 1e200})
    assert engine.estimator.rng.bit_generator.state == state
    assert_arrays_equal(before, blocks_of(engine))
