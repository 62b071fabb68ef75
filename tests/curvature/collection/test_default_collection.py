"""The default collection is set, read and cleared; a context does all three."""

import threading

import pytest

import kfac_engine as ke
from kfac_engine.errors import InputError, RegistrationError


@pytest.fixture(autouse=True)
def _cleared():
    yield
    ke.set_default_layer_collection(None)


def test_the_default_is_a_collection():
    with pytest.raises(InputError, match="layer_collection must be"):
        ke.set_default_layer_collection("mine")


def test_what_was_set_is_read_until_cleared():
    lc = ke.LayerCollection()
    ke.set_default_layer_collection(lc)
    assert ke.get_default_layer_collection() is lc
    ke.set_default_layer_collection(None)
    with pytest.raises(RegistrationError):
        ke.get_default_layer_collection()


def test_a_default_is_not_replaced():
    first = ke.LayerCollection()
    ke.set_default_layer_collection(first)
    with pytest.raises(RegistrationError, match="is set already"):
        ke.set_default_layer_collection(ke.LayerCollection())
    with (
        pytest.raises(RegistrationError, match="is set already"),
        ke.LayerCollection().as_default(),
    ):
        pass
    assert ke.get_default_layer_collection() is first


def test_as_default_holds_within_its_context_and_ends_with_an_error():
    lc = ke.LayerCollection()

    def fail():
        with lc.as_default() as entered:
            assert entered is lc
            assert ke.get_default_layer_collection() is lc
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    with pytest.raises(RegistrationError):
        ke.get_default_layer_collection()


def test_threads_do_not_see_each_others_default():
    seen = []

    def look():
        with pytest.raises(RegistrationError):
            ke.get_default_layer_collection()
        with ke.LayerCollection().as_default() as own:
            seen.append(ke.get_default_layer_collection() is own)

    with ke.LayerCollection().as_default():
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
    assert seen == [True]
