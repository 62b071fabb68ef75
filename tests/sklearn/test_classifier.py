"""``OnnxClassifier``: labels, probabilities, forms of models, and the tools of scikit-learn."""

import pickle

import numpy as np
import onnx
import onnxruntime
import pytest
from scipy.special import expit, softmax
from sklearn.base import clone
from sklearn.datasets import load_digits, load_iris, make_classification
from sklearn.exceptions import NotFittedError
from sklearn.metrics import accuracy_score, log_loss
from sklearn.model_selection import GridSearchCV, cross_val_score, train_test_split
from sklearn.neural_network import MLPClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

import kfac_engine as ke
from kfac_engine.data import demo_model, digits
from kfac_engine.sklearn import OnnxClassifier
from tests.sklearn.networks import network

# Float32 networks of a few layers, whose batches are added up in another order.
ROUNDING = 2e-5

X, Y = make_classification(120, 6, n_informative=4, n_classes=3, random_state=0)
BINARY = (Y > 0).astype(int)


def session_outputs(path, values):
    """The first output of an exported file, by ONNX Runtime alone."""
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    return session.run(None, {session.get_inputs()[0].name: values})[0]


@pytest.mark.parametrize("last", ["", "Softmax"])
def test_predict_proba_equals_a_session_of_the_exported_file(last, tmp_path):
    classifier = OnnxClassifier(network(6, 3, last=last), epochs=5, batch_size=50).fit(X, Y)
    classifier.export(tmp_path / "m.onnx")
    outputs = session_outputs(tmp_path / "m.onnx", X.astype(np.float32)).astype(np.float64)
    truth = outputs if last else softmax(outputs, axis=1)
    found = classifier.predict_proba(X)
    np.testing.assert_allclose(found, truth, atol=ROUNDING)
    np.testing.assert_allclose(found.sum(axis=1), 1, atol=1e-6)
    assert np.ptp(found) > 0.5
    np.testing.assert_array_equal(classifier.predict(X), truth.argmax(axis=1))
    assert classifier.score(X, Y) == accuracy_score(Y, truth.argmax(axis=1))


@pytest.mark.parametrize("last", ["", "Sigmoid"])
@pytest.mark.parametrize("column", [True, False])
def test_a_single_column_has_the_probability_of_the_second_class(last, column, tmp_path):
    model = network(6, 1, last=last, column=column)
    labels = np.array(["no", "yes"])[BINARY]
    classifier = OnnxClassifier(model, epochs=20).fit(X, labels)
    classifier.export(tmp_path / "m.onnx")
    outputs = session_outputs(tmp_path / "m.onnx", X.astype(np.float32)).ravel()
    second = outputs if last else expit(outputs)
    found = classifier.predict_proba(X)
    np.testing.assert_allclose(found[:, 1], second, atol=ROUNDING)
    np.testing.assert_allclose(found[:, 0], 1 - second, atol=ROUNDING)
    assert classifier.score(X, labels) > 0.8
    assert log_loss(labels, found) < 0.5 < np.log(2)  # log 2 is the loss without training


@pytest.mark.parametrize(
    "labels",
    [np.array(["cat", "ant", "bee"]), np.array([70, -3, 5]), np.array([2.0, 0.0, 1.0])],
    ids=["text", "integers", "floats"],
)
def test_labels_are_encoded_in_sorted_order(labels):
    y = labels[Y]
    classifier = OnnxClassifier(epochs=30).fit(X, y)
    assert classifier.classes_.tolist() == sorted(labels.tolist())
    assert classifier.predict(X).dtype == labels.dtype
    assert np.mean(classifier.predict(X) == y) > 0.85
    best = classifier.predict_proba(X).argmax(axis=1)
    np.testing.assert_array_equal(classifier.classes_[best], classifier.predict(X))


@pytest.mark.filterwarnings("ignore:Stochastic Optimizer")  # of the peer
def test_accuracy_on_digits_is_that_of_the_mlp_of_scikit_learn():
    features, labels = load_digits(return_X_y=True)
    x, x_test, y, y_test = train_test_split(features / 16, labels, random_state=0, stratify=labels)
    peer = MLPClassifier(random_state=0).fit(x, y).score(x_test, y_test)
    found = OnnxClassifier(random_state=0).fit(x, y).score(x_test, y_test)
    # Over seeds 0 to 3: 0.973 to 0.980 of the peer, 0.976 to 0.987.
    assert found >= peer - 0.02


def test_search_of_a_grid_in_a_pipeline_selects_a_network_that_learns():
    features, labels = load_iris(return_X_y=True)
    pipeline = make_pipeline(StandardScaler(), OnnxClassifier(epochs=15))
    grid = {"onnxclassifier__hidden": [(1,), (20, 10)]}
    search = GridSearchCV(pipeline, grid, cv=2).fit(features, labels)
    assert search.best_params_ == {"onnxclassifier__hidden": (20, 10)}
    assert search.best_score_ > 0.8  # 15 steps of each fold
    scores = cross_val_score(search.best_estimator_, features, labels, cv=2)
    assert scores.mean() == pytest.approx(search.best_score_)


