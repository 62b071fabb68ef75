"""The examples of the page on losses run."""

from pathlib import Path

import numpy as np

import kfac_engine as ke
from kfac_engine.data import demo_model, digits
from kfac_engine.losses import LOSSES
from tests.pages import blocks, execute

PAGE = Path(__file__).resolve().parents[2] / "docs" / "losses.md"


def test_the_examples_of_the_page_run_and_a_wrong_loss_is_noticed():
    names = execute(PAGE, "python")
    own = names["TruncatedGaussian"]
    definition = next(
        code for _, code in blocks(PAGE, "python") if "class TruncatedGaussian" in code
    )
    assert len(definition[definition.index("class ") :].strip().splitlines()) <= 30

    class Wrong(own):
        def gradient_of(self, values, targets):
            return {name: 1.1 * g for name, g in super().gradient_of(values, targets).items()}

    class Wide(own):
        def information(self, values):
            return {name: 1.1 * i for name, i in super().information(values).items()}

    images, _ = digits()
    targets = np.random.default_rng(0).random((8, 10))
    for wrong in (Wrong, Wide):
        report = ke.verify(demo_model("mlp"), {"image": images[:8]}, targets, loss=wrong("logits"))
        assert not report.passed, wrong


def test_the_table_has_every_name():
    table = PAGE.read_text(encoding="utf-8").split("| object |")[1].split("```")[0]
    for name in LOSSES:
        assert f"`{name}`" in table
