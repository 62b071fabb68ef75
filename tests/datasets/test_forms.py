"""Data of one meaning: every function that takes data takes them in every form, with one result."""

from itertools import pairwise

import numpy as np
import onnx
import pytest
from safetensors.numpy import load_file

import kfac_engine as ke
from kfac_engine.__main__ import main
from kfac_engine.datasets.forms import FILE_BATCH, batches_of, whole_batch
from tests.comparing import assert_arrays_close
from tests.training import softmax_net as net
from tests.training.test_data_files import Tensor

N = 12
X, Y = net.batch(n=N)
# Sums of 12 float64 terms in another order.
CLOSE = {"rtol": 1e-9, "atol": 1e-12}
EDGES = (0, 5, 6, N)  # of batches and shards


class Loader:
    """Batches that can be read again, and have no length."""

    def __iter__(self):
        return iter(parts())


def parts():
    return [(X[a:b], Y[a:b]) for a, b in pairwise(EDGES)]


def saved(path, save, *arrays, **named):
    save(path, *arrays, **named)
    return path


def folder(place, kind):
    place.mkdir()
    for index, (x, y) in enumerate(parts()):
        if kind == "npz":
            np.savez(place / f"{index}.npz", x=x, targets=y)
        else:
            np.save(place / f"{index}.x.npy", x)
            np.save(place / f"{index}.targets.npy", y)
    return place


FORMS = {
    "a pair of a dictionary and an array": lambda _: ({"x": X}, Y),
    "a pair of arrays": lambda _: (X, Y),
    "a list of two arrays": lambda _: [X, Y],
    "a pair with targets by output": lambda _: (X, {"z": Y}),
    "arrays by name": lambda _: {"x": X, "targets": Y},
    "arrays by name and output": lambda _: {"x": X, "z": Y},
    "tensors": lambda _: (Tensor(X), Tensor(Y)),
    "a file": lambda place: saved(place / "d.npz", np.savez, x=X, targets=Y),
    "the text of a path": lambda place: str(saved(place / "d.npz", np.savez, x=X, targets=Y)),
    "a compressed file": lambda place: saved(place / "d.npz", np.savez_compressed, x=X, targets=Y),
    "two files": lambda place: (
        saved(place / "x.npy", np.save, X),
        saved(place / "y.npz", np.savez, labels=Y),
    ),
    "a dictionary of files": lambda place: {"x": saved(place / "x.npy", np.save, X), "targets": Y},
    "a folder of archives": lambda place: folder(place / "shards", "npz"),
    "a folder of arrays": lambda place: folder(place / "shards", "npy"),
    "a list of pairs": lambda _: parts(),
    "a list of lists": lambda _: [[{"x": x}, y] for x, y in parts()],
    "a list of dictionaries": lambda _: [{"x": x, "targets": y} for x, y in parts()],
    "two dictionaries": lambda _: ({"x": X[:5], "targets": Y[:5]}, {"x": X[5:], "targets": Y[5:]}),
    "a loader": lambda _: Loader(),
}
UNLABELED = {
    "a dictionary": lambda _: {"x": X},
    "an array": lambda _: X,
    "a tensor": lambda _: Tensor(X),
    "a file": lambda place: saved(place / "x.npy", np.save, X),
    "an archive": lambda place: saved(place / "x.npz", np.savez, x=X),
    "a list of dictionaries": lambda _: [{"x": x} for x, _ in parts()],
    "an iterator of arrays": lambda _: (x for x, _ in parts()),
}


@pytest.mark.parametrize("call", ["fit", "evaluate"])
def test_an_array_without_targets_is_told_so(engine, call):
    calls = {"fit": lambda: ke.fit(engine, X, steps=1), "evaluate": lambda: engine.evaluate(X)}
    with pytest.raises(ke.InputError, match=r"the data have no targets; give a pair"):
        calls[call]()


@pytest.mark.parametrize("call", ["fit", "evaluate"])
def test_targets_as_an_argument_of_their_own_are_refused(engine, call):
    function = getattr(engine if call == "evaluate" else ke, call)
    arguments = (X, Y) if call == "evaluate" else (net.model(), X, Y)
    with pytest.raises(ke.InputError, match=rf"one argument: {call}\(.*\(inputs, targets\), …\)"):
        function(*arguments)


