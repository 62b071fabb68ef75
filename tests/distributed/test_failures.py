"""A failure of one rank is the same error on all ranks, and changes the state of none."""

from threading import get_ident
from types import SimpleNamespace

import numpy as np
import pytest

import kfac_engine as ke
from kfac_engine.distributed import messages
from kfac_engine.engine import batch_shards, engine as engine_module
from kfac_engine.engine.options import DISTRIBUTIONS
from tests import models
from tests.comparing import assert_arrays_equal
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
        assert_arrays_equal(natural, expected)


def fail(*_, **__):
    raise MemoryError("no memory left")


def without_memory(place):
    """One rank has no memory in a function of an object of a run."""
    return lambda job, patch: patch.setattr(*place(job), fail)


# The object and the function that a phase calls.
MEASURE = without_memory(lambda job: (job.engine.fisher.sources, "of_batch"))
REFRESH = without_memory(
    lambda job: (job.engine.collection.backend.linalg, "begin_damped_inverses")
)
PRECONDITION = without_memory(lambda job: (job.engine.fisher.division, "owned"))
WAIT = without_memory(lambda job: (job.engine.estimator.factors[0], "wait"))
PRODUCTS = without_memory(lambda job: (job.products, "_computer"))


def two_batches(call):
    """Call a method with a batch, and with the next one, which refreshes."""
    return lambda job: [getattr(job.engine, call)(*part) for part in job.parts]


def save_whole_averages(job):
    job.engine.synchronize()
    job.engine.save(job.file)


def setting(name, value):
    return lambda job, patch: setattr(job.engine, name, value)


NO_MEMORY = "rank 1 of 3 refused: MemoryError: no memory"
# What rank 1 does, what all ranks then call, and their error; they go on after it if rank 1 can.
FAILURES = {
    "measurement of a step": (MEASURE, two_batches("step"), NO_MEMORY),
    "refresh of a step": (REFRESH, two_batches("step"), NO_MEMORY),
    "products of a step": (PRECONDITION, two_batches("step"), NO_MEMORY),
    "measurement of statistics": (MEASURE, two_batches("observe"), NO_MEMORY),
    "refresh of statistics": (REFRESH, two_batches("observe"), NO_MEMORY),
    "save": (WAIT, lambda job: job.engine.save(job.file), NO_MEMORY),
    "save of whole averages": (WAIT, save_whole_averages, NO_MEMORY),
    "inverses": (REFRESH, lambda job: job.engine.estimator.update_inverses(), NO_MEMORY),
    "Fisher products": (
        PRODUCTS, lambda job: job.products.multiply_fisher(job.engine.parameters), NO_MEMORY),
    "quadratic forms": (
        PRODUCTS, lambda job: job.products.quadratic_forms(job.engine.parameters), NO_MEMORY),
    "damping": (setting("damping", 0.5), two_batches("step"), "rank 1 has other counters"),
    "schedule": (
        setting("schedule", ke.Schedule(refresh_every=7)), two_batches("step"),
        "rank 1 has other counters"),
}  # fmt: skip


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
@pytest.mark.parametrize(("change", "call", "message"), FAILURES.values(), ids=FAILURES)
def test_a_failure_of_one_rank_is_an_error_of_all(change, call, message, distribution, tmp_path):
    data = list(batches("mlp", 3))

    def work(communicator):
        engine = engine_of(communicator, distribution=distribution)
        first, *parts = [part_of(communicator, batch) for batch in data]
        engine.step(*first)
        products = engine.curvature_products(engine.trace(*first))
        job = SimpleNamespace(
            engine=engine, products=products, parts=parts, file=tmp_path / "state"
        )
        with pytest.MonkeyPatch.context() as patch:
            if communicator.rank == 1:
                change(job, patch)
            with pytest.raises(ke.RankError, match=message):
                call(job)
        return engine.step(*parts[1]).loss if message == NO_MEMORY else 0.0

    assert len(set(run(SIZE, work))) == 1


