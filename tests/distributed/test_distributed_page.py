"""The page on several processes has the figures of known models, and its programs run."""

import contextlib
from math import ceil
from pathlib import Path

import pytest

from kfac_engine.distributed.owners import layer_owners
from tests.distributed.known_models import MODELS, sizes
from tests.distributed.test_owners import bound, refreshes, time_of
from tests.pages import blocks

PAGE = Path(__file__).resolve().parent.parent.parent / "docs" / "distributed.md"
TEXT = PAGE.read_text(encoding="utf-8")


def program_with(text):
    """The first program of the page, up to the block that contains a text."""
    codes = [code for _, code in blocks(PAGE, "python")]
    last = next(index for index, code in enumerate(codes) if text in code)
    return "".join(codes[: last + 1])


def test_programs_of_the_section_on_starting_run_in_one_process(tmp_path):
    program, names = program_with("KfacOptimizer"), {}
    assert program.count("assert ") == 2
    with contextlib.chdir(tmp_path):
        exec(compile(program, PAGE.name, "exec"), names)
    assert names["ranks"].size == 1
    assert (tmp_path / "trained.onnx").exists()


@pytest.mark.parametrize(
    ("model", "ranks", "sentence"),
    [
        ("ResNet-50", 5, "so more than five ranks do not make a refresh shorter"),
        ("GPT-2 small", 31, "The limit of GPT-2 small and of ViT-B/16 is 31 ranks"),
        ("ViT-B/16", 31, "The limit of GPT-2 small and of ViT-B/16 is 31 ranks"),
    ],
)
def test_limits_of_a_refresh_are_those_of_the_largest_factors(model, ranks, sentence):
    costs = [size**3 for layer in MODELS[model] for size in layer.sizes]
    assert ceil(sum(costs) / max(costs)) == ranks
    assert sentence in TEXT


def test_times_of_the_policies_are_those_of_the_models():
    table = refreshes("GPT-2 small")
    least = bound(table, 32)
    assert round(time_of("balanced", table, 32) / least, 2) == 10
    assert round(time_of("balanced_ranks", table, 32) / least, 2) == 1.45
    assert "of GPT-2 small take ten times as long as the bound" in TEXT
    assert "1.45 times the bound" in TEXT


def test_shares_of_the_text_are_those_of_the_models():
    numbers = [layer.a * layer.g for layer in MODELS["GPT-2 small"]]
    assert "has 31 % of the parameters, has 17 owners of its rows on 64 ranks" in TEXT
    owners = layer_owners(*sizes("GPT-2 small"), 64)
    assert max(map(len, owners.values())) == 17
    assert round(100 * max(numbers) / sum(numbers)) == 31
    costs = [size**3 for layer in MODELS["ResNet-50"] for size in layer.sizes]
    assert "three factors of 4608 rows, each with 22 %" in TEXT
    assert costs.count(4608**3) == 3
    assert round(100 * 4608**3 / sum(costs)) == 22