@pytest.fixture(scope="module")
def engine():
    return net.engine(threads=1)


@pytest.fixture(scope="module")
def curvature():
    return measured({"x": X, "targets": Y})


def measured(data, **options):
    return ke.curvature(net.model(), data, loss="categorical", threads=1, **options)


def numbers(curvature):
    arrays = [array.ravel() for array in curvature.diagonal().values()]
    return np.concatenate([*arrays, [curvature.examples, curvature.log_likelihood or 0.0]])


def validated(engine, data):
    frozen = ke.SGD(engine, 0.0)
    history = ke.fit(engine, data, optimizer=frozen, steps=1, batch_size=5, validation=data)
    return history.records[-1]["validation_loss"]


def verified(engine, data):
    result = ke.verify(engine, data, examples=3, parameters=1)
    return [result.examples] + [
        m.error < m.tolerance for c in result.checks for m in c.measurements
    ]


def product(data):
    operator = ke.curvature_operator(net.model(), data, loss="categorical", threads=1)
    return operator @ np.ones(operator.shape[0])


# Each takes an engine, a curvature and data.
ENTRANCES = {
    "fit": lambda engine, _, data: validated(engine, data),
    "evaluate": lambda engine, _, data: list(engine.evaluate(data).values()),
    "predict": lambda engine, _, data: engine.predict(data),
    "curvature": lambda *given: numbers(measured(given[-1], fisher="empirical")),
    "curvature in two passes": lambda *given: numbers(measured(given[-1], structure="ekfac")),
    "curvature_operator": lambda *given: product(given[-1]),
    "fit_prior": lambda _, curvature, data: (
        ke.Laplace(curvature).fit_prior(validation=data).prior_precision
    ),
    "Laplace.predict": lambda _, curvature, data: (
        ke.Laplace(curvature).predict(data, joint=True).covariance
    ),
    "Influence.scores": lambda _, curvature, data: ke.Influence(curvature).scores(data, data),
    "Influence.self_scores": lambda _, curvature, data: ke.Influence(curvature).self_scores(data),
    "verify": lambda engine, _, data: verified(engine, data),
}


@pytest.fixture(scope="module")
def expected(engine, curvature):
    """The results for a dictionary of arrays."""
    data = {"x": X, "targets": Y}
    return {name: call(engine, curvature, data) for name, call in ENTRANCES.items()}


@pytest.mark.parametrize("form", FORMS)
def test_every_entrance_takes_every_form(form, engine, curvature, expected, tmp_path):
    data = FORMS[form](tmp_path)
    for name, call in ENTRANCES.items():
        found = call(engine, curvature, data)
        np.testing.assert_allclose(found, expected[name], err_msg=name, **CLOSE)


@pytest.mark.parametrize("form", UNLABELED)
def test_inputs_alone_are_data_where_no_targets_are_needed(form, engine, curvature, tmp_path):
    expected = {
        "predict": net.forward(net.weights(), X)[1],
        "curvature": numbers(measured(({"x": X}, None))),
        "Laplace.predict": ke.Laplace(curvature).predict({"x": X}).variance,
    }
    found = {
        "predict": engine.predict(UNLABELED[form](tmp_path)),
        "curvature": numbers(measured(UNLABELED[form](tmp_path))),
        "Laplace.predict": ke.Laplace(curvature).predict(UNLABELED[form](tmp_path)).variance,
    }
    assert_arrays_close(found, expected, **CLOSE)
    with pytest.raises(ke.InputError, match=r"target|batch|pair|holds one array"):
        engine.evaluate(UNLABELED[form](tmp_path))


def test_a_list_of_two_batches_of_inputs_is_not_a_pair(engine, curvature):
    """Or the second batch would be lost as targets that nobody reads."""
    for read in (engine.predict, measured, ke.Laplace(curvature).predict):
        with pytest.raises(ke.InputError, match="two batches"):
            read([X[:4], X[4:8]])


