"""A failure of one rank is the same error on all ranks, and changes the state of none."""

from threading import get_ident

import numpy as np
import onnx
import pytest

import kfac_engine as ke
from kfac_engine.distributed import messages
from kfac_engine.engine import batch_shards, engine as engine_module
from kfac_engine.engine.options import DISTRIBUTIONS
from tests import models
from tests.distributed.test_distributions import batches
from tests.distributed.threads import run

SIZE = 3


def engine_of(communicator, **options):
    options = {"damping": 0.1, "schedule": ke.Schedule(refresh_every=2), **options}
    model = models.mlp(dtype="float64")
    return ke.Engine.from_onnx(model, loss="categorical", communicator=communicator, **options)


def part_of(communicator, batch):
    inputs, targets = batch
    rows = slice(4 * communicator.rank, 4 * communicator.rank + 4)
    return {key: array[rows].copy() for key, array in inputs.items()}, targets[rows].copy()


def state(engine):
    engine.synchronize()
    arrays = [a.copy() for f in engine.estimator.factors for a in f.arrays().values()]
    return arrays, engine.counter, engine.estimator.rng.bit_generator.state


def assert_same_state(one, other):
    for first, second in zip(one[0], other[0], strict=True):
        np.testing.assert_array_equal(first, second)
    assert one[1:] == other[1:]


def spoil_inputs(inputs, targets):
    inputs["input"][0, 0] = np.nan
    return inputs, targets


def lack_input(inputs, targets):
    return {}, targets


def spoil_targets(inputs, targets):
    return inputs, targets + 1000


def another_width(inputs, targets):
    return {key: array[:, :-1] for key, array in inputs.items()}, targets


@pytest.mark.parametrize(
    ("spoil", "kind", "failing", "call"),
    [
        (spoil_inputs, ke.NonFiniteError, 0, "step"),
        (spoil_inputs, ke.NonFiniteError, 2, "observe"),
        (spoil_inputs, ke.NonFiniteError, 1, "gradients"),
        (spoil_inputs, ke.NonFiniteError, 1, "loss"),
        (lack_input, ke.InputError, 1, "step"),
        (spoil_targets, ke.InputError, 2, "step"),
        (spoil_targets, ke.InputError, 0, "observe"),
        (another_width, ke.ShapeError, 2, "step"),
    ],
)
def test_bad_input_of_one_rank_is_refused_by_all(spoil, kind, failing, call):
    data = list(batches("mlp", 3))

    def work(communicator):
        engine = engine_of(communicator)
        engine.step(*part_of(communicator, data[0]))
        before = state(engine)
        inputs, targets = part_of(communicator, data[1])
        if communicator.rank == failing:
            inputs, targets = spoil(inputs, targets)
        with pytest.raises(ke.KfacError) as refused:
            getattr(engine, call)(inputs, targets)
        assert_same_state(before, state(engine))
        after = engine.step(*part_of(communicator, data[2]))
        return refused.value, after.natural_gradients

    def untroubled(communicator):
        engine = engine_of(communicator)
        engine.step(*part_of(communicator, data[0]))
        return engine.step(*part_of(communicator, data[2])).natural_gradients

    expected = run(SIZE, untroubled)[0]
    results = run(SIZE, work)
    for error, natural in results:
        assert isinstance(error, kind)
        assert type(error) is type(results[0][0])
        assert str(error).startswith(f"rank {failing} of 3 refused: ")
        for name, array in expected.items():
            np.testing.assert_array_equal(natural[name], array)


def test_the_batch_after_a_first_one_that_one_rank_refuses_is_accepted():
    """Ranks compare parameters in the first batch that all of them have."""
    data = list(batches("mlp", 2))

    def work(communicator):
        engine = engine_of(communicator)
        inputs, targets = part_of(communicator, data[0])
        if communicator.rank == 1:
            inputs = {}
        with pytest.raises(ke.InputError, match="rank 1 of 3 refused: "):
            engine.step(inputs, targets)
        return engine.step(*part_of(communicator, data[1])).loss

    assert len(set(run(SIZE, work))) == 1


