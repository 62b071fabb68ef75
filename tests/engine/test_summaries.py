"""What ``repr`` and a notebook show of an engine, its factors and its results."""

import re
from dataclasses import replace

import numpy as np
import pytest

import kfac_engine as ke
from kfac_engine.curvature.blocks.kronecker import KroneckerProductFB
from tests import models
from tests.models import Net
from tests.test_summary import Reader

HOSTILE = "<script>alert('x')</script>\x1b[31m"


def engine_of(model, **options):
    return ke.Engine.from_onnx(model, loss="categorical", backend="numpy", **options)


@pytest.fixture
def engine():
    return engine_of(models.mlp(), damping=0.02, schedule=ke.Schedule(refresh_every=7))


def stepped(engine, batch=12):
    inputs = {"input": np.random.default_rng(0).standard_normal((batch, 6), np.float32)}
    return engine.step(inputs, np.arange(batch) % 3)


def facts(summarized):
    """Name to value, from the lines of ``repr``."""
    lines = repr(summarized).splitlines()[1:]
    return dict(re.split(r"\s{2,}", line.strip(), maxsplit=1) for line in lines)


def test_repr_of_an_engine_has_its_facts(engine):
    stepped(engine)
    assert repr(engine).startswith("Engine of 'test_model'\n")
    assert facts(engine) == {
        "loss": "categorical on 'output'",
        # 6 · 5 + 5, 5 · 4 + 4 and 4 · 3 + 3.
        "parameters": "74 numbers in 6 arrays",
        "layers": "3",
        "backend": "numpy",
        "damping": "0.02",
        "schedule": "statistics every call, inverses every 7 calls (all_at_once)",
        "calls": "1 of step and observe",
    }


def test_html_of_an_engine_has_a_row_for_each_layer(engine):
    texts = Reader(engine._repr_html_()).texts
    start = texts.index("kind") - 1
    assert texts[start : start + 8] == [
        *("parameters", "kind", "block", "factors"),
        *("fc0.weight, fc0.bias", "fully_connected", "A ⊗ G", "7×7, 5×5"),
    ]
    assert texts[-4] == "fc2.weight, fc2.bias"


@pytest.fixture
def deep(engine, monkeypatch):
    """An engine whose layers are repeated to 9,999, and the calls that its reports take."""
    discovery = engine._assembly.discovery
    repeated = replace(discovery, layers=discovery.layers * 3333)
    engine._assembly = replace(engine._assembly, discovery=repeated)
    engine._entries.layers = repeated.layers
    calls, measure = [], KroneckerProductFB.factor_shapes

    def counted(block, shapes):
        calls.append(block)
        return measure(block, shapes)

    monkeypatch.setattr(KroneckerProductFB, "factor_shapes", counted)
    return engine, calls


def test_html_of_many_layers_is_bounded_in_length_and_cost(deep):
    engine, calls = deep
    page = engine._repr_html_()
    assert Reader(page).texts[-1] == "… 9,979 more layers"
    assert len(calls) == 20
    assert len(page) < 10_000
    assert facts(engine)["layers"] == "9,999"
    assert len(calls) == 20


def test_factors_of_many_layers_are_bounded_in_length_and_cost(deep):
    engine, calls = deep
    for text in (repr(engine.factors), engine.factors._repr_html_()):
        assert "… 19,978 more factors" in text
        assert len(text) < 10_000
    assert len(calls) <= 2 * 11  # two factors a layer


# -- results ---------------------------------------------------------------------------------------


def test_repr_of_a_result_has_loss_and_norms(engine):
    result = stepped(engine)
    shown = facts(result)
    assert list(shown) == ["loss", "gradients", "natural gradients"]
    assert float(shown["loss"]) == pytest.approx(result.loss, rel=1e-5)
    for name, arrays in (
        ("gradients", result.gradients),
        ("natural gradients", result.natural_gradients),
    ):
        text, _, norm = shown[name].partition(", norm ")
        assert text == "6 arrays of 74 numbers"
        flat = np.concatenate([array.ravel() for array in arrays.values()])
        assert float(norm) == pytest.approx(np.linalg.norm(flat), rel=1e-3)


def test_html_of_a_result_has_the_norms_of_each_parameter(engine):
    result = stepped(engine)
    texts = Reader(result._repr_html_()).texts
    row = texts[texts.index("fc1.weight") :][:4]
    assert row[1] == "4×5"
    for text, arrays in zip(row[2:], (result.gradients, result.natural_gradients), strict=True):
        assert float(text) == pytest.approx(np.linalg.norm(arrays["fc1.weight"]), rel=1e-3)


