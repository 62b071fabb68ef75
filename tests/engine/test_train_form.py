"""``train_form`` trains a file in inference form like the same network in training form."""

from functools import partial

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

import kfac_engine as ke
from tests import models
from tests.comparing import assert_arrays_equal
from tests.engine.test_inference import in_inference
from tests.graph.running import outputs

MOMENTUM = 0.7
SGD = partial(ke.SGD, learning_rate=0.1)
NORM = ("scale", "shift", "mean", "var")


def norm(net, name, x, width, **attributes):
    operands = [
        net.positive(f"{name}.scale", width),
        net.weight(f"{name}.shift", width),
        net.weight(f"{name}.mean", width),
        net.positive(f"{name}.var", width),
    ]
    return net.op("BatchNormalization", x, *operands, to=name, **attributes)


def network(training=True, dropout=False):
    """Two convolutions with normalizations, and a dense layer, in training or inference form."""
    net = models.Net(seed=3)
    x = net.op("Conv", "input", net.weight("conv0.weight", 4, 2, 3, 3), to="conv0", pads=[1] * 4)
    x = net.op("Relu", norm(net, "norm0", x, 4, momentum=MOMENTUM), to="act0")
    x = net.conv("conv1", x, 4, 3, 3)
    x = net.op("Tanh", norm(net, "norm1", x, 3), to="act1")
    x = net.op("GlobalAveragePool", x, to="pooled")
    x = net.op("Flatten", x, to="flat")
    if dropout:
        x = net.op("Dropout", x, net.constant("ratio", np.float32(0.4)), to="dropped")
    net.op("Gemm", x, net.weight("fc.weight", 3, 5), net.weight("fc.bias", 5), to="output")
    model = net.model({"input": ["batch", 2, 6, 6]}, {"output": ["batch", 5]})
    return in_training(model) if training else model


def in_training(model):
    """Return the model as an exporter writes it in training form."""
    other = onnx.ModelProto()
    other.CopyFrom(model)
    for index, node in enumerate(other.graph.node):
        if node.op_type == "BatchNormalization":
            node.attribute.append(helper.make_attribute("training_mode", 1))
            node.output.extend([f"{node.name}.mean", f"{node.name}.var"])
        if node.op_type == "Dropout":
            node.input.append("mode")
            node.attribute.append(helper.make_attribute("seed", index))
            other.graph.initializer.append(numpy_helper.from_array(np.array(True), "mode"))
    onnx.checker.check_model(other, full_check=True)
    return other


@pytest.fixture
def data():
    rng = np.random.default_rng(0)
    x = rng.standard_normal((8, 2, 6, 6)).astype(np.float32)
    return {"input": x}, rng.integers(0, 5, 8)


def trained(model, data, make=ke.KfacOptimizer, steps=4, **options):
    engine = ke.Engine.from_onnx(model, loss="categorical", **options)
    optimizer = make(engine)
    losses = [optimizer.step(*data).loss for _ in range(steps)]
    return engine, losses


def run(model, inputs):
    return outputs(model, inputs)["output"]


@pytest.mark.parametrize("make", [ke.KfacOptimizer, SGD], ids=["kfac", "sgd"])
@pytest.mark.parametrize("dropout", [False, True], ids=["norms", "norms and dropout"])
def test_train_form_trains_bit_for_bit_like_the_file_in_training_form(data, make, dropout):
    ours, losses = trained(network(False, dropout), data, make, train_form=True)
    theirs, expected = trained(network(True, dropout), data, make)
    assert losses == expected
    assert set(ours.buffers) == {f"norm{i}.{part}" for i in range(2) for part in ("mean", "var")}
    for arrays, others in ((ours.parameters, theirs.parameters), (ours.buffers, theirs.buffers)):
        assert arrays.keys() == others.keys()
        assert_arrays_equal(others, arrays)
    start = {e.name: numpy_helper.to_array(e) for e in network().graph.initializer}
    assert all((array != start[name]).any() for name, array in ours.buffers.items())