def test_results_are_those_of_the_model_and_of_these_targets(engine, expected):
    assert expected["evaluate"][0] == pytest.approx(net.loss(net.weights(), X, Y), rel=1e-12)
    np.testing.assert_allclose(expected["predict"], net.forward(net.weights(), X)[1], **CLOSE)
    others = engine.evaluate((X, (Y + 1) % net.K))
    assert abs(others["loss"] - expected["evaluate"][0]) > 0.01


# -- commands --------------------------------------------------------------------------------------

FILES = {
    "a file with targets": ["--inputs", "d.npz"],
    "a folder of archives": ["--inputs", "archives"],
    "a folder of arrays": ["--inputs", "arrays"],
    "two files": ["--inputs", "x.npz", "--targets", "y.npz"],
}
COMMANDS = {
    "curvature": ["--fisher", "empirical", "-o", "out"],
    "influence": ["--curvature", "c", "-o", "out"],
    "laplace": ["--curvature", "c", "--prior", "1", "-o", "out"],
    "precondition": ["-o", "out"],
    "verify": ["--examples", "3", "--parameters", "1"],
}


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_takes_files_of_every_form(command, curvature, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    onnx.save(net.model(), "m.onnx")
    measured({"x": X, "targets": Y}).save("c")
    folder(tmp_path / "archives", "npz")
    folder(tmp_path / "arrays", "npy")
    np.savez("d.npz", x=X, targets=Y)
    np.save("x.npy", X)
    np.savez("x.npz", x=X)
    np.savez("y.npz", y=Y)
    start = [command, "m.onnx", *COMMANDS[command], "--json"]
    if command in ("curvature", "precondition", "verify"):
        start += ["--loss", "categorical", "--threads", "1"]
    written = []
    for form in (["--inputs", "x.npy", "--targets", "y.npz"], *FILES.values()):
        arguments = form[:2] if command == "laplace" else form
        assert main([*start, *arguments]) == 0, capsys.readouterr().err
        written.append(_numbers(command, capsys.readouterr().out))
    for found in written[1:]:
        np.testing.assert_allclose(found, written[0], **CLOSE)


def _numbers(command, printed):
    if command == "verify":
        return [printed.count('"passed": true'), printed.count('"passed": false')]
    if command in ("influence", "laplace"):
        with np.load("out") as arrays:
            return np.concatenate([arrays[name].ravel() for name in sorted(arrays)])
    arrays = load_file("out")
    return np.concatenate([arrays[name].ravel() for name in sorted(arrays)])


# -- batches ---------------------------------------------------------------------------------------


def test_arrays_are_one_batch_and_files_are_read_in_parts(engine, tmp_path):
    axes, n = engine.example_axes, 2 * FILE_BATCH + 3
    x, y = net.batch(n=n)
    file = saved(tmp_path / "d.npz", np.savez, x=x, targets=y)
    sizes = {
        data: [len(batch[1]) for batch in batches_of(form, axes)]
        for data, form in {"arrays": (x, y), "file": file}.items()
    }
    assert sizes == {"arrays": [n], "file": [FILE_BATCH, FILE_BATCH, 3]}
    assert [len(batch[1]) for batch in batches_of((x, y), axes, size=200)] == [200, n - 200]
    inputs, targets = whole_batch([(x[:3], y[:3]), (x[3:], y[3:])], axes)
    np.testing.assert_array_equal(inputs["x"], x)
    np.testing.assert_array_equal(targets, y)


def test_an_iterator_is_read_once_only(engine, curvature):
    assert engine.evaluate(iter(parts()))["loss"] == pytest.approx(net.loss(net.weights(), X, Y))
    with pytest.raises(ke.InputError, match="is read 2 times"):
        measured(iter(parts()), structure="ekfac")
    with pytest.raises(ke.InputError, match="read 2 times"):
        ke.Influence(curvature).scores((X, Y), iter(parts()))


@pytest.mark.parametrize("data", [3, b"x", [3], [(X, Y, X, X)], None])
def test_other_objects_are_refused_by_every_entrance(data, engine, curvature):
    for name, call in ENTRANCES.items():
        if data is None and name == "fit_prior":  # no validation
            continue
        with pytest.raises(ke.InputError):
            pytest.fail(f"{name} took {call(engine, curvature, data)}")
