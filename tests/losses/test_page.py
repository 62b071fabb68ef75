"""The examples of the page on losses run; its table of padding is that of the measurements."""

from itertools import product
from math import isnan
from pathlib import Path

import numpy as np
import pytest

import kfac_engine as ke
from kfac_engine.bench.training.models import POSITIONS
from kfac_engine.data import demo_model, digits
from kfac_engine.losses import LOSSES
from scripts import draw_padding
from scripts.measure_padding import (
    CHARACTERS,
    FORMS,
    MULTIPLE,
    NEWLINE,
    SECONDS,
    SEEDS,
    UNCOUNTED,
    Point,
)
from tests.pages import blocks

PAGE = Path(__file__).resolve().parents[2] / "docs" / "losses.md"
EXAMPLES = [code for _, code in blocks(PAGE, "python")]


def test_the_examples_of_the_page_run_and_a_wrong_loss_is_noticed():
    names = {}
    for code in EXAMPLES:
        exec(compile(code, "losses.md", "exec"), names)
    own = names["TruncatedGaussian"]
    definition = next(code for code in EXAMPLES if "class TruncatedGaussian" in code)
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


def test_the_table_of_padding_is_that_of_the_measurements():
    points = draw_padding.read()
    assert "\n".join(draw_padding.table(points)) in PAGE.read_text(encoding="utf-8")
    for form, seed in product(FORMS, SEEDS):
        run = draw_padding.curve(points, form, seed)
        assert run[0].step == 0
        assert run[-1].cpu >= SECONDS
    # What the page says of the table.
    last = [[draw_padding.curve(points, f, s)[-1] for s in SEEDS] for f in ("padded", "cut")]
    for lines, pieces in zip(*last, strict=True):
        assert lines.padded < pieces.padded
        assert lines.cut > 1.3 * pieces.cut
        assert 0.85 < lines.characters / pieces.characters < 0.95


def test_the_picture_of_padding_has_the_medians_of_the_seeds():
    pytest.importorskip("matplotlib")
    points = draw_padding.read()
    for axes, panel in zip(draw_padding.draw(points).axes, draw_padding.PANELS, strict=True):
        labelled = [line for line in axes.lines if not line.get_label().startswith("_")]
        for line, form in zip(labelled, FORMS, strict=True):
            runs = [draw_padding.curve(points, form, seed) for seed in SEEDS]
            assert line.get_ydata()[-1] == sorted(getattr(run[-1], panel) for run in runs)[1]


def test_the_time_to_a_loss_lies_between_two_evaluations():
    run = [Point("cut", 0, 0, 0, cpu, loss, 0.0) for cpu, loss in ((0, 5), (2, 3), (4, 2.5))]
    assert [draw_padding.seconds_to(loss, run) for loss in (4, 3, 2.75)] == [1, 2, 3]
    assert isnan(draw_padding.seconds_to(2, run))


def test_both_forms_have_each_character_of_the_lines_once():
    rng = np.random.default_rng(0)
    lengths = np.r_[rng.integers(1, POSITIONS, 400), 1, POSITIONS - 1]
    lines = [np.append(rng.integers(1, 96, n), NEWLINE) for n in lengths]
    for form, (groups_of, batch_of) in FORMS.items():
        counted = np.zeros(96, int)
        for inputs, targets in map(batch_of, groups_of(lines)):
            counts = targets != UNCOUNTED
            assert targets.size <= CHARACTERS
            x = inputs["x"]
            # An input is the target before it; the first input of a line is the end of another.
            assert (x[:, 1:] == targets[:, :-1])[counts[:, 1:]].all()
            if form == "padded":
                assert (x[:, 0] == NEWLINE).all()
                assert (inputs["read"] == counts).all()
                assert counts.all(axis=0).sum() >= targets.shape[1] - MULTIPLE
            counted += np.bincount(targets[counts], minlength=96)
        missing = np.bincount(np.concatenate(lines), minlength=96) - counted
        # The joined lines end with a part of a piece.
        assert (missing >= 0).all()
        assert missing.sum() < (1 if form == "padded" else POSITIONS)