@pytest.mark.parametrize("dropout", [False, True], ids=["norms", "norms and dropout"])
def test_export_keeps_the_inference_form_with_updated_statistics(data, tmp_path, dropout):
    model = network(False, dropout)
    engine, _ = trained(model, data, train_form=True)
    engine.export(tmp_path / "trained.onnx")
    written = onnx.load(tmp_path / "trained.onnx")
    # Everything but the values of the initializers is that of the input file.
    assert [e.name for e in written.graph.initializer] == [e.name for e in model.graph.initializer]
    for field in ("node", "input", "output"):
        assert list(getattr(written.graph, field)) == list(getattr(model.graph, field))
    other, _ = trained(network(True, dropout), data)
    expected = run(in_inference(network(True, dropout), other.parameters | other.buffers), data[0])
    np.testing.assert_array_equal(run(tmp_path / "trained.onnx", data[0]), expected)
    # Other sessions may add in another order: a few roundings of float32 sums.
    np.testing.assert_allclose(engine.predict(data[0]), expected, rtol=1e-5, atol=1e-6)
    assert abs(expected - run(model, data[0])).max() > 1e-2


def test_dropouts_in_train_form_draw_anew_in_each_step_and_repeat_in_each_engine(data):
    def losses():
        engine = ke.Engine.from_onnx(network(False, True), loss="categorical", train_form=True)
        return [engine.loss(*data) for _ in range(3)]

    first = losses()
    assert len(set(first)) == 3
    assert losses() == first


@pytest.mark.parametrize("opset", [7, 9, 12])
def test_train_form_reads_nodes_of_older_operator_sets(data, opset):
    model = network(False)
    node = model.graph.node[4]
    assert node.output[0] == "norm1"
    dropped = helper.make_node("Dropout", ["act1"], ["dropped"], name="node_dropped")
    if opset < 12:
        dropped.attribute.append(helper.make_attribute("ratio", 0.25))
    model.graph.node[6].input[0] = "dropped"
    model.graph.node.insert(6, dropped)
    del model.opset_import[:]
    model.opset_import.append(helper.make_opsetid("", opset))
    engine = ke.Engine.from_onnx(model, loss="categorical", train_form=True)
    assert len(engine.buffers) == 4
    assert engine.loss(*data) != engine.loss(*data)


def folded():
    net = models.Net()
    x = net.op("Relu", net.conv("conv0", "input", 2, 4, 3), to="act0")
    x = net.op("Flatten", net.op("GlobalAveragePool", x, to="pooled"), to="flat")
    net.op("Gemm", x, net.weight("fc.weight", 4, 5), to="output")
    return net.model({"input": ["batch", 2, 6, 6]}, {"output": ["batch", 5]})


def test_train_form_refuses_a_model_with_folded_normalizations_by_name():
    with pytest.raises(ke.InputError, match=r"folded into convolutions .* 'node_conv0'") as error:
        ke.Engine.from_onnx(folded(), loss="categorical", train_form=True)
    assert "no BatchNormalization and no Dropout" in str(error.value)
    assert "export the model in training form" in str(error.value)


def test_train_form_notes_folded_normalizations_next_to_a_dropout(data):
    model = folded()
    model.graph.node[-1].input[0] = "dropped"
    dropout = helper.make_node("Dropout", ["flat"], ["dropped"], name="node_dropped")
    model.graph.node.insert(4, dropout)
    engine = ke.Engine.from_onnx(model, loss="categorical", train_form=True)
    (note,) = [n for n in engine.gradients(*data).notes if "folded" in n]
    assert "'node_conv0'" in note
    engine = ke.Engine.from_onnx(network(False), loss="categorical", train_form=True)
    assert not [n for n in engine.gradients(*data).notes if "folded" in n]