def test_result_without_natural_gradients_has_no_norms_of_them():
    result = ke.Result(0.5, {"w": np.full((1, 3), 2, np.float16)}, {})
    assert facts(result) == {"loss": "0.5", "gradients": "1 array of 3 numbers, norm 3.464"}
    assert Reader(result._repr_html_()).texts[-4:] == ["w", "1×3", "3.464", "–"]


def test_norms_do_not_overflow_and_cover_large_arrays():
    # More than one part of 2^20 numbers; the squares overflow float32.
    result = ke.Result(0.0, {"w": np.full(3 << 19, 1e25, np.float32)}, {"w": np.zeros((0, 2))})
    norm = float(facts(result)["gradients"].partition("norm ")[2])
    assert norm == pytest.approx(1e25 * np.sqrt(3 << 19), rel=1e-3)


def test_result_of_many_parameters_is_bounded_in_length():
    arrays = {f"w{i}": np.ones(3, np.float32) for i in range(10_000)}
    result = ke.Result(0.0, arrays, arrays)
    assert facts(result)["gradients"] == "10,000 arrays of 30,000 numbers, norm 173.2"
    page = result._repr_html_()
    assert Reader(page).texts[-1] == "… 9,980 more parameters"
    assert len(page) < 10_000


# -- factors ---------------------------------------------------------------------------------------


def test_repr_of_a_view_is_one_line_with_its_numbers(engine):
    view = engine.factors["fc1.weight"].input
    assert repr(view) == "FactorView('fc1.weight: A', input, shape 6×6)"
    stepped(engine)
    text = f"shape 6×6, trace {view.trace:.4g}, damping {view.damping:.4g})"
    assert repr(view) == f"FactorView('fc1.weight: A', input, {text}"


def test_factors_of_a_parameter_are_a_table(engine):
    stepped(engine)
    lines = [line.split() for line in repr(engine.factors["fc1.bias"]).splitlines()]
    assert lines[0] == ["Factors", "of", "'fc1.bias'"]
    assert lines[1] == ["factor", "role", "shape", "trace", "damping"]
    assert lines[2][:4] == ["fc1.weight:", "A", "input", "6×6"]
    view = engine.factors["fc1.bias"].output
    assert lines[3][2:] == ["output", "4×4", f"{view.trace:.4g}", f"{view.damping:.4g}"]
    assert Reader(engine.factors["fc1.bias"]._repr_html_()).texts[0] == "Factors of 'fc1.bias'"


def test_factors_of_an_engine_are_a_table(engine):
    lines = repr(engine.factors).splitlines()
    assert lines[0] == "Factors of 6 parameters"
    assert [line.split()[0] for line in lines[2:]] == [
        f"fc{layer}.weight:" for layer in (0, 0, 1, 1, 2, 2)
    ]


def test_dampings_of_groups_are_shown_as_a_range():
    net = Net()
    weight = net.weight("conv.weight", 4, 2, 3, 3)
    net.op("Flatten", net.op("Conv", "input", weight, to="conv", group=2), to="flat")
    net.op("MatMul", "flat", net.weight("fc.weight", 16, 3), to="output")
    engine = engine_of(net.model({"input": ["batch", 4, 4, 4]}, {"output": ["batch", 3]}))
    engine.observe({"input": np.random.default_rng(0).standard_normal((9, 4, 4, 4), np.float32)})
    view = engine.factors["conv.weight"].input
    low, high = sorted(view.damping)
    assert f"damping {low:.4g}–{high:.4g})" in repr(view)


# -- names of a file -------------------------------------------------------------------------------


def test_names_of_a_file_are_escaped():
    net = Net()
    weight = net.weight(HOSTILE, 6, 3)
    net.op("MatMul", "input", weight, to="output")
    model = net.model({"input": ["batch", 6]}, {"output": ["batch", 3]})
    model.graph.name = HOSTILE
    engine = engine_of(model)
    result = stepped(engine)
    factors = engine.factors[HOSTILE]
    for summarized in (engine, result, factors, engine.factors, factors.input):
        assert all(line.isprintable() for line in repr(summarized).splitlines())
    for summarized in (engine, result, factors, engine.factors):
        reader = Reader(summarized._repr_html_())
        assert "script" not in reader.tags
        assert not [text for text in reader.texts if not text.isprintable()]
        assert any("<script>" in text for text in reader.texts)
