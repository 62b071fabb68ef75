"""The page of models that run says what is so."""

import re

import onnx
import pytest

import kfac_engine as ke
from scripts import list_models

PAGE = list_models.PAGE.read_text(encoding="utf-8")
WRITTEN_WITH = re.search(r"with onnx (\S+)\. ", PAGE).group(1)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        onnx.__version__ != WRITTEN_WITH,
        reason=f"docs/models.md is about the models of onnx {WRITTEN_WITH}",
    ),
]
NETWORKS = sorted((list_models.DATA / "light").glob("*.onnx"))


def test_the_small_models_do_what_the_page_says():
    small = list(list_models.small_models())
    assert list_models.page(networks_of_the_page(), small) == PAGE, "run scripts/list_models.py"


def networks_of_the_page():
    """The rows of the first table: running them again would take minutes."""
    _, _, after = PAGE.partition("## Networks")
    table, _, _ = after.partition("## Small models")
    cells = [line.strip("|").split(" | ") for line in table.splitlines() if line.startswith("| `")]
    return [
        list_models.Row(name.strip(" `"), *(cell.strip() for cell in rest)) for name, *rest in cells
    ]


@pytest.mark.parametrize("path", NETWORKS, ids=lambda path: path.stem)
def test_a_network_has_the_layers_that_the_page_says(path):
    (row,) = [row for row in networks_of_the_page() if row.name == path.stem]
    if row.result != "runs":
        with pytest.raises(ke.KfacError) as refused:
            prepare(path)
        assert row.result == " ".join(str(refused.value).split())
    else:
        assert (row.layers, row.reasons) == list_models.describe(prepare(path))


def prepare(path):
    choices = list_models.CHOICES.get(path.stem)
    return ke.Engine.from_onnx(path, loss="normal", approximations=choices)