def test_train_form_leaves_normalizations_with_computed_statistics(data):
    model = network(False)
    model.graph.node[1].input[3] = "computed"
    model.graph.node.insert(0, helper.make_node("Neg", ["norm0.mean"], ["computed"], name="neg"))
    engine = ke.Engine.from_onnx(model, loss="categorical", train_form=True)
    assert set(engine.buffers) == {"norm1.mean", "norm1.var"}
    (note,) = [n for n in engine.gradients(*data).notes if "train_form" in n]
    assert "'node_norm0'" in note


def test_train_form_changes_nothing_in_a_file_in_training_form(data):
    ours, losses = trained(network(True), data, train_form=True)
    assert losses == trained(network(True), data)[1]
    assert not [n for n in ours.gradients(*data).notes if "train_form" in n]


def test_dropout_without_an_effect_stays_as_it_is():
    model = network(False, True)
    zero = numpy_helper.from_array(np.float32(0), "ratio")
    next(e for e in model.graph.initializer if e.name == "ratio").CopyFrom(zero)
    engine = ke.Engine.from_onnx(model, loss="categorical", train_form=True)
    assert not engine.collection.graph.draws


def shared(names, values=None):
    """The network with two normalizations of equal width, whose operands ``names`` are shared."""
    net = models.Net(seed=3)
    x = net.op("Conv", "input", net.weight("conv0.weight", 4, 2, 3, 3), to="conv0")
    x = net.op("Relu", norm(net, "norm0", x, 4), to="act0")
    x = net.op("Conv", x, net.weight("conv1.weight", 4, 4, 3, 3), to="conv1")
    x = net.op("Relu", norm(net, "norm1", x, 4), to="act1")
    x = net.op("Flatten", net.op("GlobalAveragePool", x, to="pooled"), to="flat")
    net.op("Gemm", x, net.weight("fc.weight", 4, 5), to="output")
    model = net.model({"input": ["batch", 2, 6, 6]}, {"output": ["batch", 5]})
    for index, part in enumerate(NORM, start=1):
        if part in names:
            model.graph.node[4].input[index] = f"norm0.{part}"
    entries = [e for e in model.graph.initializer if e.name not in {f"norm1.{n}" for n in names}]
    del model.graph.initializer[:]
    model.graph.initializer.extend(entries)
    for entry in model.graph.initializer:
        if values is not None and entry.name in values:
            entry.CopyFrom(numpy_helper.from_array(values[entry.name], entry.name))
    return model


INITIAL = {"norm0.mean": np.zeros(4, np.float32), "norm0.var": np.ones(4, np.float32)}


@pytest.mark.parametrize(
    ("names", "values"),
    [(("mean", "var"), None), (NORM, INITIAL)],
    ids=["other weights", "untrained"],
)
def test_statistics_that_normalizations_share_by_chance_become_two(data, tmp_path, names, values):
    model = shared(names, values)
    engine, _ = trained(model, data, SGD, train_form=True)
    assert len(engine.buffers) == 4
    engine.export(tmp_path / "trained.onnx")
    expected = engine.predict(data[0])
    np.testing.assert_allclose(
        run(tmp_path / "trained.onnx", data[0]), expected, rtol=1e-5, atol=1e-6
    )
    apart = [engine.buffers[f"norm0.{n}"] for n in ("mean", "mean.running_mean")]
    assert (apart[0] != apart[1]).any()