def test_images_are_trained_as_rows_and_as_images_alike():
    images, labels = digits()
    images, labels = images[:300], labels[:300]
    as_images = OnnxClassifier(demo_model("cnn"), epochs=2).fit(images, labels)
    as_rows = OnnxClassifier(demo_model("cnn"), epochs=2).fit(images.reshape(300, 64), labels)
    assert as_images.n_features_in_ == as_rows.n_features_in_ == 64
    np.testing.assert_array_equal(as_images.predict_proba(images), as_rows.predict_proba(images))
    assert as_images.score(images.reshape(300, 64), labels) > 0.5


def test_fit_changes_neither_arguments_nor_the_file_of_the_model(tmp_path):
    path, message = tmp_path / "m.onnx", network(6, 3)
    onnx.save(message, path)
    before = path.read_bytes()
    options = {"optimizer_options": {"learning_rate": 0.01}, "engine_options": {"freeze": "*1"}}
    for model in (path, before, message):
        classifier = OnnxClassifier(model, optimizer="adam", epochs=2, **options)
        arguments = {**classifier.get_params()}
        classifier.fit(X, Y)
        assert classifier.get_params() == arguments
        assert options["optimizer_options"] == {"learning_rate": 0.01}
        assert path.read_bytes() == message.SerializeToString() == before
        copied = clone(classifier)
        assert not hasattr(copied, "classes_")
        np.testing.assert_array_equal(
            copied.fit(X, Y).predict_proba(X), classifier.predict_proba(X)
        )


def test_options_reach_the_engine_and_the_optimizer():
    options = {"optimizer_options": {"learning_rate": 0.25}, "engine_options": {"freeze": "*1"}}
    classifier = OnnxClassifier(network(6, 3), optimizer="sgd", epochs=1, **options).fit(X, Y)
    assert set(classifier.engine_.parameters) == {"w2", "b2"}
    assert classifier.records_[0]["learning_rate"] == 0.25
    assert [record["step"] for record in classifier.records_] == [1]  # one batch of 120


@pytest.mark.parametrize(("batch_size", "steps"), [(120, 1), (119, 2), (50, 3), (7, 20)])
def test_batches_of_equal_size_leave_out_few_examples(batch_size, steps):
    # Batches of 7 examples would leave out one example; batches of 6 leave out none.
    records = OnnxClassifier(epochs=1, batch_size=batch_size).fit(X, Y).records_
    assert len(records) == steps


@pytest.mark.parametrize(
    ("batch_size", "accumulate", "steps"), [(30, 4, 1), (25, 2, 3), (10, 2, 6)]
)
def test_a_step_of_parts_is_that_of_the_larger_batch(batch_size, accumulate, steps):
    options = {"epochs": 1, "optimizer": "sgd"}
    parts = OnnxClassifier(batch_size=batch_size, accumulate=accumulate, **options).fit(X, Y)
    whole = OnnxClassifier(batch_size=batch_size * accumulate, **options).fit(X, Y)
    assert len(parts.records_) == len(whole.records_) == steps
    losses = ([record["loss"] for record in fitted.records_] for fitted in (parts, whole))
    np.testing.assert_allclose(*losses, rtol=1e-5)


def test_pickled_classifier_predicts_the_same_bits_and_trains_on():
    classifier = OnnxClassifier(network, epochs=3).fit(X, Y)
    loaded = pickle.loads(pickle.dumps(classifier))
    np.testing.assert_array_equal(loaded.predict_proba(X), classifier.predict_proba(X))
    assert loaded.records_ == classifier.records_
    before = log_loss(Y, loaded.predict_proba(X))
    for _ in range(5):
        loaded.partial_fit(X, Y)
    assert log_loss(Y, loaded.predict_proba(X)) < before


def test_warm_start_continues_with_the_weights_of_the_previous_call():
    frozen = {"optimizer": "sgd", "optimizer_options": {"learning_rate": 1e-30}, "epochs": 1}
    classifier = OnnxClassifier(network(6, 3), epochs=3, warm_start=True).fit(X, Y)
    trained = classifier.predict_proba(X)
    cold = clone(classifier).set_params(**frozen).fit(X, Y)
    np.testing.assert_array_equal(
        classifier.set_params(**frozen).fit(X, Y).predict_proba(X), trained
    )
    assert np.abs(cold.predict_proba(X) - trained).max() > 0.1
    classifier.set_params(warm_start=False).fit(X, Y)
    np.testing.assert_array_equal(classifier.predict_proba(X), cold.predict_proba(X))


