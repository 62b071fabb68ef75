"""The page of models that run says what is so."""

import re

import onnx
import pytest

import kfac_engine as ke
from scripts import list_models
from tests.nightly import nightly_but

PAGE = list_models.PAGE.read_text(encoding="utf-8")
WRITTEN_WITH = re.search(r"with onnx (\S+)\. ", PAGE).group(1)

pytestmark = [
    pytest.mark.skipif(
        onnx.__version__ != WRITTEN_WITH,
        reason=f"docs/models.md is about the models of onnx {WRITTEN_WITH}",
    )
]
NETWORKS = {path.stem: path for path in sorted((list_models.DATA / "light").glob("*.onnx"))}


def test_small_models_equal_page():
    small = list(list_models.small_models())
    written = list_models.page(list_models.networks_of_the_page(), small)
    assert written == PAGE, "run python -m scripts.list_models --small"


@pytest.mark.parametrize("name", nightly_but(["light_squeezenet"], NETWORKS))
def test_network_layers_equal_page(name):
    path = NETWORKS[name]
    (row,) = [row for row in list_models.networks_of_the_page() if row.name == name]
    if row.result != "runs":
        with pytest.raises(ke.KfacError) as refused:
            prepare(path)
        assert row.result == " ".join(str(refused.value).split())
    else:
        assert (row.layers, row.reasons) == list_models.describe(prepare(path))


def prepare(path):
    choices = list_models.CHOICES.get(path.stem)
    return ke.Engine.from_onnx(path, loss="normal", approximations=choices)