# What all ranks call before any step, rank 1 otherwise than the others; they go on after it.
REFUSED = {
    "first batch": (lambda engine, part, odd: engine.step({} if odd else part[0], part[1]), ""),
    "number of examples": (
        lambda engine, part, odd: engine.curvature_products(
            engine.trace(*part), examples=-1 if odd else None
        ),
        "examples must be",
    ),
}


@pytest.mark.parametrize(("call", "message"), REFUSED.values(), ids=REFUSED)
def test_after_an_input_that_one_rank_refuses_the_next_batch_is_accepted(call, message):
    """Ranks compare parameters in the first batch that all of them have."""
    data = list(batches("mlp", 2))

    def work(communicator):
        engine = engine_of(communicator)
        with pytest.raises(ke.InputError, match=f"rank 1 of 3 refused: {message}"):
            call(engine, part_of(communicator, data[0]), communicator.rank == 1)
        return engine.step(*part_of(communicator, data[1])).loss

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


def test_an_engine_that_one_rank_cannot_make_is_an_error_of_all(monkeypatch):
    """The rank fails after the others have compared their models."""
    check = engine_module.check_ranks

    def check_with_failure(shards, *arguments):
        check(shards, *arguments)
        if shards.agreement.rank == 1:
            fail()

    monkeypatch.setattr(engine_module, "check_ranks", check_with_failure)

    def work(communicator):
        with pytest.raises(ke.RankError, match=NO_MEMORY):
            engine_of(communicator)

    run(SIZE, work)


def scaled(slope=0.1, scale=1.0, weight=0.5):
    """A model of a product, an attribute and a constant."""
    text = """net (float[batch, 4] input) => (float[batch, 3] output) {
      h = MatMul(input, w)
      f = LeakyRelu<alpha = %s>(h)
      output = Mul(f, scale)
    }"""
    constants = {"w": np.full((4, 3), weight, np.float32), "scale": np.float32([scale])}
    return models.parsed(text % slope, constants)


OPTIONS = "rank 1 has other options than rank 0; start all ranks with the same options."
# The model and the options of rank 1, if they are others, and what the error of all ranks says.
OTHER = {
    "damping": (scaled(), {"damping": 0.2}, OPTIONS),
    "powers": (scaled(), {"exps": (-0.5,)}, OPTIONS),
    # Products in another number of threads may be rounded differently.
    "threads": (scaled(), {"threads": 3}, OPTIONS),
    "wrong damping": (scaled(), {"damping": -1.0}, "damping"),
    "wrong powers": (scaled(), {"exps": "a"}, "exps"),
    "unknown option": (scaled(), {"dampling": 1.0}, "dampling"),
    "parameters": (scaled(weight=0.6), {}, "rank 1 has other parameters"),
    "attribute": (scaled(slope=0.2), {}, "rank 1 has other models than rank 0"),
    "constant": (scaled(scale=2.0), {}, "rank 1 has other models than rank 0"),
}


@pytest.mark.parametrize(("model", "options", "message"), OTHER.values(), ids=OTHER)
def test_another_model_or_option_of_one_rank_is_refused_by_all(model, options, message):
    def work(communicator):
        chosen = (model, options) if communicator.rank == 1 else (scaled(), {})
        usual = {"loss": "categorical", "trainable": "w", "communicator": communicator}
        with pytest.raises(ke.KfacError, match=message) as refused:
            ke.Engine.from_onnx(chosen[0], **usual | chosen[1])
        assert isinstance(refused.value, ke.RankError) or " than rank 0" not in message
        return str(refused.value)

    assert len(set(run(SIZE, work))) == 1


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
    ("options", "message"),
    [
        ({"communicator": object()}, "communicator must have rank, size"),
        ({"distribution": "replicated"}, "replicate"),
    ],
)
def test_a_wrong_communicator_or_distribution_is_refused(options, message):
    with pytest.raises(ke.InputError, match=message):
        ke.Engine.from_onnx(models.mlp(), loss="categorical", **options)


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
