"""The page in a headless browser reports no error and requests nothing."""

import json
import shutil
import subprocess

import pytest

import kfac_engine as ke
from tests.html_report.page_reader import PageReader
from tests.html_report.test_page import HOSTILE, record, run

BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(BROWSER is None, reason="no Chromium is installed"),
]


def rendered(path, tmp_path, width=1200):
    """The page as the browser reads it, and the lines that the browser writes to its log."""
    done = subprocess.run(
        [
            BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom",
            f"--window-size={width},1000", f"--user-data-dir={tmp_path / 'profile'}",
            "--virtual-time-budget=3000", "--enable-logging=stderr", path.as_uri(),
        ],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


def test_the_browser_reports_no_error(tmp_path):
    ke.report(run(), tmp_path / "run.html")
    page, console = rendered(tmp_path / "run.html", tmp_path)
    assert console == []
    assert page.count("<figure") == page.count("</figure>") > 5


@pytest.mark.parametrize("width", [360, 1600])
def test_hostile_names_run_nothing_and_request_nothing(width, tmp_path):
    description = {"model": HOSTILE, "settings": {HOSTILE: HOSTILE}}
    records = [record(1, **{HOSTILE: 3.0}), record(2, **{HOSTILE: 1.0})]
    log = tmp_path / "run.jsonl"
    log.write_text("".join(json.dumps(line) + "\n" for line in [{"run": description}, *records]))
    ke.report(log, tmp_path / "run.html")
    page, console = rendered(tmp_path / "run.html", tmp_path, width)
    assert console == []  # no blocked request
    before = PageReader((tmp_path / "run.html").read_text(encoding="utf-8"))
    assert page.count("<svg") == sum(tag == "svg" for tag, _ in before.elements)
    assert "<script" not in page
    assert "<img" not in page
