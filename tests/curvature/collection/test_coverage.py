"""A registration covers the parameters, with as many uses as the losses' part of the graph has."""

import pytest

import kfac_engine as ke
from kfac_engine.errors import InputError, RegistrationError
from tests import models

HEADS = ("logits.weight", "logits.bias"), ("mean.weight", "mean.bias")
TRUNK = ("trunk.weight", "trunk.bias")
VALUES = {"trunk": "input", "logits": "act", "mean": "act"}


def on(name, loss="output"):
    lc = ke.LayerCollection(ke.load_model(models.MODELS[name]()))
    if loss:
        lc.register_softmax_cross_entropy_loss(loss)
    return lc


def two_heads(*layers, losses=("logits",)):
    lc = on("two_outputs", loss=None)
    for output in losses:
        lc.register_squared_error_loss(output)
    for layer in layers:
        lc.register_fully_connected(
            (f"{layer}.weight", f"{layer}.bias"), VALUES[layer], layer, weight_format="OI"
        )
    return lc


def shapes_only():
    lc = ke.LayerCollection(graph={"w": (4, 3), "x": (8, 4), "s": (8, 3)})
    lc.register_softmax_cross_entropy_loss("s")
    return lc


# -- the subgraph ----------------------------------------------------------------------------------


def test_the_subgraph_is_what_all_losses_depend_on():
    lc = two_heads(losses=("logits",))
    assert lc.subgraph is None
    lc.create_subgraph()
    assert lc.subgraph.filter_list([*TRUNK, *HEADS[0], *HEADS[1]]) == (*TRUNK, *HEADS[0])
    lc.register_squared_error_loss("mean")
    lc.create_subgraph()
    assert lc.subgraph.filter_list(HEADS[1]) == HEADS[1]


def test_there_is_no_subgraph_without_a_model():
    lc = shapes_only()
    lc.create_subgraph()
    assert lc.subgraph is None


def test_graph_is_what_the_collection_was_made_with():
    model = ke.load_model(models.mlp())
    assert ke.LayerCollection(model).graph is model
    assert ke.LayerCollection().graph is None


# -- check_registration ----------------------------------------------------------------------------


def test_a_complete_registration_passes():
    two_heads("trunk", "logits").check_registration([*HEADS[0], *TRUNK])


def test_all_that_is_wrong_is_said_at_once():
    lc = two_heads("trunk", "mean")
    with pytest.raises(RegistrationError) as caught:
        lc.check_registration([*TRUNK, *HEADS[0]])
    message = str(caught.value)
    for part in (
        "logits.weight is not registered",
        "logits.bias is not registered",
        "mean.weight is registered, but not listed",
        "mean.weight is registered with 1 use(s), the graph has 0",
    ):
        assert part in message


def test_uses_that_no_loss_depends_on_are_none():
    lc = two_heads("trunk", "logits", "mean", losses=("logits",))
    with pytest.raises(RegistrationError, match=r"mean\.bias is registered with 1 use"):
        lc.check_registration([*TRUNK, *HEADS[0], *HEADS[1]])
    lc.register_squared_error_loss("mean")
    lc.check_registration([*TRUNK, *HEADS[0], *HEADS[1]])


def test_without_a_loss_the_whole_graph_counts():
    lc = two_heads("trunk", "logits", "mean", losses=())
    lc.check_registration([*TRUNK, *HEADS[0], *HEADS[1]])


@pytest.mark.parametrize("uses", [1, 2, 3])
def test_a_shared_weight_must_be_registered_with_all_its_uses(uses):
    lc = on("tied")
    inputs, outputs = ["input", "act", "act"][:uses], ["first", "output", "output"][:uses]
    lc.register_fully_connected_multi("shared.weight", inputs, outputs)
    if uses == 2:
        lc.check_registration(["shared.weight"])
        return
    message = rf"shared.weight is registered with {uses} use\(s\), the graph has 2"
    with pytest.raises(RegistrationError, match=message):
        lc.check_registration(["shared.weight"])


def test_towers_add_up_to_the_uses_of_the_graph():
    lc = on("tied")
    for inputs, outputs in (("input", "first"), ("act", "output")):
        lc.register_fully_connected("shared.weight", inputs, outputs)
    lc.check_registration(["shared.weight"])


@pytest.mark.parametrize("how", ["generic", "own block"])
def test_uses_are_not_counted_without_a_layer(how):
    lc = on("tied")
    if how == "generic":
        lc.register_generic("shared.weight", batch_size="input")
    else:
        lc.register_block("shared.weight", ke.NaiveDiagonalFB(lc, "shared.weight"))
    lc.check_registration(["shared.weight"])


def test_without_a_model_only_coverage_is_checked():
    lc = shapes_only()
    for _ in range(2):
        lc.register_fully_connected("w", "x", "s")
    lc.check_registration(["w"])
    with pytest.raises(RegistrationError, match="b is not registered"):
        lc.check_registration(["w", "b"])


# -- closing ---------------------------------------------------------------------------------------


def registered():
    lc = shapes_only()
    lc.register_fully_connected("w", "x", "s")
    return lc


def test_a_closed_collection_takes_nothing_more():
    lc = registered()
    lc.finalize()
    attempts = {
        "a layer": lambda: lc.register_fully_connected("v", "x", "s"),
        "a tower": lambda: lc.register_fully_connected("w", "x", "s", reuse=True),
        "generic": lambda: lc.register_generic("v", batch_size=8),
        "a block": lambda: lc.register_block("v", ke.NaiveDiagonalFB(lc, "v")),
        "a loss": lambda: lc.register_squared_error_loss("s"),
    }
    for attempt in attempts.values():
        with pytest.raises(RegistrationError, match="belongs to an estimator"):
            attempt()
    assert lc.registered_variables == ("w",)
    assert lc.fisher_blocks["w"].num_registered_towers == 1
    assert len(lc.losses) == 1


def test_closing_needs_a_loss_and_records_the_subgraph():
    with pytest.raises(InputError, match="at least one registered loss"):
        ke.LayerCollection().finalize()
    lc = on("mlp")
    lc.finalize()
    assert lc.subgraph.is_member("fc0.weight")
