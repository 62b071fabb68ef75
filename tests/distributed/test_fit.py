"""``fit`` over several ranks is the run of one process: records, log, checkpoints and errors."""

import json

import numpy as np
import pytest

import kfac_engine as ke
from tests.comparing import assert_arrays_near
from tests.distributed.threads import run
from tests.training import softmax_net as net

X, Y = net.batch(0, n=100)
HELD_OUT = net.batch(1, n=21)
# Of the largest entry. Each step multiplies the roundings of the steps before.
CLOSE = 1e-9
ARGUMENTS = {
    "steps": 13, "batch_size": 24, "validation": HELD_OUT, "metrics": ["loss", "accuracy"],
}  # fmt: skip


def trained(communicator=None, distribution="replicate", data=(X, Y), **options):
    engine = ke.Engine.from_onnx(
        net.model(), loss="categorical", threads=1,
        communicator=communicator, distribution=distribution,
    )  # fmt: skip
    return ke.fit(engine, data, **ARGUMENTS | options)


def assert_same(history, expected, names=("loss", "validation_loss", "accuracy")):
    assert len(history.records) == len(expected.records)
    for record, wanted in zip(history.records, expected.records, strict=True):
        assert record.keys() >= {"step", "loss"}
        for name in names:
            assert record.get(name, 0.0) == pytest.approx(wanted.get(name, 0.0), rel=CLOSE)
    assert_arrays_near(history.engine.parameters, expected.engine.parameters, CLOSE)


class Never(ke.Callback):
    """Ends a run before its first step, in the first process."""

    on_every_rank = False

    def on_run_start(self, optimizer, records):
        return True


def test_a_callback_of_the_first_rank_ends_the_run_of_all_before_its_first_step():
    histories = run(2, lambda ranks: trained(ranks, callbacks=[Never()]))
    assert [history.records for history in histories] == [[], []]


class FailsAtTheEnd(ke.Callback):
    """Fails in one place, in the first process."""

    on_every_rank = False

    def __init__(self, place):
        setattr(self, place, self.fail)

    def fail(self, *_):
        raise OSError("no space left")


@pytest.mark.parametrize("place", ["on_run_end", "final_weights", "close"])
def test_an_error_of_one_rank_at_the_end_of_a_run_is_an_error_of_all(place):
    def work(ranks):
        with pytest.raises(ke.RankError, match="rank 0 of 2 refused: OSError: no space left"):
            trained(ranks, callbacks=[FailsAtTheEnd(place)])

    run(2, work)


@pytest.mark.parametrize(
    ("options", "named"), [({"batch_size": -1}, "batch_size"), ({"optimizer": "nope"}, "nope")]
)
def test_arguments_of_one_rank_that_are_wrong_are_an_error_of_all(options, named):
    def work(ranks):
        with pytest.raises(ke.KfacError, match=named):
            trained(ranks, **(options if ranks.rank else {}))

    run(2, work)


def test_lists_of_batches_of_different_lengths_are_refused():
    def work(ranks):
        batches = [(X[i : i + 12], Y[i : i + 12]) for i in range(0, 60 - 12 * ranks.rank, 12)]
        with pytest.raises(ke.RankError, match="rank 1 has other arguments of fit than rank 0"):
            trained(ranks, data=batches)

    run(2, work)


def test_a_run_that_diverges_warns_in_the_first_process():
    def work(ranks):
        engine = ke.Engine.from_onnx(net.model(), loss="categorical", communicator=ranks)
        engine.step({"x": X[:9]}, Y[:9])
        engine.set_parameters({n: 1e6 * v for n, v in engine.parameters.items()})
        engine.step({"x": X[:9]}, Y[:9])

    with pytest.warns(ke.DivergenceWarning) as warned:
        run(3, work)
    assert len(warned) == 1


def test_verify_refuses_an_engine_of_several_ranks():
    def work(ranks):
        engine = ke.Engine.from_onnx(net.model(), loss="categorical", communicator=ranks)
        with pytest.raises(ke.UnsupportedError, match="pass the file of the model"):
            ke.verify(engine, {"x": X}, Y)

    run(2, work)


@pytest.mark.parametrize("distribution", ["replicate", "shard"])
@pytest.mark.parametrize("size", [2, 3])
def test_runs_equal_that_of_one_process(size, distribution, tmp_path):
    expected = trained(log=tmp_path / "alone.jsonl")
    log = tmp_path / "ranks.jsonl"
    histories = run(size, lambda ranks: trained(ranks, distribution, log=log))
    for history in histories:
        assert_same(history, expected)
        assert len({record["seconds"] for record in history.records}) == 13
        for one, first in zip(history.records, histories[0].records, strict=True):
            assert one["seconds"] == first["seconds"]
    files = log, tmp_path / "alone.jsonl"
    lines = [[json.loads(line) for line in file.read_text().splitlines()] for file in files]
    assert len(lines[0]) == len(lines[1]) == 15
    for here, there in zip(lines[0][-1]["spectra"], lines[1][-1]["spectra"], strict=True):
        assert here.keys() == there.keys()