def place_of(engine, phase):
    """The object and the function that a phase of a step calls."""
    return {
        "measure": (engine.fisher.sources, "of_batch"),
        "refresh": (engine.collection.backend.linalg, "begin_damped_inverses"),
        "precondition": (engine.fisher.division, "owned"),
    }[phase]


@pytest.mark.parametrize(
    ("call", "phase"),
    [(call, phase) for call in ("step", "observe") for phase in ("measure", "refresh")]
    + [("step", "precondition")],
)
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_an_exception_inside_a_step_is_an_error_of_all_ranks(call, phase, distribution):
    data = list(batches("mlp", 3))

    def fail(*_, **__):
        raise MemoryError("no memory left")

    def two_steps(communicator, engine):
        for batch in data[1:]:
            getattr(engine, call)(*part_of(communicator, batch))

    def work(communicator):
        engine = engine_of(communicator, distribution=distribution)
        engine.step(*part_of(communicator, data[0]))
        with pytest.MonkeyPatch.context() as patch:
            if communicator.rank == 1:
                patch.setattr(*place_of(engine, phase), fail)
            with pytest.raises(ke.RankError, match="rank 1 of 3 refused: MemoryError: no memory"):
                two_steps(communicator, engine)
        return engine.step(*part_of(communicator, data[2])).loss

    assert len(set(run(SIZE, work))) == 1


def save(engine, products, file):
    engine.save(file)


def save_whole_averages(engine, products, file):
    engine.synchronize()
    engine.save(file)


def update_inverses(engine, products, file):
    engine.estimator.update_inverses()


def multiply_fisher(engine, products, file):
    products.multiply_fisher(engine.parameters)


def quadratic_forms(engine, products, file):
    products.quadratic_forms(engine.parameters)


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
@pytest.mark.parametrize(
    ("call", "failing"),
    [
        (save, lambda engine, _: (engine.estimator.factors[0], "wait")),
        (save_whole_averages, lambda engine, _: (engine.estimator.factors[0], "wait")),
        (update_inverses, lambda engine, _: place_of(engine, "refresh")),
        (multiply_fisher, lambda _, products: (products, "_computer")),
        (quadratic_forms, lambda _, products: (products, "_computer")),
    ],
)
def test_a_rank_that_fails_before_the_messages_of_others_is_an_error_of_all(
    call, failing, distribution, tmp_path
):
    data = list(batches("mlp", 2))

    def fail(*_, **__):
        raise MemoryError("no memory left")

    def work(communicator):
        engine = engine_of(communicator, distribution=distribution)
        engine.step(*part_of(communicator, data[0]))
        products = engine.curvature_products(engine.trace(*part_of(communicator, data[0])))
        with pytest.MonkeyPatch.context() as patch:
            if communicator.rank == 1:
                patch.setattr(*failing(engine, products), fail)
            with pytest.raises(ke.RankError, match="rank 1 of 3 refused: MemoryError: no memory"):
                call(engine, products, tmp_path / "state")
        return engine.step(*part_of(communicator, data[1])).loss

    assert len(set(run(SIZE, work))) == 1


def test_an_engine_that_one_rank_cannot_make_is_an_error_of_all(monkeypatch):
    """The last rank fails after the others have compared their models."""
    check = engine_module.check_ranks

    def check_with_failure(shards, *arguments):
        check(shards, *arguments)
        if shards.agreement.rank == 2:
            raise MemoryError("no memory left")

    monkeypatch.setattr(engine_module, "check_ranks", check_with_failure)

    def work(communicator):
        with pytest.raises(ke.RankError, match="rank 2 of 3 refused: MemoryError: no memory left"):
            engine_of(communicator)

    run(SIZE, work)


