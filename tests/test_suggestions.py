"""The nearest known name is suggested for an unknown one, and none where no name is near."""

import pytest

from kfac_engine.losses import LOSSES
from kfac_engine.suggestions import suggestion

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
