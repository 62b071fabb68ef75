"""Approximations are chosen by name, by linked group, or by default, in that order."""

import pytest

import kfac_engine as ke
from kfac_engine.curvature.approximations import KINDS, accepted
from kfac_engine.errors import InputError, RegistrationError, UnknownNameError

# Kinds that the specification gives a property and a setter of their own.
NAMED = (
    "generic",
    "fully_connected",
    "fully_connected_multi",
    "conv2d",
    "conv2d_multi",
    "embedding",
    "embedding_multi",
    "scale_and_shift",
)
# The specification's defaults.
EXPECTED = {
    "generic": "diagonal",
    "fully_connected": "kron",
    "fully_connected_multi": "kron_indep",
    "conv2d": "kron",
    "conv2d_multi": "kron_indep",
    "embedding": "kron",
    "embedding_multi": "kron_indep",
    "scale_and_shift": "full",
}


def collection():
    return ke.LayerCollection(graph=dict.fromkeys("abcd", (3, 3)))


def register(lc, params, approx=None):
    lc.register_fully_connected(params, "x", "s", approx=approx)
    return lc.approximation_of(params)


# -- defaults --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", NAMED)
def test_the_defaults_are_those_of_the_specification(kind):
    assert getattr(collection(), f"default_{kind}_approximation") == EXPECTED[kind]


@pytest.mark.parametrize("kind", NAMED)
def test_a_set_default_is_read_back_and_leaves_other_collections_alone(kind):
    for value in accepted(kind):
        lc = collection()
        getattr(lc, f"set_default_{kind}_approximation")(value)
        assert getattr(lc, f"default_{kind}_approximation") == value
        assert lc.default_approximation(kind) == value
    assert getattr(collection(), f"default_{kind}_approximation") == EXPECTED[kind]


@pytest.mark.parametrize("kind", NAMED)
def test_a_default_that_the_kind_does_not_accept_is_refused(kind):
    with pytest.raises(InputError, match="'nonsense' is not a valid approximation for"):
        getattr(collection(), f"set_default_{kind}_approximation")("nonsense")


@pytest.mark.parametrize("kind", KINDS)
def test_every_default_is_a_row_of_its_kind(kind):
    assert KINDS[kind].default in accepted(kind)


def test_an_unknown_kind_has_no_default():
    with pytest.raises(UnknownNameError, match="unknown kind of layer 'rnn'"):
        collection().default_approximation("rnn")
    with pytest.raises(UnknownNameError, match="unknown kind of layer 'rnn'"):
        collection().set_default_approximation("rnn", "kron")


# -- which one a layer gets ------------------------------------------------------------------------


# A group with its approximation, the layer, the approximation that it names, and what it has.
CHOICES = {
    "the default": (None, None, "a", None, "diagonal"),
    "a linked approximation": ("a", "kron_in_diag", "a", None, "kron_in_diag"),
    "a named approximation": ("a", "kron_in_diag", "a", "kron", "kron"),
    "a group without approximation": (["a", "b"], None, ("a", "b"), None, "diagonal"),
    "a group in another order": (("b", "a"), "kron", ("a", "b"), None, "kron"),
    "a layer of a part of a group": (("a", "b"), "kron", "a", None, "diagonal"),
    "a layer that overlaps with a group": (("a", "b"), "kron", ("b", "c"), None, "diagonal"),
}


@pytest.mark.parametrize("choice", CHOICES.values(), ids=CHOICES)
def test_a_name_wins_over_a_linked_group_and_a_group_over_the_default(choice):
    (group, linked, layer, named, found), lc = choice, collection()
    lc.set_default_fully_connected_approximation("diagonal")
    if group:
        lc.define_linked_parameters(group, approximation=linked)
    assert register(lc, layer, named) == found


def test_generic_parameters_are_linked_like_layers():
    lc = collection()
    lc.define_linked_parameters(("a", "b"), approximation="full")
    lc.register_generic(("a", "b"), batch_size=4)
    assert lc.approximation_of(("a", "b")) == "full"


@pytest.mark.parametrize("how", ["named", "linked"])
def test_an_approximation_that_the_kind_does_not_accept_is_refused(how):
    lc = collection()
    if how == "linked":
        lc.define_linked_parameters("a", approximation="kron_sua")
    with pytest.raises(InputError, match="Bad value 'kron_sua' for approx of fully_connected"):
        register(lc, "a", "kron_sua" if how == "named" else None)
    assert lc.fisher_blocks == {}


# -- linked groups ---------------------------------------------------------------------------------


def test_linked_parameters_lists_groups_with_their_approximations():
    lc = collection()
    lc.define_linked_parameters("a")
    lc.define_linked_parameters(("b", "c"), "kron")
    assert lc.linked_parameters == {frozenset("a"): None, frozenset("bc"): "kron"}


@pytest.mark.parametrize(
    ("registered", "linked"),
    [(("a", "b"), "a"), ("a", ("a", "b")), (("a", "b"), ("b", "c"))],
    ids=["subset", "superset", "overlap"],
)
def test_parameters_registered_with_others_cannot_be_linked(registered, linked):
    lc = collection()
    register(lc, registered)
    with pytest.raises(
        RegistrationError, match="registered as a layer, which is a different group"
    ):
        lc.define_linked_parameters(linked)
    assert lc.linked_parameters == {}


def test_parameters_registered_as_the_very_group_can_be_linked():
    lc = collection()
    register(lc, ("a", "b"))
    lc.define_linked_parameters(("b", "a"))
    assert lc.linked_parameters == {frozenset("ab"): None}


@pytest.mark.parametrize("again", [("a", "b"), "a", ("b", "c")], ids=str)
def test_a_parameter_is_in_one_group_only(again):
    lc = collection()
    lc.define_linked_parameters(("a", "b"))
    with pytest.raises(RegistrationError, match="cannot be linked again"):
        lc.define_linked_parameters(again)


def test_empty_groups_and_repeated_names_are_no_groups():
    lc = collection()
    for params in ((), ("a", "a")):
        with pytest.raises(InputError, match="distinct parameters"):
            lc.define_linked_parameters(params)