def shared_call(first="", second="", stored=np.float32, merged=False, paths=("", "")):
    """One normalization with running statistics of ``stored``, called on two inputs.

    ``first`` and ``second`` are the types of a Cast of the statistics for each call, ``"same"`` for
    an Identity. ``merged`` stores equal arrays once, as an exporter does; ``paths`` are modules.
    """
    net = models.Net(seed=5)
    for name, value in (("scale", 1), ("shift", 0)):
        net.constant(name, np.full(3, value, np.float32))
    for name, value in () if merged else (("mean", 0), ("var", 1)):
        net.constant(name, np.full(3, value, stored))
    results = []
    for call, (x, how) in enumerate((("a", first), ("b", second))):
        names = ["shift", "scale"] if merged else ["mean", "var"]
        for place, name in enumerate(names if how else ()):
            names[place] = net.op("Identity" if how == "same" else "Cast", name, to=f"{name}{call}")
        operands = "scale", "shift", *names
        results.append(net.op("BatchNormalization", x, *operands, to=f"n{call}", momentum=0.9))
    net.op("Mul", *results, to="h")
    net.op("Gemm", "h", net.weight("fc", 3, 5), to="output")
    rows = {"a": ["batch", 3], "b": ["batch", 3]}
    for node in net._nodes:  # ``op`` has a ``to`` of its own
        if node.op_type == "Cast":
            node.attribute.append(helper.make_attribute("to", onnx.TensorProto.FLOAT))
    model = net.model(rows, {"output": ["batch", 5]})
    norms = [node for node in model.graph.node if node.op_type == "BatchNormalization"]
    for node, path in zip(norms, paths, strict=True):
        if path:
            scopes = f"['', '{path}', 'batch_norm']"
            node.metadata_props.add(key="pkg.torch.onnx.name_scopes", value=scopes)
    return model


CALLS = {
    "direct": {},
    "first_through_identity": {"first": "same"},
    "second_through_identity": {"second": "same"},
    "both_through_identity": {"first": "same", "second": "same"},
    "cast_from_double": {"first": "float", "second": "float", "stored": np.float64},
    "cast_from_half": {"first": "float", "second": "float", "stored": np.float16},
    "merged_with_the_weights": {"merged": True, "paths": ("bn", "bn@1")},
}


