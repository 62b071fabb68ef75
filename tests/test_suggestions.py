"""The nearest known name is suggested for an unknown one, and none where no name is near."""

import re

import numpy as np
import pytest

import kfac_engine as ke
from kfac_engine.data import demo_model, digits
from kfac_engine.errors import suggestion
from kfac_engine.losses import LOSSES

PARAMETERS = ("body.conv1.weight", "body.conv1.bias", "head.weight", "head.bias")
# Unknown name, known names, and the nearest of them; None where none is near.
CASES = {
    "two letters in the wrong order": ("trian", ("train", "demo", "bench"), "train"),
    "a missing separator": ("crossentropy", LOSSES, "cross_entropy"),
    "capitals": ("MSE", LOSSES, "mse"),
    "a pattern": ("head*weigth", PARAMETERS, "head.weight"),
    "the nearer of two": ("head.bais", PARAMETERS, "head.bias"),
    "another word": ("hinge", LOSSES, None),
    "another word among commands": ("foo", ("demo", "doctor", "report"), None),
    "another word with the same syllables": ("convolution", ("conv", "precondition"), None),
    "the same beginning": ("kron_sua", ("kron", "kron_out_diag", "diagonal"), None),
    "a pattern without letters": ("*", PARAMETERS, None),
    "no known name": ("loss", (), None),
    "no text": (5, LOSSES, None),
}


@pytest.mark.parametrize(("name", "known", "near"), CASES.values(), ids=CASES)
def test_suggestion_names_the_nearest_known_name(name, known, near):
    assert suggestion(name, known) == ("" if near is None else f" (did you mean '{near}'?)")


X, Y = (array[:4] for array in digits())
MLP = demo_model("mlp")
MISSPELLED = {
    "parameter": (lambda e: e.set_parameters({"dense1.weigth": 0}), "dense1.weight"),
    "gradient": (
        lambda e: e.step({"image": X}, Y) and e.precondition({"dense2.bais": np.zeros(32)}),
        "dense2.bias",
    ),
    "input": (lambda e: e.gradients({"imgae": X}, Y), "image"),
    "value": (lambda e: e.trace({"image": X})["logit"], "logits"),
    "option": (lambda e: ke.Engine.from_onnx(MLP, loss="mse", dampng=1), "damping"),
    "optimizer": (lambda e: ke.fit(e, (X, Y), optimizer="adm"), "adam"),
    "policy": (lambda e: ke.Schedule(policy="balancd"), "balanced"),
    "output": (lambda e: ke.differentiate(MLP, output="logit"), "logits"),
    "demo model": (lambda e: demo_model("nml"), None),
}


@pytest.mark.parametrize(("call", "near"), MISSPELLED.values(), ids=MISSPELLED)
def test_error_of_the_library_suggests_the_nearest_name(call, near):
    engine = ke.Engine.from_onnx(MLP, loss="cross_entropy")
    with pytest.raises(ke.KfacError) as raised:
        call(engine)
    expected = [] if near is None else [near]
    assert re.findall(r"\(did you mean '(.*?)'\?\)", str(raised.value)) == expected
