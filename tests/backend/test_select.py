"""Names choose backends; what cannot be had is an error, what was chosen is said."""

import logging

import pytest

from kfac_engine.backend.numpy_backend import NumpyBackend
from kfac_engine.backend.select import choice_reason, select
from kfac_engine.errors import BackendError, UnknownNameError


@pytest.mark.parametrize("name", ["numpy", "auto"])
def test_numpy_and_auto_give_the_numpy_backend_with_the_scratch_asked_for(name):
    backend = select(name, scratch_bytes=12345)
    assert isinstance(backend, NumpyBackend)
    assert backend.name == "numpy"
    assert backend.scratch_bytes == 12345


def test_cupy_is_refused_with_advice_instead_of_replaced():
    with pytest.raises(
        BackendError, match=r"no CuPy backend yet; choose backend 'numpy' or 'auto'"
    ):
        select("cupy")


@pytest.mark.parametrize("call", [select, choice_reason])
def test_unknown_names_list_the_known_ones(call):
    with pytest.raises(
        UnknownNameError, match=r"unknown backend 'gpu'; choose one of: auto, numpy"
    ):
        call("gpu")


def test_the_automatic_choice_is_logged_with_its_reason(caplog):
    with caplog.at_level(logging.INFO, logger="kfac_engine"):
        select("auto")
    assert choice_reason("auto") in caplog.text


def test_a_choice_by_name_is_not_logged(caplog):
    with caplog.at_level(logging.DEBUG, logger="kfac_engine"):
        select("numpy")
    assert not caplog.records


@pytest.mark.parametrize(
    ("name", "words"), [("auto", "numpy, chosen"), ("numpy", "as asked"), ("cupy", "none: ")]
)
def test_reasons_say_what_each_name_leads_to(name, words):
    assert words in choice_reason(name)
