"""What ``repr`` and a notebook show of optimizers and of the history of a run."""

import numpy as np
import pytest

import kfac_engine as ke
from tests.engine.test_summaries import facts
from tests.test_summary import Reader
from tests.training import softmax_net as net


def halved(step):
    return 0.5**step


OPTIMIZERS = {
    "K-FAC": (ke.KfacOptimizer, {}, {"learning rate": "auto"}),
    "K-FAC with options": (
        ke.KfacOptimizer,
        {"learning_rate": 0.1, "momentum": 0.8, "l2": 0.01},
        {"learning rate": "0.1", "momentum": "0.8", "l2": "0.01"},
    ),
    "SGD": (ke.SGD, {"learning_rate": halved}, {"learning rate": "function halved"}),
    "Adam": (ke.Adam, {"betas": (0.8, 0.9)}, {"learning rate": "0.001", "betas": "(0.8, 0.9)"}),
    "AdamW": (ke.AdamW, {"weight_decay": 0.3}, {"learning rate": "0.001", "weight_decay": "0.3"}),
    "GaussNewton": (ke.GaussNewton, {"l2": 0.1}, {"learning rate": "1.0", "l2": "0.1"}),
    "Muon": (ke.Muon, {"adam_rate": halved}, {"adam_rate": "function halved"}),
}


@pytest.mark.parametrize(("kind", "options", "shown"), OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_repr_of_an_optimizer_has_the_options_that_differ_from_the_defaults(kind, options, shown):
    optimizer = kind(net.engine(), **options)
    assert repr(optimizer).splitlines()[0] == f"{kind.__name__} of 'net'"
    read = facts(optimizer)
    assert read.pop("steps") == "0"
    assert read | shown == read
    assert set(read) == {"learning rate", *(options.keys() - {"learning_rate"})}
    assert Reader(optimizer._repr_html_()).texts[0] == f"{kind.__name__} of 'net'"


def test_repr_of_an_optimizer_follows_its_state():
    optimizer = ke.SGD(net.engine(), 0.1, non_finite="skip")
    x, y = net.batch()
    optimizer.step({"x": x}, y)
    optimizer.step({"x": np.full_like(x, np.nan)}, y)
    optimizer.learning_rate = 0.05
    assert facts(optimizer) == {
        "learning rate": "0.05",
        "steps": "1, 1 skipped",
        "non_finite": "skip",
    }


def history():
    x, y = net.batch(n=24)
    data = ({"x": x}, y)
    return ke.fit(net.engine(), data, optimizer="sgd", epochs=12, batch_size=12, validation=data)


def test_repr_of_a_history_has_the_end_of_the_run():
    run = history()
    shown, last = facts(run), run.records[-1]
    assert repr(run).startswith("Training of 'net' by SGD\n")
    assert shown["steps"] == "24 in 12 epochs"
    assert shown["loss"] == f"{last['loss']:.4g} of the last batch"
    assert float(shown["validation_loss"]) == pytest.approx(last["validation_loss"], rel=1e-3)


def test_html_of_a_history_has_the_last_steps_first():
    run = history()
    reader = Reader(run._repr_html_())
    start = reader.texts.index("epoch") - 1
    heads = ["step", "epoch", "seconds", "loss", "learning_rate"]
    assert reader.texts[start : start + 5] == heads
    width = reader.tags[reader.tags.index("thead") :].count("th")
    row = reader.texts[start + width :][:width]
    last = run.records[-1]
    assert row[:2] == ["24", "11"]
    assert float(row[3]) == pytest.approx(last["loss"], rel=1e-3)
    assert float(row[5]) == pytest.approx(last["validation_loss"], rel=1e-3)
    assert reader.texts[-1] == "… 4 more steps before"


def test_names_of_metrics_are_escaped():
    record = {"step": 1, "epoch": 0, "seconds": 0.1, "loss": 1.0, "<script>": 0.5}
    run = ke.History(net.engine(), ke.SGD(net.engine(), 0.1), [record])
    reader = Reader(run._repr_html_())
    assert "script" not in reader.tags
    assert "<script>" in reader.texts


def test_history_of_no_step_is_shown():
    empty = ke.History(net.engine(), ke.SGD(net.engine(), 0.1), [])
    assert facts(empty) == {"steps": "0"}
    assert Reader(empty._repr_html_()).texts == ["Training of 'net' by SGD", "steps", "0"]
