"""What the documentation says is so: examples run, options exist, links lead somewhere."""

import contextlib
import re
from functools import partial
from pathlib import Path

import numpy as np
import pytest

import kfac_engine as ke
from kfac_engine.data import demo_model, digits
from scripts import bench_tables, list_approximations, list_models, list_modules, list_options
from tests.nightly import nightly_but, seeds
from tests.pages import blocks
from tests.violations import assert_none

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted(
    path
    for path in [
        *ROOT.glob("*.md"),
        *(ROOT / "docs").rglob("*.md"),
        *ROOT.glob("kfac_engine/**/*.md"),
    ]
)


def first_block(page, containing):
    """The first example in Python of a page that contains a text."""
    return next(code for _, code in blocks(page, "python") if containing in code)


@pytest.mark.rounding
@pytest.mark.parametrize("seed", nightly_but([0, 1], seeds(5)))
@pytest.mark.parametrize(
    ("page", "containing"),
    [
        ("README.md", "KfacOptimizer"),
        ("docs/training.md", "KfacOptimizer"),
        ("docs/training.md", "clipped_rate"),
    ],
)
def test_training_example_halves_loss_for_each_seed(page, containing, seed, tmp_path, monkeypatch):
    # The seed shuffles the data and draws the sampled targets.
    make = ke.Engine.from_onnx
    monkeypatch.setattr(ke.Engine, "from_onnx", partial(make, seed=seed))
    drawn = np.random.default_rng(seed).permutation(len(digits()[1]))
    shuffled = tuple(array[drawn] for array in digits())
    monkeypatch.setattr("kfac_engine.data.digits", lambda: shuffled)
    # Imports of an earlier block of the page.
    names = {"ke": ke, "demo_model": demo_model, "digits": lambda: shuffled}
    with contextlib.chdir(tmp_path):
        exec(compile(first_block(ROOT / page, containing), page, "exec"), names)
    losses = names["losses"]
    assert losses[-1] < losses[0] / 2
    assert max(losses) < 1.5 * losses[0]


@pytest.mark.rounding
def test_readme_shows_numbers_that_its_training_examples_print(tmp_path, capsys):
    readme = ROOT / "README.md"
    names = {}
    for (_, code), (_, shown) in zip(
        blocks(readme, "python")[:2], blocks(readme, "text")[:2], strict=True
    ):
        with contextlib.chdir(tmp_path):
            exec(compile(code, "README.md", "exec"), names)
        printed = capsys.readouterr().out
        numbers = [
            [float(number) for number in re.findall(r"\d\.\d+", text)] for text in (printed, shown)
        ]
        assert len(numbers[0]) >= 3
        # 36 steps amplify the rounding of a processor; the second decimal may differ.
        np.testing.assert_allclose(*numbers, atol=0.03)


def test_make_targets_named_in_the_docs_exist():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.M))
    for page in PAGES:
        for _, code in blocks(page, "sh"):
            assert set(re.findall(r"^make ([\w-]+)", code, re.M)) <= targets


def test_contributing_names_the_phases_of_the_gate():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    single, phases = re.findall(r"^(?:PHASES|SINGLE) := (.*)$", makefile, re.M)
    phases = phases.replace("single", single)
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    assert re.findall(r"^\| `([a-z-]+)` \|", page, re.M)[:6] == phases.split()


# Pages that scripts write, wholly or in part: the page, and what the script makes of its text.
WRITTEN = {
    "list_approximations": (list_approximations.PAGE, lambda text: list_approximations.page()),
    "list_modules": (list_modules.PAGE, lambda text: list_modules.page()),
    "list_options": (ROOT / "docs/command_line.md", list_options.page),
    "bench_tables": (bench_tables.README, bench_tables.readme),
    "bench_tables of performance": (bench_tables.PERFORMANCE, bench_tables.performance),
    "bench_tables of goals": (bench_tables.GOALS, lambda text: bench_tables.goals()),
    "bench_tables of models": (list_models.PAGE, bench_tables.with_sections),
}


@pytest.mark.parametrize(("page", "write"), WRITTEN.values(), ids=WRITTEN)
def test_a_page_is_what_its_script_writes(page, write):
    text = page.read_text(encoding="utf-8")
    assert write(text) == text, "run the script, python -m scripts.NAME"


def slug(heading):
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def matches(pattern):
    """Page and text, of all that a pattern finds in the pages."""
    for page in PAGES:
        for text in re.findall(pattern, page.read_text(encoding="utf-8")):
            yield page, text


def leads_somewhere(page, target):
    """Whether the file that a link names exists, and has the heading of its anchor."""
    path, _, anchor = target.partition("#")
    linked = (page.parent / path).resolve() if path else page
    if not anchor or not linked.exists():
        return linked.exists()
    headings = re.findall(r"^#+ (.*)$", linked.read_text(encoding="utf-8"), re.M)
    return anchor in {slug(heading) for heading in headings}


def test_links_have_existing_targets():
    links = list(matches(r"\]\((?!https?:)([^)\s]+)\)"))
    assert len(links) > 100
    assert_none(
        f"{page.relative_to(ROOT)}: {target}"
        for page, target in links
        if not leads_somewhere(page, target)
    )


def test_python_files_named_in_docs_exist():
    folders = [ROOT, ROOT / "kfac_engine", *(ROOT / "kfac_engine").glob("*/")]
    assert_none(
        f"{page.relative_to(ROOT)}: {name}"
        for page, name in matches(r"`([\w/]+\.py)`")
        if not any((folder / name).is_file() for folder in [*folders, page.parent])
    )
