"""What is not trained costs nothing: backward graphs, statistics, states, files and memory."""

import numpy as np
import pytest
from safetensors import safe_open

import kfac_engine as ke
from tests.comparing import assert_arrays_equal
from tests.models import Net, random_inputs

WIDTH, DEPTH, EXAMPLES = 24, 5, 6
# Patterns of trained parameters, the lowest layer with one of them, and the layers with a trained
# matrix.
CHOICES = {
    "all": ({}, 0, "01234"),
    "last": ({"trainable": ["dense4.*"]}, 4, "4"),
    "last two": ({"trainable": ["dense[34].*"]}, 3, "34"),
    "all but the first": ({"freeze": ["dense0.*"]}, 1, "1234"),
    "first": ({"trainable": ["dense0.*"]}, 0, "0"),
    "one in the middle": ({"trainable": ["dense2.*"]}, 2, "2"),
    "biases": ({"trainable": ["*.bias"]}, 0, ""),
    "biases of the last two": ({"trainable": ["dense[34].bias"]}, 3, ""),
}


def chain(depth=DEPTH):
    """Return dense layers in a row, with hyperbolic tangents between them."""
    net = Net()
    x = "input"
    for layer in range(depth):
        x = net.op("Tanh", x, to=f"act{layer - 1}") if layer else x
        x = net.dense(f"dense{layer}", x, WIDTH, WIDTH)
    return net.model({"input": ["batch", WIDTH]}, {x: ["batch", WIDTH]})


def adapted(rank=2):
    """Return ``chain`` with an added product of two low-rank matrices in each layer."""
    net = Net()
    x = "input"
    for layer in range(DEPTH):
        x = net.op("Tanh", x, to=f"act{layer - 1}") if layer else x
        low = net.op("MatMul", x, net.weight(f"lora{layer}.A", WIDTH, rank), to=f"low{layer}")
        added = net.op("MatMul", low, net.weight(f"lora{layer}.B", rank, WIDTH), to=f"add{layer}")
        x = net.op("Add", net.dense(f"dense{layer}", x, WIDTH, WIDTH), added, to=f"sum{layer}")
    return net.model({"input": ["batch", WIDTH]}, {x: ["batch", WIDTH]})


def data(model, seed=0):
    inputs = random_inputs(model, EXAMPLES, seed)
    return inputs, np.random.default_rng(seed).standard_normal((EXAMPLES, WIDTH)).astype("f4")


def engine_of(model, **choice):
    return ke.Engine.from_onnx(model, loss="normal", threads=1, **choice)


