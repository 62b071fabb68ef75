"""Warnings are shown at the line of the user who called the package."""

import inspect
import warnings
from pathlib import Path

import numpy as np
import pytest

import kfac_engine as ke
from tests.models import parsed
from tests.training import softmax_net as net

X, Y = net.batch(dtype="float32", n=48)
MERGED = str(Path(__file__).parent / "exports" / "cnn-legacy.onnx")


def diverging_step(_):
    tested = net.engine("float32", threads=1)
    tested.step({"x": X}, Y)
    tested.set_parameters({n: 1e6 * v for n, v in tested.parameters.items()})
    tested.step({"x": X}, Y)  # here


def diverging_callback(_):
    """The innermost line of the user counts, whatever calls it."""
    own = net.engine("float32", threads=1)
    own.step({"x": X}, Y)

    def scale(record, optimizer):
        own.set_parameters({n: 1e6 * v for n, v in own.parameters.items()})
        own.step({"x": X}, Y)  # here

    ke.fit(net.model("float32"), (X, Y), optimizer="sgd", steps=1, callbacks=[scale])


def diverging_run(_):
    tested = net.engine("float32", gradient_dtype="float32", threads=1)
    ke.fit(tested, (1e3 * X, Y), optimizer=ke.SGD(tested, 1e3), steps=60, batch_size=16)  # here


def overfitting_run(_):
    tested = net.engine("float32", gradient_dtype="float32", threads=1)
    wrong = (X, (Y + 1) % 3)
    sgd = ke.SGD(tested, 0.5)
    ke.fit(tested, (X, Y), optimizer=sgd, epochs=40, batch_size=48, validation=wrong)  # here


def trained_normalization(_):
    ones, zeros = np.ones(net.D, np.float32), np.zeros(net.D, np.float32)
    model = parsed(
        f"""norm (float[batch,{net.D}] x) => (float[batch,{net.D}] z) {{
          h = BatchNormalization (x, scale, shift, mean, variance)  z = MatMul (h, w)
        }}""",
        {
            "scale": ones, "shift": zeros, "mean": zeros, "variance": ones,
            "w": np.eye(net.D, dtype=np.float32),
        },
    )  # fmt: skip
    ke.fit(model, (X, Y), steps=1)  # here


def merged_weights(_):
    ke.Engine.from_onnx(MERGED, loss="categorical")  # here


def other_damping(folder):
    path = folder / "state.safetensors"
    net.engine(damping=0.1).save(path)
    net.engine(damping=0.2).load(path)  # here


WARNING = {
    diverging_step: ke.DivergenceWarning,
    diverging_callback: ke.DivergenceWarning,
    diverging_run: ke.DivergenceWarning,
    overfitting_run: ke.OverfittingWarning,
    trained_normalization: ke.InferenceFormWarning,
    merged_weights: ke.ExportWarning,
    other_damping: UserWarning,
}


@pytest.mark.parametrize("call", WARNING, ids=lambda call: call.__name__)
def test_warning_is_shown_at_the_line_of_the_user(call, tmp_path):
    with warnings.catch_warnings(record=True) as issued:
        warnings.simplefilter("always")
        call(tmp_path)
    lines, start = inspect.getsourcelines(call)
    (here,) = (number for number, line in enumerate(lines, start) if "# here" in line)
    shown = {(w.filename, w.lineno) for w in issued if w.category is WARNING[call]}
    assert shown == {(__file__, here)}


def test_no_module_counts_its_own_frames():
    package = Path(ke.__file__).parent
    found = [p for p in package.rglob("*.py") if "warnings.warn(" in p.read_text(encoding="utf-8")]
    assert [path.name for path in found] == ["errors.py"]