@pytest.mark.parametrize("options", CALLS.values(), ids=CALLS)
def test_calls_of_one_normalization_move_its_statistics_one_after_the_other(options, tmp_path):
    engine = ke.Engine.from_onnx(shared_call(**options), loss="categorical", train_form=True)
    rng = np.random.default_rng(1)
    inputs = {n: rng.normal(1, 2, (9, 3)).astype(np.float32) for n in ("a", "b")}
    result = engine.step(inputs, rng.integers(0, 5, 9))
    assert not [note for note in result.notes if "train_form" in note]
    mean, var = np.zeros(3), np.ones(3)
    for x in inputs.values():
        mean = 0.9 * mean + 0.1 * x.astype(float).mean(0)
        var = 0.9 * var + 0.1 * x.astype(float).var(0)
    (found_mean,) = (v for n, v in engine.buffers.items() if "mean" in n)
    (found_var,) = (v for n, v in engine.buffers.items() if "var" in n)
    np.testing.assert_allclose(found_mean, mean, rtol=1e-5)
    np.testing.assert_allclose(found_var, var, rtol=1e-5)
    engine.export(tmp_path / "new.onnx")
    (written,) = outputs(tmp_path / "new.onnx", inputs).values()
    np.testing.assert_allclose(engine.predict(inputs), written, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("paths", [("bn1", "bn2"), ("", "")], ids=["modules", "unknown"])
def test_normalizations_with_merged_arrays_have_statistics_of_their_own(paths):
    model = shared_call(merged=True, paths=paths)
    assert len(ke.Engine.from_onnx(model, loss="categorical", train_form=True).buffers) == 4


def test_statistics_of_other_names_of_merged_arrays_are_separate():
    """The older exporter of PyTorch gives merged arrays the names of the modules by Identity."""
    net = models.Net(seed=5)
    for name, value in (("one.weight", 1), ("one.bias", 0)):
        net.constant(name, np.full(3, value, np.float32))
    x = "input"
    for module in ("one", "two"):
        names = [f"{module}.{part}" for part in ("weight", "bias", "running_mean", "running_var")]
        for name, source in zip(names, ("weight", "bias", "bias", "weight"), strict=True):
            if name not in ("one.weight", "one.bias"):
                net.op("Identity", f"one.{source}", to=name)
        x = net.op("BatchNormalization", x, *names, to=f"{module} result")
    net.op("Gemm", x, net.weight("fc", 3, 5), to="output")
    model = net.model({"input": ["batch", 3]}, {"output": ["batch", 5]})
    engine = ke.Engine.from_onnx(model, loss="categorical", train_form=True)
    names = {f"{m}.running_{s}" for m in ("one", "two") for s in ("mean", "var")}
    assert set(engine.buffers) == names


# -- one value of each channel ---------------------------------------------------------------------


def normalized_rows(*spatial):
    net = models.Net(seed=5)
    x = net.op("Conv" if spatial else "Gemm", "input",
               net.weight("w", 4, 3, *(1 for _ in spatial)) if spatial else net.weight("w", 3, 4),
               to="s")  # fmt: skip
    x = net.op("Relu", norm(net, "norm", x, 4), to="act")
    if spatial:
        x = net.op("Flatten", net.op("GlobalAveragePool", x, to="pooled"), to="flat")
    net.op("Gemm", x, net.weight("fc", 4, 5), to="output")
    return net.model({"input": ["batch", 3, *spatial]}, {"output": ["batch", 5]})


def rows_of(n, *spatial):
    rng = np.random.default_rng(0)
    return rng.normal(size=(n, 3, *spatial)).astype(np.float32), rng.integers(0, 5, n)


REFUSED = {
    "step": lambda e: ke.SGD(e, learning_rate=0.1).step(*rows_of(1)),
    "engine": lambda e: e.step(*rows_of(1)),
    "fit": lambda e: ke.fit(e, rows_of(8), batch_size=1, epochs=1),
    "parts": lambda e: ke.fit(e, rows_of(8), batch_size=1, accumulate=4, epochs=1),
    "adamw": lambda e: ke.fit(e, rows_of(8), batch_size=1, epochs=1, optimizer="adamw"),
    "gradients": lambda e: e.gradients(*rows_of(1)),
    "loss": lambda e: e.loss(*rows_of(1)),
    "loss of parts": lambda e: e.loss([rows_of(4), rows_of(1)]),
    "observe": lambda e: e.observe(*rows_of(1)),
}


@pytest.mark.parametrize("train", REFUSED.values(), ids=REFUSED)
def test_one_value_of_each_channel_is_refused(train):
    engine = ke.Engine.from_onnx(normalized_rows(), loss="categorical", train_form=True)
    before = {n: np.array(v) for n, v in {**engine.parameters, **engine.buffers}.items()}
    with pytest.raises(ke.InputError, match="one value for each channel"):
        train(engine)
    assert_arrays_equal(before, {**engine.parameters, **engine.buffers})


def test_one_value_of_each_channel_is_refused_in_files(tmp_path):
    """A file with one example has no other batches."""
    model = normalized_rows()
    model.graph.input[0].type.tensor_type.shape.dim[0].dim_value = 1
    with pytest.raises(ke.InputError, match="one value for each channel"):
        ke.export_training(model, "categorical", train_form=True, path=tmp_path / "files")
    assert not (tmp_path / "files").exists()


@pytest.mark.parametrize("train_form", [True, False])
def test_one_example_of_several_pixels_or_in_inference_form_is_trained(train_form):
    shape = (4, 4) if train_form else ()
    model = normalized_rows(*shape)
    engine = ke.Engine.from_onnx(model, loss="categorical", train_form=train_form)
    before = engine.parameters["w"].copy()
    ke.SGD(engine, learning_rate=0.1).step(*rows_of(1, *shape))
    assert np.isfinite(engine.parameters["w"]).all()
    assert (engine.parameters["w"] != before).any()


def test_statistics_of_two_uses_of_one_normalization_stay_one(data):
    engine = ke.Engine.from_onnx(shared(NORM), loss="categorical", train_form=True)
    assert set(engine.buffers) == {"norm0.mean", "norm0.var"}
    engine.step(*data)