@pytest.mark.parametrize("other", ["update_inverses", "synchronize", "loss"])
def test_ranks_that_call_different_methods_are_refused(other):
    batch = next(batches("mlp", 1))

    def work(communicator):
        engine = engine_of(communicator)
        part = part_of(communicator, batch)
        engine.step(*part)
        calls = {
            "update_inverses": engine.estimator.update_inverses,
            "synchronize": engine.synchronize,
            "loss": lambda: engine.loss(*part),
        }
        with pytest.raises(ke.RankError, match="rank 1 has called another method than rank 0"):
            calls[other]() if communicator.rank == 1 else engine.step(*part)

    run(SIZE, work)


def test_ranks_with_different_numbers_of_positions_are_refused():
    inputs, targets = next(batches("token_mlp", 1))
    model = models.token_mlp(dtype="float64")
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.shape.dim[1].dim_param = "length"

    def work(communicator):
        engine = ke.Engine.from_onnx(model, loss="categorical", communicator=communicator)
        length = 3 - communicator.rank
        part = {key: array[:2, :length] for key, array in inputs.items()}
        with pytest.raises(ke.ShapeError, match="pad the examples") as refused:
            engine.step(part, targets[:2, :length])
        return str(refused.value)

    assert len(set(run(2, work))) == 1


@pytest.mark.parametrize(
    ("options", "differing"),
    [
        ({"damping": 0.2}, "options"),
        ({"exps": (-0.5,)}, "options"),
        # Products in another number of threads may be rounded differently.
        ({"threads": 3}, "options"),
    ],
)
def test_ranks_with_other_options_are_refused_at_construction(options, differing):
    def work(communicator):
        with pytest.raises(ke.RankError) as refused:
            engine_of(communicator, **(options if communicator.rank == 2 else {}))
        return str(refused.value)

    for text in run(SIZE, work):
        assert text == (
            f"rank 2 has other {differing} than rank 0; start all ranks with the same {differing}."
        )


def test_ranks_with_other_parameters_are_refused_at_construction():
    def work(communicator):
        model = models.mlp()
        weight = onnx.numpy_helper.to_array(model.graph.initializer[0])
        changed = onnx.numpy_helper.from_array(weight + communicator.rank, "fc0.weight")
        model.graph.initializer[0].CopyFrom(changed)
        with pytest.raises(ke.RankError, match="rank 1 has other parameters"):
            ke.Engine.from_onnx(model, loss="categorical", communicator=communicator)

    run(2, work)


@pytest.mark.parametrize("change", ["attribute", "constant"])
def test_ranks_with_another_attribute_or_constant_are_refused(change):
    text = """<ir_version: 8, opset_import: ["": 18]>
    net (float[batch, 4] input) => (float[batch, 3] output) <float[4, 3] w = {%s}> {
      h = MatMul(input, w)
      f = LeakyRelu<alpha = %s>(h)
      output = Mul(f, scale)
    }"""

    def work(communicator):
        weights, other = ", ".join(["0.5"] * 12), communicator.rank == 1
        slope = 0.2 if other and change == "attribute" else 0.1
        model = onnx.parser.parse_model(text % (weights, slope))
        scale = np.float32([2.0 if other and change == "constant" else 1.0])
        model.graph.initializer.append(onnx.numpy_helper.from_array(scale, "scale"))
        with pytest.raises(ke.RankError, match="rank 1 has other models than rank 0"):
            ke.Engine.from_onnx(model, loss="categorical", communicator=communicator, trainable="w")

    run(2, work)


@pytest.mark.parametrize("call", ["step", "observe"])
def test_states_with_other_counters_are_refused(call, tmp_path):
    data = list(batches("mlp", 2))

    def work(communicator):
        engine = engine_of(None)
        for batch in data[: 1 + communicator.rank]:
            engine.step(*batch)
        engine.save(tmp_path / f"{communicator.rank}")
        engine = engine_of(communicator)
        engine.load(tmp_path / f"{communicator.rank}")
        with pytest.raises(ke.RankError, match="rank 1 has other counters, random generators, "):
            getattr(engine, call)(*part_of(communicator, data[0]))

    run(2, work)


