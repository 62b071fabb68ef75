"""The lines of a plot are the eigenvalues of a factor and its damping."""

import sys

import numpy as np
import pytest

import kfac_engine as ke
from kfac_engine.engine.spectra import FactorSpectrum, plot_spectra
from tests import models

matplotlib = pytest.importorskip("matplotlib")


@pytest.fixture
def axes():
    from matplotlib.figure import Figure

    return Figure().subplots()


@pytest.fixture(scope="module")
def engine():
    model = models.mlp()
    engine = ke.Engine.from_onnx(model, loss="categorical", backend="numpy")
    engine.observe(models.random_inputs(model, 12))
    return engine


def test_plot_draws_eigenvalues_descending_and_the_damping(engine, axes):
    view = engine.factors["fc1.weight"].input
    assert view.plot(axes) is axes
    curve, dashed = axes.lines
    expected = np.linalg.eigvalsh(view.value.astype(np.float64))[::-1]
    np.testing.assert_array_equal(curve.get_ydata(), expected)
    np.testing.assert_allclose(curve.get_xdata(), [0, 20, 40, 60, 80, 100])
    assert list(dashed.get_ydata()) == [view.damping] * 2
    assert dashed.get_linestyle() == "--"
    assert axes.get_yscale() == "log"
    assert axes.get_title(loc="left") == "fc1.weight: A"
    (text,) = axes.get_legend().get_texts()
    assert text.get_text().startswith("A, condition ")
    assert text.get_text().endswith(f"damped {view.condition:.3g}")


def test_plot_opens_a_figure_where_no_axes_are_passed(engine, monkeypatch):
    matplotlib.use("Agg")
    from matplotlib import pyplot

    axes = engine.factors["fc1.weight"].output.plot()
    assert axes.figure.number in pyplot.get_fignums()
    assert len(axes.lines) == 2
    pyplot.close(axes.figure)


def test_plot_refuses_other_objects_than_axes(engine):
    with pytest.raises(ke.InputError, match="ax must be an Axes of matplotlib, got str"):
        engine.factors["fc1.weight"].plot("axes")


def test_plot_without_matplotlib_names_the_extra(engine, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ke.BackendError, match=r"pip install 'kfac-engine\[plot\]'"):
        engine.factors["fc1.weight"].input.plot()


def spectrum(eigenvalues, damping):
    values = np.array(eigenvalues)
    level = None if damping is None else np.array(damping)
    return FactorSpectrum(("w",), "A", values.shape, 1e-9, values, level)


def test_plot_has_a_bounded_number_of_points_with_both_ends(axes):
    values = np.geomspace(1e-3, 1e3, 100_000)
    plot_spectra("w", [("F", spectrum(values, None))], axes)
    (curve,) = axes.lines
    assert len(curve.get_ydata()) == 2000
    assert (curve.get_ydata()[0], curve.get_ydata()[-1]) == (values[-1], values[0])
    assert set(curve.get_ydata()) <= set(values)


@pytest.mark.parametrize(
    "name", ["a_{$x", "_hidden", "$\\frac{$", "<b>", "n" * 1000, "a\nb\x1b[31m"]
)
def test_names_of_a_file_are_drawn_as_text(axes, name, tmp_path):
    plot_spectra(name, [(f"A of {name}", spectrum([1.0, 2.0], 0.1))], axes)
    axes.figure.savefig(tmp_path / "plot.png")
    title = axes.get_title(loc="left")
    assert "\x1b" not in title
    assert "\n" not in title
    assert len(title) < 60
    assert len(axes.get_legend().get_texts()) == 1