def test_batches_of_an_iterable_are_divided(tmp_path):
    batches = [({"x": X[i : i + 20]}, Y[i : i + 20]) for i in range(0, 100, 20)]
    held_out = [({"x": X[:1]}, Y[:1]), ({"x": X[1:9]}, Y[1:9])]  # one example for two ranks
    options = {"data": batches, "validation": held_out, "metrics": None}
    expected = trained(**options)
    for history in run(2, lambda ranks: trained(ranks, **options)):
        assert_same(history, expected)


@pytest.mark.parametrize("distribution", ["replicate", "shard"])
def test_any_number_of_ranks_resumes_a_run(distribution, tmp_path):
    expected = trained()
    options = {"checkpoint": tmp_path / "run", "checkpoint_every": 5, "resume": True}
    stop = {"callbacks": [lambda record, _: record["step"] == 5]}
    run(3, lambda ranks: trained(ranks, distribution, **options, **stop))
    stop = {"callbacks": [lambda record, _: record["step"] == 10]}
    trained(**options, **stop)
    histories = run(2, lambda ranks: trained(ranks, distribution, **options))
    for history in histories:
        assert [record["step"] for record in history.records] == list(range(1, 14))
        assert_same(history, expected, names=("loss",))


def test_one_rank_may_end_the_run_of_all():
    def work(communicator):
        rank = communicator.rank
        return trained(
            communicator, callbacks=[lambda record, _: rank == 1 and record["step"] == 7]
        )

    assert [len(history.records) for history in run(2, work)] == [7, 7]


def test_the_clock_of_the_first_rank_ends_a_run_by_seconds():
    lengths = [
        len(h.records) for h in run(2, lambda ranks: trained(ranks, steps=None, seconds=0.3))
    ]
    assert lengths[0] == lengths[1] > 0


class Writer(ke.Callback):
    on_every_rank = False

    def __init__(self, rank, seen):
        self.rank, self.seen = rank, seen

    def on_step_end(self, record, optimizer):
        self.seen.append(self.rank)

    def state(self, optimizer):
        return ke.SavedState({"count": len(self.seen)})


def test_callbacks_that_write_are_called_by_the_first_rank(tmp_path):
    seen, options = [], {"checkpoint": tmp_path, "resume": True}
    for steps in (3, 5):  # with a state that the other ranks read
        run(2, lambda ranks, n=steps: trained(
            ranks, steps=n, callbacks=[Writer(ranks.rank, seen)], **options
        ))  # fmt: skip
    assert seen == [0] * 5


def test_averages_of_weights_and_best_weights_are_those_of_one_process():
    def callbacks():
        return [ke.WeightAverage(0.5), ke.EarlyStop(patience=100)]

    expected = trained(callbacks=callbacks())
    for history in run(2, lambda ranks: trained(ranks, callbacks=callbacks())):
        assert_same(history, expected)


def refusals(options_of, size=2):
    def work(communicator):
        with pytest.raises(ke.KfacError) as caught:
            trained(communicator, **options_of(communicator.rank))
        return type(caught.value), str(caught.value)

    kinds, texts = zip(*run(size, work), strict=True)
    assert len(set(kinds)) == 1
    return kinds[0], texts


def test_errors_of_one_rank_are_those_of_all(tmp_path):
    def fails(record, optimizer):
        raise ValueError("no space")

    kind, texts = refusals(lambda rank: {"callbacks": [fails] if rank else []})
    assert kind is ke.RankError
    assert all("rank 1 of 2 refused: ValueError: no space" in text for text in texts)
    kind, texts = refusals(lambda rank: {"log": tmp_path / "no folder" / "run.jsonl"})
    assert kind is ke.InputError
    assert all("rank 0 of 2 refused: log '" in text for text in texts)
    kind, texts = refusals(lambda rank: {"seed": rank})
    assert kind is ke.RankError
    assert all("other arguments of fit" in text for text in texts)


def test_a_batch_with_nan_is_refused_once_by_all_ranks_after_a_search_for_an_explosion():
    # The run compares the loss of the batch with that of earlier parameters before it ends.
    spoiled = X[40:60].copy()
    spoiled[-1] = np.nan  # a row of the last rank
    batches = [({"x": X[:20]}, Y[:20]), ({"x": spoiled}, Y[40:60])]
    kind, texts = refusals(lambda rank: {"data": batches, "validation": None})
    assert kind is ke.NonFiniteError
    assert set(texts) == {
        "rank 1 of 2 refused: input 'x' contains NaN or infinity, first at index (9, 0). "
        "'z' holds NaN or infinity."
    }


def test_data_that_cannot_be_divided_are_refused():
    kind, texts = refusals(lambda rank: {"batch_size": 2}, size=3)
    assert kind is ke.InputError
    assert all("2 examples cannot be divided among 3 processes" in text for text in texts)
    small = [({"x": X[:2]}, Y[:2])]
    kind, texts = refusals(lambda rank: {"data": small}, size=3)
    assert all("2 examples cannot be divided among 3 processes" in text for text in texts)


def test_a_checkpoint_that_a_rank_does_not_see_is_refused(tmp_path):
    trained(checkpoint=tmp_path / "0", steps=2)
    kind, texts = refusals(
        lambda rank: {"checkpoint": tmp_path / str(rank), "resume": True, "steps": 2}
    )
    assert kind is ke.RankError
    assert all("rank 1 does not see" in text for text in texts)