def test_warm_start_refuses_other_labels_and_stays_as_it_is():
    classifier = OnnxClassifier(epochs=2, warm_start=True).fit(X, Y)
    before = classifier.predict_proba(X)
    with pytest.raises(ke.InputError, match=r"labels \[9\], which are not among the classes"):
        classifier.fit(X, np.where(Y == 1, 9, Y))
    np.testing.assert_array_equal(classifier.predict_proba(X), before)
    assert classifier.classes_.tolist() == [0, 1, 2]


def test_partial_fit_learns_from_parts_that_lack_a_class():
    classifier = OnnxClassifier(random_state=1)
    order = np.argsort(Y, kind="stable")
    parts = [order[:70], order[50:]]  # without class 2, and without class 0
    with pytest.raises(ke.InputError, match="needs classes"):
        classifier.partial_fit(X[parts[0]], Y[parts[0]])
    for _ in range(10):
        for part in parts:
            classifier.partial_fit(X[part], Y[part], classes=[2, 1, 0])
    assert classifier.classes_.tolist() == [0, 1, 2]
    assert classifier.score(X, Y) > 0.6
    with pytest.raises(ke.InputError, match=r"the first call had \[0 1 2\]"):
        classifier.partial_fit(X, Y, classes=[0, 1])


def test_early_stop_returns_the_weights_of_the_lowest_validation_loss():
    noisy = np.random.default_rng(0).permutation(Y)  # no network predicts these labels
    classifier = OnnxClassifier(epochs=200, early_stop=3, validation_fraction=0.25).fit(X, noisy)
    losses = [r["validation_loss"] for r in classifier.records_ if "validation_loss" in r]
    assert len(losses) == np.argmin(losses) + 1 + 3 < 200
    _, held_out, _, labels = train_test_split(
        X, noisy, test_size=0.25, random_state=classifier._seed(), stratify=noisy
    )
    found = log_loss(labels, classifier.predict_proba(held_out))
    assert found == pytest.approx(min(losses), rel=1e-4)


def test_random_state_determines_the_run():
    first, second, other = (
        OnnxClassifier(epochs=2, random_state=seed).fit(X, Y).predict_proba(X) for seed in (3, 3, 4)
    )
    np.testing.assert_array_equal(first, second)
    assert np.abs(first - other).max() > 0.01


def test_score_uses_weights():
    classifier = OnnxClassifier(epochs=2)
    right = classifier.fit(X, Y).predict(X) == Y
    weights = np.where(right, 1.0, 3.0)
    expected = weights[right].sum() / weights.sum()
    assert classifier.score(X, Y, sample_weight=weights) == pytest.approx(expected)


REFUSALS = {
    "classes": (OnnxClassifier(network(6, 4)), X, Y, r"3 classes, but the model returns .*\(4,\)"),
    "one class": (OnnxClassifier(), X, Y * 0, "y has one class"),
    "features": (OnnxClassifier(network(5, 3)), X, Y, r"X has 6 features, .*'x'.* shape \(5\)"),
    "optimizer": (OnnxClassifier(optimizer="lbfgs"), X, Y, "lbfgs"),
    "optimizer type": (OnnxClassifier(optimizer=3), X, Y, "optimizer must be one of"),
    "optimizer option": (OnnxClassifier(optimizer_options={"rate": 1}), X, Y, "'rate'"),
    "option of a run": (
        OnnxClassifier(optimizer_options={"epochs": 1}), X, Y,
        "the optimizer 'kfac' has no option 'epochs'; the options of"),
    "engine option": (OnnxClassifier(engine_options={"dampig": 1}), X, Y, "mean 'damping'"),
    "loss": (OnnxClassifier(engine_options={"loss": "normal"}), X, Y, "chooses the loss"),
    "hidden": (OnnxClassifier(hidden=(0,)), X, Y, "each of hidden must be a whole number"),
    "hidden number": (OnnxClassifier(hidden=5), X, Y, "hidden must be a list"),
    "batch size": (OnnxClassifier(batch_size=0), X, Y, "batch_size"),
    "accumulate": (OnnxClassifier(accumulate=0), X, Y, "accumulate"),
    "epochs": (OnnxClassifier(epochs=0), X, Y, "epochs"),
    "patience": (OnnxClassifier(early_stop=0), X, Y, "patience"),
    "range": (OnnxClassifier(), X * 1e300, Y, "beyond the range of float32"),
    "file": (OnnxClassifier("no.onnx"), X, Y, "no.onnx"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSALS)
def test_wrong_arguments_raise_one_clear_error_and_leave_no_state(case):
    classifier, features, labels, message = REFUSALS[case]
    with pytest.raises(ke.KfacError, match=message):
        classifier.fit(features, labels)
    assert vars(classifier) == classifier.get_params(deep=False)
    with pytest.raises(NotFittedError):
        classifier.predict(X)
    with pytest.raises(NotFittedError):
        classifier.export("unwritten.onnx")
