"""A file that leaves sizes to the data takes them from the first examples."""

import numpy as np
import onnx
import pytest

import kfac_engine as ke
from kfac_engine.__main__ import main
from kfac_engine.datasets.first_examples import with_first_examples
from kfac_engine.errors import BackendError
from tests.comparing import assert_arrays_equal
from tests.engine.test_recurrent_engine import CLASSES, D_IN, HIDDEN, weights
from tests.models import parsed

EXAMPLES, STEPS = 20, 13
rng = np.random.default_rng(0)
X = rng.normal(size=(EXAMPLES, STEPS, D_IN)).astype(np.float32)
Y = rng.integers(0, CLASSES, EXAMPLES)


def classifier(shape, *, batch_first=True):
    """A recurrent classifier that declares no number of steps."""
    steps_first = "Transpose <perm = [1, 0, 2]> (x)" if batch_first else "Identity (x)"
    return parsed(
        f"""classifier (float[{shape}] x) => (float[n,{CLASSES}] logits) {{
          rows = {steps_first}
          [memory] "", h = GRU <hidden_size = {HIDDEN}> (rows, W, R, B)
          last = Squeeze (h, axes)  logits = Gemm (last, V, c)
        }}""",
        {**weights("GRU"), "axes": [0]},
    )


class Loader:
    def __iter__(self):
        return iter([(X[:8], Y[:8]), (X[8:], Y[8:])])


def steps_first(x, y):
    return np.ascontiguousarray(x.swapaxes(0, 1)), y


DATA = {
    "arrays": lambda _: (X, Y),
    "a dictionary": lambda _: {"x": X, "targets": Y},
    "batches": lambda _: [(X[:8], Y[:8]), (X[8:], Y[8:])],
    "a loader": lambda _: Loader(),
    "a file": lambda place: str(place / "d.npz"),
}
OPTIONS = {"loss": "categorical", "threads": 1}
# Numbers that a call computes for a file, and for a file or an engine whose sample is given.
CALLS = {
    "fit": (
        lambda model: ke.fit(model, (X, Y), steps=3, batch_size=8).engine.parameters,
        lambda model: ke.fit(sampled(model), (X, Y), steps=3, batch_size=8).engine.parameters,
    ),
    "curvature": (
        lambda model: ke.curvature(model, (X, Y), **OPTIONS).diagonal(),
        lambda model: ke.curvature(model, (X, Y), sample_inputs={"x": X}, **OPTIONS).diagonal(),
    ),
    "operator": (
        lambda model: product(ke.curvature_operator(model, (X, Y), **OPTIONS)),
        lambda model: product(
            ke.curvature_operator(model, (X, Y), sample_inputs={"x": X}, **OPTIONS)
        ),
    ),
}


def sampled(model):
    return ke.Engine.from_onnx(
        model, loss="categorical", gradient_dtype="float32", sample_inputs={"x": X[:8]}
    )


def product(operator):
    vector = np.random.default_rng(1).standard_normal(operator.shape[1])
    return {"": operator @ vector}


@pytest.mark.parametrize("form", DATA)
def test_sample_has_the_steps_of_the_data(form, tmp_path):
    np.savez(tmp_path / "d.npz", x=X, targets=Y)
    _, sample = with_first_examples(classifier("n,t,2"), DATA[form](tmp_path))
    np.testing.assert_array_equal(sample["x"], X[:8])


@pytest.mark.parametrize("call", CALLS)
def test_recurrent_file_gives_the_numbers_of_a_given_sample(call):
    found, expected = (compute(classifier("n,t,2")) for compute in CALLS[call])
    assert all(np.any(array) for array in expected.values())
    assert found.keys() == expected.keys()
    assert_arrays_equal(found, expected)


def test_recurrent_file_is_verified_without_a_sample():
    verified = ke.verify(classifier("n,t,2"), (X, Y), loss="categorical", examples=2, parameters=1)
    assert verified.passed
    assert any(check.measurements for check in verified.checks)


@pytest.mark.parametrize(
    ("shape", "axes", "expected"),
    [
        ("t,batch,2", None, X[:8].swapaxes(0, 1)),  # the axis with the name of the batch
        ("p,q,2", {"x": 1}, X[:8].swapaxes(0, 1)),  # the axis that the user names
        ("p,q,2", None, X.swapaxes(0, 1)),  # targets show that the first axis has no examples
        (f"{STEPS},n,2", None, None),  # the number of examples is open only
        (f"{STEPS},{EXAMPLES},2", None, None),
    ],
)
def test_sample_has_the_first_examples(shape, axes, expected):
    model = classifier(shape, batch_first=False)
    _, sample = with_first_examples(model, steps_first(X, Y), axes, divided=False)
    if expected is None:
        assert sample is None
    else:
        np.testing.assert_array_equal(sample["x"], expected)


def test_arrays_that_are_cut_later_are_no_sample_where_the_axis_is_unknown():
    model = classifier("p,q,2", batch_first=False)
    assert with_first_examples(model, steps_first(X, Y))[1] is None
    assert with_first_examples(model, [steps_first(X, Y)])[1] is not None


def test_declared_number_of_examples_is_that_of_the_sample():
    _, sample = with_first_examples(classifier("5,t,2"), (X, Y))
    np.testing.assert_array_equal(sample["x"], X[:5])


def test_iterator_keeps_its_first_batch():
    model, options = classifier("n,t,2"), {"loss": "categorical", "threads": 1}
    found = ke.curvature(model, iter(Loader()), **options)
    assert found.examples == EXAMPLES
    expected = ke.curvature(model, (X, Y), **options).trace()
    assert found.trace() == pytest.approx(expected, rel=1e-5)  # sums of float32 in other batches


@pytest.mark.parametrize(
    "data",
    [
        iter(Loader()),  # is read in each epoch
        (X[:8, :, :1], Y[:8]),
        (X[0], Y),
        (X, Y[:3]),
        ({"z": X}, Y),
        "missing.npz",
        3,
    ],
)
def test_wrong_data_get_their_message(data):
    with pytest.raises(ke.KfacError) as found:
        ke.fit(classifier("n,t,2"), data, steps=1)
    engine = ke.Engine.from_onnx(
        classifier("n,t,2"), loss="categorical", sample_inputs={"x": X}, gradient_dtype="float32"
    )
    with pytest.raises(ke.KfacError) as expected:
        ke.fit(engine, data, steps=1)
    assert f"{found.value}" == f"{expected.value}"


def test_other_number_of_steps_is_refused_by_name():
    with pytest.raises(BackendError, match=f"unrolled over {STEPS} steps"):
        ke.fit(classifier("n,t,2"), [(X, Y), (X[:, :5], Y)], epochs=1)


def test_train_takes_the_steps_of_its_data(tmp_path):
    file, data = str(tmp_path / "m.onnx"), str(tmp_path / "d.npz")
    onnx.save(classifier("n,t,2"), file)
    np.savez(data, x=X, targets=Y)
    rest = "--loss", "categorical", "--steps", "20", "-o", str(tmp_path / "out.onnx")
    assert main(["train", file, "--data", data, *rest]) == 0