def tensors(path):
    with safe_open(path, "np") as file:
        return {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118


def products(backward):
    return sum(node.op in {"Gemm", "MatMul"} for node in backward.nodes) + len(backward.leaves)


@pytest.mark.parametrize(("choice", "lowest", "weights"), CHOICES.values(), ids=CHOICES)
def test_backward_graph_ends_at_lowest_trained_layer(choice, lowest, weights):
    engine = engine_of(chain(), **choice)
    engine.gradients(*data(chain()))
    # Gradients of parameters, and of pre-activations for statistics. Both pass each layer above the
    # lowest; the matrix of each trained layer needs one product more.
    of_parameters, of_layers = (products(backward) for backward in engine._model.backwards())
    assert of_layers == DEPTH - 1 - lowest
    assert of_parameters == of_layers + len(weights)
    # Inputs of layers are read for gradients of their weights, and results of tangents for theirs.
    read = {name for name in engine._model.fetched() if name.startswith("act")}
    assert read == {f"act{layer}" for layer in range(DEPTH - 1) if layer >= lowest} | {
        f"act{int(layer) - 1}" for layer in weights if layer != "0"
    }


@pytest.mark.parametrize("choice", [choice for choice, *_ in CHOICES.values()], ids=CHOICES)
def test_gradients_and_state_are_those_of_trained_parameters(choice, tmp_path):
    model = chain()
    whole, part = engine_of(model), engine_of(model, **choice)
    expected, found = (engine.gradients(*data(model)).gradients for engine in (whole, part))
    for name in part.parameters:
        np.testing.assert_allclose(found[name], expected[name], rtol=1e-4, atol=1e-6)
    frozen = set(whole.parameters) - set(part.parameters)
    constants = {name: whole.parameters[name].copy() for name in frozen}
    for name, optimizer in {"kfac": ke.KfacOptimizer, "adamw": ke.AdamW}.items():
        path = tmp_path / f"{name}.safetensors"
        steps = optimizer(part)
        for seed in range(3):
            steps.step(*data(model, seed))
        steps.save(path)
        saved = tensors(path)
        assert {n.removeprefix("parameter/") for n in saved if n.startswith("parameter/")} == set(
            part.parameters
        )
        assert not [entry for entry in saved for other in frozen if entry.endswith(f"/{other}")]
        trained = {key.split(".")[0] for key in part.parameters}
        factors = {entry.split("/")[1] for entry in saved if entry.startswith("factor/")}
        assert len(factors) <= 2 * len(trained)
    part.export(tmp_path / "model.onnx")
    exported = engine_of(tmp_path / "model.onnx").parameters
    assert_arrays_equal(exported, constants)


def test_resumed_run_equals_one_run_though_frozen_values_are_not_saved(tmp_path):
    model = chain()

    def run(epochs, **options):
        engine = engine_of(model, trainable="dense4.*", seed=0)
        return ke.fit(
            engine, data(model), epochs=epochs, schedule="constant", batch_size=3, seed=0, **options
        )

    whole = run(4)
    run(2, checkpoint=tmp_path)
    saved = [name for file in tmp_path.rglob("*.safetensors") for name in tensors(file)]
    named = [name for name in saved if "dense" in name]
    assert named
    assert all("dense4" in name for name in named)
    resumed = run(4, checkpoint=tmp_path, resume=True)
    assert_arrays_equal(resumed.engine.parameters, whole.engine.parameters)


def test_frozen_layers_add_only_their_weights_to_memory():
    def announced(depth, **choice):
        return engine_of(chain(depth), **choice).memory(1000)

    shallow = announced(3, trainable=["dense[12].*"])
    deep = announced(13, trainable=["dense1[12].*"])
    assert deep.gradients == shallow.gradients
    assert deep.factors == shallow.factors
    assert deep.activations == shallow.activations
    assert deep.scratch == shallow.scratch
    assert deep.parameters - shallow.parameters == 10 * 4 * (WIDTH + 1) * WIDTH
    # The same layers cost as much again for each, if they are trained.
    whole = announced(13)
    assert whole.activations - deep.activations >= 10 * 4 * 1000 * WIDTH
    assert whole.gradients > 5 * deep.gradients


def test_adapters_need_no_gradient_of_wide_matrices():
    model = adapted()
    engine = engine_of(model, trainable="lora*")
    gradients = engine.gradients(*data(model)).gradients
    assert set(gradients) == {f"lora{layer}.{side}" for layer in range(DEPTH) for side in "AB"}
    whole = engine_of(model).gradients(*data(model)).gradients
    for name, gradient in gradients.items():
        np.testing.assert_allclose(gradient, whole[name], rtol=1e-4, atol=1e-6)
    backward = engine._model.backwards()[0]
    assert not [name for name in (*backward.gradients, *backward.leaves) if "dense" in name]
    wide = [node for node in backward.nodes if any("dense" in name for name in node.inputs)]
    assert len(wide) <= DEPTH - 1  # the gradient passes through each matrix but the lowest

    optimizer = ke.KfacOptimizer(engine)
    losses = [optimizer.step(*data(model)).loss for _ in range(20)]
    assert losses[-1] < 0.8 * losses[0]
    part, all_of = engine.memory(EXAMPLES), engine_of(model).memory(EXAMPLES)
    assert part.gradients == 2 * 4 * DEPTH * 2 * 2 * WIDTH
    assert part.factors < all_of.factors / 1.5
