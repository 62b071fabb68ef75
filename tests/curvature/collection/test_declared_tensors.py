"""Tensors whose declared shapes do not fit the weight are refused when a layer is registered."""

import pytest

import kfac_engine as ke

N = 8
# Method, its arguments besides the tensors, the weight, and shapes of input and output that fit.
LAYERS = {
    "dense": ("fully_connected", {}, (4, 3), (N, 4), (N, 3)),
    "dense with positions": ("fully_connected", {}, (4, 3), (N, 2, 4), (N, 2, 3)),
    "dense OI": ("fully_connected", {"weight_format": "OI"}, (3, 4), (N, 4), (N, 3)),
    "embedding": ("embedding", {}, (6, 3), (N, 2), (N, 3)),
    "embedding of one id": ("embedding", {}, (6, 3), (N,), (N, 3)),
    "embedding of positions": ("embedding", {"positions": True}, (6, 3), (N, 2), (N, 2, 3)),
    "conv1d": ("conv1d", {"strides": (1,), "padding": "VALID"}, (3, 2, 4), (N, 5, 2), (N, 3, 4)),
    "conv2d": (
        "conv2d", {"strides": (1, 1, 1, 1), "padding": "SAME"}, (3, 3, 2, 4), (N, 5, 5, 2),
        (N, 5, 5, 4)),
    "conv2d NCHW": (
        "conv2d",
        {"strides": (1, 1), "padding": "SAME", "data_format": "NCHW", "weight_format": "OIHW"},
        (4, 2, 3, 3), (N, 2, 5, 5), (N, 4, 5, 5)),
    "depthwise": (
        "depthwise_conv2d", {"strides": (1, 1, 1, 1), "padding": "SAME"}, (3, 3, 2, 1),
        (N, 5, 5, 2), (N, 5, 5, 2)),
}  # fmt: skip
EMBEDDINGS = [name for name in LAYERS if name.startswith("embedding")]
CHECKED = [name for name in LAYERS if name != "depthwise"]


def register(name, inputs=None, outputs=None):
    method, options, weight, x, s = LAYERS[name]
    graph = {"w": weight, "x": inputs or x, "s": outputs or s}
    collection = ke.LayerCollection(graph=graph)
    getattr(collection, f"register_{method}")("w", inputs="x", outputs="s", **options)
    return collection


def wider(name, tensor):
    """The shape of a tensor with one feature more."""
    shape, options = [*LAYERS[name][tensor]], LAYERS[name][1]
    shape[1 if options.get("data_format") else -1] += 1
    return tuple(shape)


@pytest.mark.parametrize("name", LAYERS)
def test_shapes_that_fit_are_registered(name):
    assert list(register(name).fisher_blocks) == ["w"]


@pytest.mark.parametrize("name", CHECKED)
def test_tensors_of_another_width_are_refused(name):
    with pytest.raises(ke.ShapeError, match=r"the output 's' of shape .* features in a row; the w"):
        register(name, outputs=wider(name, 4))
    if name not in EMBEDDINGS:
        with pytest.raises(ke.ShapeError, match=r"the input 'x' of shape .* features in a row; th"):
            register(name, inputs=wider(name, 3))


def test_outputs_of_ids_with_positions_are_refused_by_name():
    with pytest.raises(ke.ShapeError, match=r"the output 's' of w does not fit: .* needs 2 axes"):
        register("embedding", outputs=(N, 2, 3))
