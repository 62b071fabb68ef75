"""Operations: either all ranks go on, or all raise the same error."""

import numpy as np
import pytest

import kfac_engine as ke
from kfac_engine.distributed.agreement import Agreement
from kfac_engine.distributed.protocol import Alone, Communicator
from tests.distributed.threads import run


def outcome(function):
    try:
        return function()
    except Exception as error:
        return error


def test_numbers_of_all_ranks_are_exchanged():
    def work(communicator):
        agreement = Agreement(communicator)
        flags = [agreement.any(communicator.rank == rank) for rank in (2, 3)]
        return agreement.of_all(communicator.rank, -0.5), flags

    for table, flags in run(3, work):
        np.testing.assert_array_equal(table, [[0, -0.5], [1, -0.5], [2, -0.5]])
        assert flags == [True, False]


@pytest.mark.parametrize("count", [1, 8, 9, 20])
def test_any_number_of_sums_takes_a_vote_for_eight_of_them(count):
    def work(communicator):
        numbers = [10.0 * communicator.rank + i for i in range(count)]
        return Agreement(communicator).sum(*numbers), len(communicator.log)

    for sums, votes in run(2, work):
        assert sums == tuple(10.0 + 2 * i for i in range(count))
        assert votes == -(-count // 8)


@pytest.mark.parametrize("failing", [0, 2])
def test_an_error_of_one_rank_is_the_same_error_on_all_ranks(failing):
    def work(communicator):
        agreement = Agreement(communicator)

        def step():
            with agreement.operation("step"):
                agreement.of_all(1.0)
                if communicator.rank == failing:
                    raise ke.NonFiniteError("input 'image' holds NaN.")
                agreement.of_all(2.0)

        first = outcome(step)
        with agreement.operation("step"):  # the ranks still meet
            return first, agreement.sum(3.0)

    for error, total in run(3, work):
        assert type(error) is ke.NonFiniteError
        assert str(error) == f"rank {failing} of 3 refused: input 'image' holds NaN."
        assert total == (9,)


@pytest.mark.parametrize("messages_follow", [False, True])
def test_no_rank_leaves_an_operation_that_another_has_not_ended(messages_follow):
    """The end of an operation, or the beginning of the next one, before messages of no votes."""

    def work(communicator):
        agreement, done = Agreement(communicator), []

        def step():
            with agreement.operation("step"):
                with agreement.operation("products", ends=not messages_follow):
                    if communicator.rank == 1:
                        raise ke.ShapeError("of a product.")
                with agreement.operation("sum", begins=messages_follow), agreement.exchanging():
                    done.append(communicator.rank)

        return type(outcome(step)), done, len(communicator.log)

    # A vote, and the text of the error.
    assert run(3, work) == [(ke.ShapeError, [], 2)] * 3


def test_errors_of_several_ranks_are_that_of_the_lowest():
    def work(communicator):
        agreement = Agreement(communicator)

        def step():
            with agreement.operation("step", ends=True):
                if communicator.rank:
                    raise ke.ShapeError(f"of rank {communicator.rank}")

        return outcome(step)

    assert {str(error) for error in run(3, work)} == {"rank 1 of 3 refused: of rank 1"}


@pytest.mark.parametrize("other", ["name", "numbers", "inner operation"])
def test_ranks_in_different_operations_are_refused(other):
    def work(communicator):
        agreement, differs = Agreement(communicator), communicator.rank == 2

        def step():
            with agreement.operation("observe" if differs and other == "name" else "step"):
                if differs and other == "inner operation":
                    with agreement.operation("refresh", begins=True):
                        pass
                else:
                    agreement.of_all(*[0.0] * (8 if differs and other == "numbers" else 7))

        return outcome(step)

    for error in run(3, work):
        assert type(error) is ke.RankError
        assert str(error).startswith("rank 2 has called another method than rank 0")


def test_an_error_of_another_library_is_a_rank_error_with_its_class():
    def work(communicator):
        agreement = Agreement(communicator)

        def step():
            with agreement.operation("step", ends=True):
                if communicator.rank == 1:
                    raise ValueError("a loader failed\nin line 2")

        return outcome(step)

    first, second = run(2, work)
    assert type(first) is type(second) is ke.RankError
    assert "rank 1 of 2 refused: ValueError: a loader failed" in str(first)
    assert isinstance(second.__cause__, ValueError)


def test_an_error_of_a_single_process_is_unchanged():
    agreement, error = Agreement(Alone()), ValueError("as it is")
    with pytest.raises(ValueError, match="as it is") as raised, agreement.operation("step"):
        raise error
    assert raised.value is error


def test_communicators_have_the_members_of_the_protocol():
    assert isinstance(Alone(), Communicator)
    assert all(run(2, lambda communicator: isinstance(communicator, Communicator)))
    assert not isinstance(object(), Communicator)