@pytest.mark.parametrize(
    ("options", "named"),
    [({"damping": -1.0}, "damping"), ({"exps": "a"}, "exps"), ({"dampling": 1.0}, "dampling")],
)
def test_options_of_one_rank_that_are_wrong_are_an_error_of_all(options, named):
    def work(communicator):
        with pytest.raises(ke.KfacError, match=named) as refused:
            engine_of(communicator, **(options if communicator.rank == 1 else {}))
        return str(refused.value)

    assert len(set(run(2, work))) == 1


@pytest.mark.parametrize(
    ("name", "value"), [("damping", 0.5), ("schedule", ke.Schedule(refresh_every=7))]
)
def test_settings_that_one_rank_has_changed_are_refused(name, value):
    data = list(batches("mlp", 2))

    def work(communicator):
        engine = engine_of(communicator)
        engine.step(*part_of(communicator, data[0]))
        if communicator.rank == 1:
            setattr(engine, name, value)
        with pytest.raises(ke.RankError, match="rank 1 has other counters"):
            engine.step(*part_of(communicator, data[1]))

    run(SIZE, work)


def test_products_of_curvature_that_one_rank_refuses_are_an_error_of_all():
    data = list(batches("mlp", 1))

    def work(communicator):
        engine = engine_of(communicator)
        trace = engine.trace(*part_of(communicator, data[0]))
        with pytest.raises(ke.InputError, match="rank 1 of 3 refused: examples must be"):
            engine.curvature_products(trace, examples=-1 if communicator.rank == 1 else None)
        return engine.loss(*part_of(communicator, data[0]))

    assert len(set(run(SIZE, work))) == 1


@pytest.mark.parametrize("call", ["step", "observe", "gradients", "loss"])
def test_parameters_that_one_rank_has_changed_are_refused(call):
    data = list(batches("mlp", 2))

    def work(communicator):
        engine = engine_of(communicator)
        if communicator.rank == 1:
            engine.set_parameters({n: v + 1e-9 for n, v in engine.parameters.items()})
        with pytest.raises(ke.RankError, match="rank 1 has other parameters than rank 0"):
            getattr(engine, call)(*part_of(communicator, data[0]))
        assert engine.counter == 0

    run(SIZE, work)


def test_an_object_without_collectives_is_no_communicator():
    with pytest.raises(ke.InputError, match="communicator must have rank, size"):
        ke.Engine.from_onnx(models.mlp(), loss="categorical", communicator=object())


def test_an_unknown_distribution_is_refused():
    with pytest.raises(ke.InputError, match="replicate"):
        ke.Engine.from_onnx(models.mlp(), loss="categorical", distribution="replicated")


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
@pytest.mark.parametrize("place", [(batch_shards, "sum_arrays"), (messages, "pack")])
def test_an_error_before_a_message_that_is_no_vote_ends_its_rank_alone(
    place, distribution, monkeypatch
):
    data, ranks = list(batches("mlp", 3)), {}
    module, name = place
    call = getattr(module, name)

    def fail_on_one(*arguments, **options):
        if ranks.get(get_ident()) == 1:
            raise MemoryError("no memory left")
        return call(*arguments, **options)

    def work(communicator):
        engine = engine_of(communicator, distribution=distribution)
        engine.step(*part_of(communicator, data[0]))
        ranks[get_ident()] = communicator.rank
        for batch in data[1:]:  # the last step refreshes
            engine.step(*part_of(communicator, batch))
        engine.save("nowhere/state")

    monkeypatch.setattr(module, name, fail_on_one)
    # Without the context, the rank votes while the others are in another message.
    with pytest.raises(MemoryError) as raised:
        run(SIZE, work)
    assert raised.value.__notes__ == [
        "Rank 1 of 3 has failed before a message in which the others wait; end all ranks."
    ]
