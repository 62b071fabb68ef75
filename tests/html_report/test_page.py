"""The figures of a page are those of the log; names of a hostile log stay texts."""

import base64
import hashlib
import re
from contextlib import suppress

import numpy as np
import pytest

import kfac_engine as ke
from kfac_engine.html_report.charts import MOST_POINTS, MOST_RANGES
from kfac_engine.html_report.page import page
from kfac_engine.html_report.run_log import log_of_lines
from tests.html_report.page_reader import PageReader
from tests.training import softmax_net as net

# Numbers of the tables have eight digits.
DIGITS = 1e-7
HOSTILE = "</script><script>alert(1)</script><!--<img src=x onerror=alert(2)>&amp;\"'\u2028\u202e"


def run(**options):
    """A history of 12 steps with validation."""
    settings = {"epochs": 4, "batch_size": 16, "metrics": ("loss", "accuracy")} | options
    engine = net.engine()
    optimizer = ke.KfacOptimizer(engine, 0.05, adapt_damping=True)
    return ke.fit(engine, net.batch(n=50), optimizer=optimizer, validation=net.batch(7), **settings)


@pytest.fixture(scope="module")
def history():
    return run()


@pytest.fixture(scope="module")
def read(history, tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "run.html"
    ke.report(history, path)
    return PageReader(path.read_text(encoding="utf-8"))


LINES = {
    ("Loss", "batch"): "loss",
    ("Loss", "validation"): "validation_loss",
    ("accuracy", "accuracy"): "accuracy",
    ("Learning rate", "learning rate"): "learning_rate",
    ("Damping", "damping"): "damping",
    ("Reduction ratio", "reduction ratio"): "reduction_ratio",
}


@pytest.mark.parametrize(("line", "name"), LINES.items(), ids=LINES.values())
def test_a_line_has_the_points_of_the_records(read, history, line, name):
    drawn = read.lines[line]
    records = [record for record in history.records if name in record]
    assert records
    for head, entry in {"step": "step", "seconds": "seconds", "value": name}.items():
        np.testing.assert_allclose(drawn[head], [r[entry] for r in records], rtol=DIGITS)


@pytest.mark.parametrize(("title", "name"), [("Loss", "loss"), ("Damping", "damping")])
def test_a_drawing_has_the_shape_of_the_records(read, history, title, name):
    points, values = read.drawn(title), np.array([r[name] for r in history.records])
    logarithmic = values.max() > 30 * values.min()
    scaled = np.log(values) if logarithmic else values
    # The validation may be above the losses of the batches.
    part = (scaled - scaled[0]) / np.ptp(scaled)
    pixels = points[0, 1] - part * np.ptp(points[:, 1])
    np.testing.assert_allclose(points[:, 1], pixels, atol=0.2)  # rounded to a tenth
    assert np.ptp(np.diff(points[:, 0])) <= 0.21  # steps are equidistant
    assert len(points) == len(history.records)


@pytest.mark.parametrize(
    ("name", "stage"), [("statistics", "statistics"), ("inverses", "inverses")]
)
def test_updates_of_the_curvature_have_the_times_of_the_records(read, history, name, stage):
    drawn = read.lines["Updates of the curvature", name]
    events = [record for record in history.records if f"seconds/{stage}" in record]
    assert 0 < len(events) <= len(history.records)
    assert drawn["step"] == [record["step"] for record in events]
    np.testing.assert_allclose(
        drawn["value"], [1e3 * record[f"seconds/{stage}"] for record in events], rtol=DIGITS
    )
    if stage == "inverses":
        assert events == [record for record in history.records if record["refreshed"]]


def test_the_stages_add_up_to_the_time_of_the_run(read, history):
    rows = {row[0]: float(row[1]) for row in read.tables["Time of the run by stage"][1:]}
    for name, total in rows.items():
        if name != "other":
            spent = sum(record.get(f"seconds/{name}", 0) for record in history.records)
            assert total == pytest.approx(spent, abs=5e-4)
        means = read.lines["Time of a step by stage", name]["value"]
        assert sum(means) / 1e3 == pytest.approx(total, abs=5e-4)  # a range has one step
    assert sum(rows.values()) == pytest.approx(history.records[-1]["seconds"], abs=5e-3)
    assert {"gradients", "statistics", "inverses", "precondition", "update"} < set(rows)


def test_the_summary_has_the_last_numbers_of_the_records(read, history):
    last = history.records[-1]
    validation = [r for r in history.records if "validation_loss" in r]
    best = min(validation, key=lambda record: record["validation_loss"])
    assert read.terms["steps"] == "12"
    assert read.terms["epochs begun"] == "4"
    assert float(read.terms["last loss of a batch"]) == pytest.approx(last["loss"], rel=1e-3)
    value, where = read.terms["lowest validation loss"].split(" at step ")
    assert float(value) == pytest.approx(best["validation_loss"], rel=1e-3)
    assert int(where) == best["step"]
    assert "momentum" in read.terms, "a number that never changes has no chart"


def test_the_spectra_are_those_of_the_engine(read, history):
    rows = {tuple(row[:2]): row for row in read.tables["Factors"][1:]}
    drawn = {key: line["value"] for key, line in read.lines.items() if len(line) == 2}
    spectra = ke.factor_spectra(history.engine)
    assert len(rows) == len(spectra) == len(drawn) == 4
    for spectrum in spectra:
        layer = ", ".join(spectrum.parameters)
        _, _, shape, largest, smallest, damping, below, _, damped = rows[layer, spectrum.factor]
        values = spectrum.eigenvalues
        assert shape == "×".join(map(str, spectrum.shape))
        shown = [float(cell) for cell in (largest, smallest, damping, damped)]
        expected = [values[-1], values[0], float(spectrum.damping), spectrum.damped_condition]
        np.testing.assert_allclose(shown, expected, rtol=1e-3)
        assert below == f"{spectrum.below_damping} of {len(values)}"
        above = values[values > spectrum.resolution * values[-1]][::-1]
        np.testing.assert_allclose(drawn[layer, spectrum.factor], above, rtol=DIGITS)
    assert read.page.count(">damping of ") == 4


# -- one file, without network ---------------------------------------------------------------------


def test_the_page_names_no_address(read):
    for tag, attributes in read.elements:
        for name in ("src", "href", "action", "srcset", "data", "poster"):
            assert attributes.get(name, "data:,") == "data:,", (tag, attributes)
    style = next(tag for tag, _ in read.elements if tag == "style")
    assert style
    assert not re.search(r"url\(|@import", read.page)


def test_the_security_policy_allows_the_style_of_the_page_alone(history, tmp_path):
    ke.report(history, tmp_path / "run.html")
    text = (tmp_path / "run.html").read_text(encoding="utf-8")
    read = PageReader(text)
    policy = next(a["content"] for _, a in read.elements if "http-equiv" in a)
    style = re.search(r"<style>(.*?)</style>", text, re.S)[1]
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    assert f"style-src 'sha256-{digest}'" in policy
    assert not any(tag == "script" or "style" in a for tag, a in read.elements)
    assert policy.startswith("default-src 'none'")
    assert "unsafe" not in policy


def test_charts_and_tables_have_names_for_assistive_technology(read):
    figures = sum(tag == "figure" for tag, _ in read.elements)
    names = [a["aria-label"] for tag, a in read.elements if a.get("role") == "img"]
    assert len(set(names)) == figures == sum(tag == "h3" for tag, _ in read.elements)
    regions = [a for _, a in read.elements if a.get("role") == "region"]
    assert [a["aria-label"] for a in regions] == list(read.tables)
    assert ("html", {"lang": "en"}) in read.elements


# -- hostile and long logs -------------------------------------------------------------------------


def record(step, **numbers):
    return {"step": step, "seconds": 0.5 * step, "loss": 1.0 / step} | numbers


def test_hostile_names_stay_texts():
    spectra = [{"parameters": [HOSTILE], "factor": HOSTILE, "count": 1, "eigenvalues": [[1, 2.0]]}]
    layers = [{"parameters": [HOSTILE], "kind": HOSTILE, "block": HOSTILE, "reason": HOSTILE}]
    settings = {HOSTILE: HOSTILE}
    description = {"model": HOSTILE, "layers": layers, "settings": settings, "versions": settings}
    text = page(
        log_of_lines(
            [{"run": description}, record(1, **{HOSTILE: 3.0}), record(2), {"spectra": spectra}]
        )
    )
    read = PageReader(text)
    tags = {tag for tag, _ in read.elements}
    assert "img" not in tags
    assert not any(name.startswith("on") for _, a in read.elements for name in a)
    assert "script" not in tags
    shown = HOSTILE.replace("\u2028", "\\u2028").replace("\u202e", "\\u202e")
    assert f"Training run: {shown}" in read.text
    assert {(shown, shown)} < set(read.lines)
    assert read.tables["Layers"][1][0] == shown


@pytest.mark.parametrize(
    "content",
    [
        {"layers": 3, "settings": [1], "versions": None},
        {"layers": [3, None, {}, {"factors": [[[]], "x", [{}]], "numbers": True, "bytes": "9"}]},
        {"settings": {"a": {"b": [1, [2, [3]]]}, "c": [None, {}, 1e300]}},
    ],
)
def test_values_of_a_wrong_type_are_not_shown(content):
    spectra = [
        {},
        {"parameters": 1, "shape": {}, "count": "x", "eigenvalues": [[1], 2, ["a", "b"]]},
    ]
    text = page(
        log_of_lines([{"run": content}, record(1, note="text", flag=None), {"spectra": spectra}])
    )
    assert PageReader(text).terms["steps"] == "1"


LARGEST, LEAST = 1.7976931348623157e308, 5e-324
NUMBERS = [
    LARGEST, -LARGEST, 1e150, 1e17, LEAST, -LEAST, 2**53, 10**308, -(10**400), True,
    float("nan"), float("inf"), None, [],
]  # fmt: skip
PLACES = [
    "seconds", "epoch", "loss", "validation_loss", "skipped", "learning_rate", "reduction_ratio",
    "accuracy", "seconds/inverses", "seconds/statistics",
]  # fmt: skip
SIZES = [
    "count", "smallest", "largest", "resolution", "damping", "below_damping", "condition",
    "eigenvalues", "shape",
]  # fmt: skip


@pytest.mark.parametrize("extreme", NUMBERS, ids=[f"{x!r:.12}" for x in NUMBERS])
def test_extreme_numbers_have_a_page(extreme):
    """The number alone at every place, and in all records at all places."""
    usual = dict.fromkeys(PLACES, 0.5) | {"refreshed": ["A"]}
    logs = [
        [{"step": 1, **usual, name: extreme}, {"step": 2, **usual}, {"step": 3, name: extreme}]
        for name in PLACES
    ]
    logs.append([{"step": i, **dict.fromkeys(usual, extreme)} for i in (1, 2, 3)])
    usual_spectrum = {"parameters": ["w"], "factor": "A", "count": 3, "largest": 1.0}
    for name in SIZES:
        entry = [[extreme, 1.0], [1, extreme]] if name == "eigenvalues" else extreme
        run = {"layers": [{"numbers": extreme, "bytes": extreme}]}
        logs.append([{"run": run}, {"step": 1}, {"spectra": [usual_spectrum | {name: entry}]}])
    for log in logs:
        text = page(log_of_lines(log))
        assert not re.search(r"\b(nan|inf)\b", text.split("</style>")[1])
    for steps in ([extreme], [1, extreme]):
        with suppress(ke.InputError):
            page(log_of_lines([{"step": step, **usual} for step in steps]))


def test_a_long_run_has_a_bounded_page_that_says_so():
    rng = np.random.default_rng(0)
    steps = 20_000
    losses = rng.lognormal(size=steps)
    records = [
        {"step": i + 1, "seconds": 0.1 * (i + 1), "loss": float(losses[i]), "seconds/update": 0.01}
        for i in range(steps)
    ]
    text = page(log_of_lines(records))
    read = PageReader(text)
    drawn = read.lines["Loss", "batch"]
    assert len(text) < 300_000
    assert MOST_POINTS / 2 < len(drawn["value"]) <= MOST_POINTS
    assert max(drawn["value"]) == pytest.approx(losses.max(), rel=DIGITS)
    assert min(drawn["value"]) == pytest.approx(losses.min(), rel=DIGITS)
    assert (drawn["step"][0], drawn["step"][-1]) == (1, steps)
    places = np.array(drawn["step"], int) - 1
    np.testing.assert_allclose(drawn["value"], losses[places], rtol=DIGITS)
    assert len(read.lines["Time of a step by stage", "update"]["value"]) == MOST_RANGES
    assert f"at most {MOST_POINTS:,} points" in read.text
    assert "at most" not in PageReader(page(log_of_lines(records[:MOST_POINTS]))).text


def test_averages_of_the_loss_are_means_of_the_steps_before():
    losses = np.random.default_rng(1).standard_normal(600) + 5
    records = [{"step": i + 1, "seconds": float(i), "loss": float(v)} for i, v in enumerate(losses)]
    mean = PageReader(page(log_of_lines(records))).lines["Loss", "mean of about 10 steps"]
    assert mean["step"] == list(range(10, 601, 10))
    np.testing.assert_allclose(mean["value"], losses.reshape(60, 10).mean(1))


@pytest.mark.parametrize("wrong", [3, None, ["run.jsonl"]])
def test_a_report_needs_a_history_or_a_path(wrong, tmp_path):
    with pytest.raises(ke.InputError, match="needs a History or the path of a log"):
        ke.report(wrong, tmp_path / "run.html")
