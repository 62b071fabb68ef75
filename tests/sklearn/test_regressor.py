"""``OnnxRegressor``: one and several targets, and the scale of targets."""

import numpy as np
import onnxruntime
import pytest
from sklearn.compose import TransformedTargetRegressor
from sklearn.datasets import load_diabetes, make_regression
from sklearn.linear_model import LinearRegression
from sklearn.metrics import r2_score
from sklearn.model_selection import train_test_split
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

import kfac_engine as ke
from kfac_engine.sklearn import OnnxRegressor
from tests.sklearn.networks import network

X, Y = make_regression(200, 5, n_targets=2, noise=0.5, random_state=0)
Y /= Y.std(axis=0)

# Float32 networks of a few layers, whose batches are added up in another order.
ROUNDING = 2e-5


@pytest.mark.parametrize("targets", [Y, Y[:, 0], Y[:, :1]], ids=["two", "one", "column"])
@pytest.mark.parametrize("column", [True, False])
def test_predictions_equal_a_session_of_the_exported_file(targets, column, tmp_path):
    outputs = 1 if targets.ndim == 1 else targets.shape[1]
    if outputs == 2 and not column:
        pytest.skip("two targets need two columns")
    model = network(5, outputs, column=column)
    regressor = OnnxRegressor(model, epochs=30).fit(X, targets)
    regressor.export(tmp_path / "m.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "m.onnx")
    (truth,) = session.run(None, {"x": X.astype(np.float32)})
    found = regressor.predict(X)
    assert found.shape == targets.shape
    assert found.dtype == np.float64
    np.testing.assert_allclose(found, truth.reshape(targets.shape), atol=ROUNDING)
    assert regressor.score(X, targets) == pytest.approx(
        r2_score(targets, truth.reshape(targets.shape)), abs=1e-5
    )
    assert regressor.score(X, targets) > 0.9


@pytest.mark.rounding
def test_a_linear_network_reaches_the_least_squares_solution():
    # Without hidden layers the loss is quadratic, and least squares has the smallest one.
    exact = LinearRegression().fit(X, Y)
    options = {"weight_decay": 0.0}
    regressor = OnnxRegressor(hidden=(), epochs=400, optimizer_options=options).fit(X, Y)
    weights = regressor.engine_.parameters
    np.testing.assert_allclose(weights["dense1.weight"], exact.coef_, atol=2e-3)
    np.testing.assert_allclose(weights["dense1.bias"], exact.intercept_, atol=2e-3)


def test_scaled_targets_and_targets_in_the_hundreds_are_predicted():
    features, targets = load_diabetes(return_X_y=True)
    x, x_test, y, y_test = train_test_split(features, targets, random_state=0)
    unscaled = make_pipeline(StandardScaler(), OnnxRegressor(hidden=(20,)))
    scaled = TransformedTargetRegressor(unscaled, transformer=StandardScaler()).fit(x, y)
    # The mean of about 150 alone has the score 0. Thirty steps reach it from predictions near zero,
    # because predicted means move in units of the targets.
    assert scaled.score(x_test, y_test) > 0.1
    assert unscaled.fit(x, y).score(x_test, y_test) > 0


def test_partial_fit_trains_for_one_epoch():
    regressor = OnnxRegressor(batch_size=50)
    scores = [regressor.partial_fit(X, Y).score(X, Y) for _ in range(20)]
    assert len(regressor.records_) == 4
    assert scores[-1] > 0.8 > scores[0]


def test_other_numbers_of_targets_than_outputs_are_refused():
    with pytest.raises(ke.ShapeError, match=r"y has 2 target\(s\), .* shape \(3,\)"):
        OnnxRegressor(network(5, 3)).fit(X, Y)
    with pytest.raises(ke.ShapeError, match=r"y has 1 target\(s\)"):
        OnnxRegressor(network(5, 2)).fit(X, Y[:, 0])
