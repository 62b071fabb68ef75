"""Arrays in one message: sums, parts of owners, triangles."""

import sys

import numpy as np
import pytest

from kfac_engine.backend.select import select
from kfac_engine.distributed.messages import Form, OwnedArrays, pack, sum_arrays, unpack
from tests.backend import cupy_standin
from tests.distributed.threads import run

F4, F8 = np.dtype("float32"), np.dtype("float64")
FORMS = [
    Form((3, 3), F8, "symmetric"),
    Form((2, 4), F4),
    Form((2, 4, 4), F8, "symmetric"),
    Form((5, 5), F4, "lower"),
    Form((1, 1), F4, "symmetric"),
    Form((0,), F4),
]


def array_of(form, seed):
    array = np.random.default_rng(seed).normal(size=form.shape).astype(form.dtype)
    if form.triangle == "symmetric":
        return array + np.swapaxes(array, -1, -2)
    return np.tril(array) if form.triangle else array


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_a_packed_array_has_its_entries_once_and_unpacks_to_its_lower_triangle(form):
    array, buffer = array_of(form, 0), np.full(form.size, np.nan, form.dtype)
    pack(array, form, buffer)
    lower = np.tril(array) if form.triangle else array
    entries = array[..., *np.tril_indices(form.shape[-1])] if form.triangle else array
    np.testing.assert_array_equal(np.sort(buffer), np.sort(entries.reshape(-1)))
    np.testing.assert_array_equal(unpack(buffer, form), lower)


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_symmetric_arrays_of_cupy_unpack_to_both_triangles(form, monkeypatch):
    cupy_standin.install(monkeypatch)
    cupy = sys.modules["cupy"]
    array, buffer = array_of(form, 0), cupy.empty(form.size, form.dtype)
    pack(cupy.asarray(array), form, buffer)
    host = np.empty(form.size, form.dtype)
    pack(array, form, host)
    np.testing.assert_array_equal(buffer.get(), host)
    np.testing.assert_array_equal(unpack(buffer, form).get(), array)


def test_a_transposed_matrix_packs_as_its_entries_say():
    form, matrix = Form((3, 3), F8, "lower"), np.arange(9.0).reshape(3, 3)
    buffer = np.empty(6)
    pack(matrix.T, form, buffer)
    np.testing.assert_array_equal(unpack(buffer, form), np.tril(matrix.T))


def test_sums_of_arrays_of_several_types_take_a_message_for_each_type():
    def work(communicator):
        arrays = [np.full((2, 2), 1.0 + communicator.rank, d) for d in (F4, F8, F4)]
        sum_arrays(communicator, arrays)
        for array in arrays:
            np.testing.assert_array_equal(array, np.full((2, 2), 6.0))
        return [array.dtype for array in arrays], communicator.log

    for types, log in run(3, work):
        assert types == [F4, F8, F4]
        assert log == [("allreduce", 32), ("allreduce", 32)]


OWNERS = [0, 0, 2, 2, 3, 3]


def test_owners_receive_the_sums_of_their_arrays_in_one_message():
    def work(communicator):
        message = OwnedArrays(communicator, select("numpy"), FORMS, OWNERS)
        arrays = [array_of(form, 10 * communicator.rank + i) for i, form in enumerate(FORMS)]
        return message.sum(arrays), communicator.log

    for rank, (sums, log) in enumerate(run(4, work)):
        assert [call for call, _ in log] == ["reduce_scatter"]
        for index, (total, form) in enumerate(zip(sums, FORMS, strict=True)):
            if OWNERS[index] != rank:
                assert total is None
                continue
            whole = sum(array_of(form, 10 * r + index).astype(F8) for r in range(4))
            np.testing.assert_allclose(total, np.tril(whole) if form.triangle else whole, atol=1e-6)


def test_all_ranks_receive_the_arrays_of_all_owners_with_equal_bits():
    def work(communicator):
        message = OwnedArrays(communicator, select("numpy"), FORMS, OWNERS)
        arrays = [array_of(form, i) for i, form in enumerate(FORMS)]
        own = [a for a, owner in zip(arrays, OWNERS, strict=True) if owner == communicator.rank]
        return message.gather(own), communicator.log

    for arrays, log in run(4, work):
        assert [call for call, _ in log] == ["allgather"]
        for index, (array, form) in enumerate(zip(arrays, FORMS, strict=True)):
            assert (array.shape, array.dtype) == (form.shape, form.dtype)
            np.testing.assert_array_equal(array, array_of(form, index))
