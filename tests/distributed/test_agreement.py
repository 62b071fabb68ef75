"""Votes: either all ranks go on, or all raise the same error."""

import numpy as np
import pytest

import kfac_engine as ke
from kfac_engine.distributed.agreement import Agreement
from kfac_engine.distributed.protocol import Alone, Communicator
from tests.distributed.threads import DesynchronizedError, run


def outcome(function):
    try:
        return function()
    except Exception as error:
        return error


def test_a_vote_exchanges_numbers_of_all_ranks():
    def work(communicator):
        return Agreement(communicator).vote(communicator.rank, -0.5)

    for table in run(3, work):
        np.testing.assert_array_equal(table, [[0, -0.5], [1, -0.5], [2, -0.5]])


@pytest.mark.parametrize("failing", [0, 2])
def test_an_error_of_one_rank_is_the_same_error_on_all_ranks(failing):
    def work(communicator):
        agreement = Agreement(communicator)

        def step():
            with agreement.together():
                agreement.vote(1.0)
                if communicator.rank == failing:
                    raise ke.NonFiniteError("input 'image' holds NaN.")
                agreement.vote(2.0)

        first = outcome(step)
        with agreement.together():  # the ranks still meet
            return first, agreement.vote(3.0).sum()

    for error, total in run(3, work):
        assert type(error) is ke.NonFiniteError
        assert str(error) == f"rank {failing} of 3 refused: input 'image' holds NaN."
        assert total == 9


def test_errors_of_several_ranks_are_that_of_the_lowest():
    def work(communicator):
        agreement = Agreement(communicator)

        def step():
            with agreement.together():
                if communicator.rank:
                    raise ke.ShapeError(f"of rank {communicator.rank}")
                agreement.vote()

        return outcome(step)

    assert {str(error) for error in run(3, work)} == {"rank 1 of 3 refused: of rank 1"}


def test_an_error_of_another_library_is_a_rank_error_with_its_class():
    def work(communicator):
        agreement = Agreement(communicator)

        def step():
            with agreement.together():
                if communicator.rank == 1:
                    raise ValueError("a loader failed\nin line 2")
                agreement.vote()

        return outcome(step)

    first, second = run(2, work)
    assert type(first) is type(second) is ke.RankError
    assert "rank 1 of 2 refused: ValueError: a loader failed" in str(first)
    assert isinstance(second.__cause__, ValueError)


def test_an_error_of_a_single_process_is_unchanged():
    agreement, error = Agreement(Alone()), ValueError("as it is")
    with pytest.raises(ValueError, match="as it is") as raised, agreement.together():
        raise error
    assert raised.value is error


def test_a_rank_that_leaves_without_a_vote_is_noticed():
    def work(communicator):
        agreement = Agreement(communicator)
        if communicator.rank:
            agreement.vote()
        else:
            communicator.allreduce(np.zeros(1))

    with pytest.raises(DesynchronizedError):
        run(2, work)


def test_communicators_have_the_members_of_the_protocol():
    assert isinstance(Alone(), Communicator)
    assert all(run(2, lambda communicator: isinstance(communicator, Communicator)))
    assert not isinstance(object(), Communicator)
