"""The page in a headless browser: figures as drawn, no requests, no errors."""

import json
import re
import shutil
import subprocess

import numpy as np
import pytest

import kfac_engine as ke
from tests.run_report.page_reader import PageReader
from tests.run_report.test_page import HOSTILE, record, run

BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(BROWSER is None, reason="no Chromium is installed"),
]


def rendered(path, tmp_path, width=1200):
    """The page after its script, and the lines that the browser writes to its log."""
    done = subprocess.run(
        [
            BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom",
            f"--window-size={width},1000", f"--user-data-dir={tmp_path / 'profile'}",
            "--virtual-time-budget=3000", "--enable-logging=stderr", path.as_uri(),
        ],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


@pytest.fixture(scope="module")
def drawn(tmp_path_factory):
    folder = tmp_path_factory.mktemp("browser")
    history = run()
    ke.report(history, folder / "run.html")
    return history, *rendered(folder / "run.html", folder)


def test_the_browser_reports_no_error(drawn):
    _, _, console = drawn
    assert console == []


def test_every_figure_has_a_drawing_with_a_name(drawn):
    _, page, _ = drawn
    figures = re.findall(r"<figure.*?</figure>", page, re.S)
    assert len(figures) == len(
        re.findall(r'<svg viewBox="0 0 \d+ \d+" role="img" aria-label="[^"]+">', page)
    )
    for figure in figures:
        assert re.search(r'<path d="M|<rect ', figure)
        assert 'role="slider"' in figure
        assert "NaN" not in figure
        assert "undefined" not in figure


def test_the_last_values_under_the_charts_are_those_of_the_records(drawn):
    history, page, _ = drawn
    last = history.records[-1]
    loss = re.search(r'id="chart-0".*?class="readout">(.*?)</p>', page, re.S)[1]
    batch, validation = re.fullmatch(r"last: batch (\S+) · validation (\S+)", loss).groups()
    assert float(batch) == pytest.approx(last["loss"], rel=1e-4)
    assert float(validation) == pytest.approx(last["validation_loss"], rel=1e-4)


def test_a_line_of_the_drawing_has_the_shape_of_the_records(drawn):
    history, page, _ = drawn
    figure = re.search(r'<figure id="chart-0".*?</figure>', page, re.S)[0]
    svg = figure.partition('role="img"')[2]
    path = re.search(r'<path d="([^"]*)" class="(?:line|faint) s0">', svg)[1]
    points = np.array([[float(x) for x in pair.split()] for pair in re.split("[ML]", path)[1:]])
    chart = PageReader(page).data["charts"][0]
    values = np.array(chart["series"][0]["value"])
    scaled = np.log(values) if chart["logarithmic"] else values
    part = (scaled - scaled.min()) / (scaled.max() - scaled.min())
    bottom, top = points[:, 1].max(), points[:, 1].min()
    # Coordinates are rounded to a tenth of a pixel.
    np.testing.assert_allclose(points[:, 1], bottom - part * (bottom - top), atol=0.2)
    assert np.ptp(np.diff(points[:, 0])) <= 0.21  # steps are equidistant
    assert len(points) == len(history.records)


@pytest.mark.parametrize("width", [360, 1600])
def test_hostile_names_run_nothing_and_request_nothing(width, tmp_path):
    description = {"model": HOSTILE, "settings": {HOSTILE: HOSTILE}}
    records = [record(1, **{HOSTILE: 3.0}), record(2, **{HOSTILE: 1.0})]
    log = tmp_path / "run.jsonl"
    log.write_text("".join(json.dumps(line) + "\n" for line in [{"run": description}, *records]))
    ke.report(log, tmp_path / "run.html")
    page, console = rendered(tmp_path / "run.html", tmp_path, width)
    assert console == []  # neither a blocked request nor a refused script
    before = PageReader((tmp_path / "run.html").read_text(encoding="utf-8"))
    assert page.count("<script") == sum(tag == "script" for tag, _ in before.elements)
    assert "<img" not in page
