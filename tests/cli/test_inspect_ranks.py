"""`inspect --ranks` shows the cost of a rank, in 80 columns and as JSON."""

import json
import re
import sys

import pytest

import kfac_engine as ke
from kfac_engine.__main__ import main
from kfac_engine.cli.display import show_flops
from kfac_engine.data import demo_model
from kfac_engine.summary import binary_size
from tests.nightly import nightly_but

RANKS = 64


@pytest.fixture
def model(tmp_path):
    path = tmp_path / "cnn.onnx"
    path.write_bytes(demo_model("cnn"))
    return path


@pytest.fixture
def report():
    engine = ke.Engine.from_onnx(
        demo_model("cnn"), loss="categorical", schedule=ke.Schedule(refresh_every=20)
    )
    return engine.ranks_report(RANKS)


OPTIONS = ["--ranks", str(RANKS), "--refresh-every", "20"]


def test_json_has_the_cost_of_a_rank_for_each_distribution(model, report, capsys):
    assert main(["inspect", str(model), "--json", *OPTIONS]) == 0
    shown = json.loads(capsys.readouterr().out)["ranks"]
    assert shown["ranks"] == RANKS
    assert shown["distributions"].keys() == {"sgd", "replicate", "shard"}
    for name, cost in report.items():
        values = shown["distributions"][name]
        assert values["handed_over_bytes"] == cost.handed_over
        assert values["traffic_bytes"] == cost.traffic
        assert values["curvature_bytes"] == cost.memory
        assert values["refresh_multiplications"] == cost.refresh
        assert values["product_operations"] == cost.products


@pytest.mark.skipif(sys.platform == "win32", reason="pseudo-terminals need a POSIX system")
@pytest.mark.parametrize("width", nightly_but([80], [80, 120]))
def test_table_of_ranks_fits_the_terminal(model, report, width):
    from tests.cli.terminals import run_in_terminal

    lines = run_in_terminal(["inspect", str(model), *OPTIONS], width).lines
    start = lines.index("one of 64 ranks")
    rows = [line.strip() for line in lines[start + 2 : lines.index("", start + 2)]]
    assert rows[0].split() == ["quantity", "SGD", "replicate", "shard"]
    cells = {name: shown for name, *shown in (re.split(r"\s{2,}", row) for row in rows[2:])}
    costs = report.values()
    for name, measure, show in (
        ("handed to collectives", "handed_over", binary_size),
        ("traffic", "traffic", binary_size),
        ("averages and inverses", "memory", binary_size),
        ("refresh, slowest rank", "refresh", show_flops),
        ("products, slowest rank", "products", show_flops),
    ):
        values = [getattr(cost, measure) for cost in costs]
        assert cells[name] == [show(value) if value else "–" for value in values]
    text = " ".join(lines[start:])
    assert "the mean of a step, with a refresh every 20 calls." in text
    assert max(map(len, lines)) <= width


def test_a_number_of_ranks_below_one_is_refused(model, capsys):
    assert main(["inspect", str(model), "--ranks", "0"]) == 2
    assert "--ranks" in capsys.readouterr().err
