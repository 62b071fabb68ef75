"""Sparse tables as examples: the results of dense ones, with a dense batch at a time."""

import numpy as np
import pytest
import scipy.sparse as sp
from sklearn.compose import make_column_transformer
from sklearn.model_selection import cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder

import kfac_engine as ke
from kfac_engine.sklearn import OnnxClassifier, OnnxRegressor
from kfac_engine.sklearn.example_input import SparseRows
from tests.sklearn.networks import network

DENSE = np.where(np.random.default_rng(0).random((70, 12)) < 0.3, 1.0, 0.0) * np.arange(1, 13)
Y = (DENSE.sum(1) > np.median(DENSE.sum(1))).astype(int)
WEIGHTS = np.arange(70) % 3 * 0.5
FORMS = {
    "csr_matrix": sp.csr_matrix, "csr_array": sp.csr_array, "csc_array": sp.csc_array,
    "coo_matrix": sp.coo_matrix, "lil_array": sp.lil_array,
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_every_form_gives_the_results_of_the_dense_table(form):
    table = FORMS[form](DENSE)
    options = {"hidden": (8,), "epochs": 3, "batch_size": 16, "optimizer": "adam"}
    dense, sparse = (OnnxClassifier(**options).fit(x, Y) for x in (DENSE, table))
    np.testing.assert_array_equal(sparse.predict_proba(table), dense.predict_proba(DENSE))
    np.testing.assert_array_equal(sparse.predict_proba(DENSE), dense.predict_proba(DENSE))


CASES = {
    "weights and parts": ({"accumulate": 2}, {"sample_weight": WEIGHTS}),
    "early stop": ({"early_stop": 1}, {}),
    "images": ({"model": network(12, 2, shape=(3, 4))}, {}),
    "warm start": ({"warm_start": True}, {}),
}


@pytest.mark.parametrize("case", CASES)
def test_options_have_the_same_effect_on_sparse_and_dense_tables(case):
    options, given = CASES[case]
    outputs = []
    for table in (DENSE, sp.csr_array(DENSE)):
        estimator = OnnxClassifier(
            **{"hidden": (8,), "epochs": 2, "batch_size": 16, "optimizer": "sgd"} | options
        )
        for _ in range(2):
            estimator.fit(table, Y, **given)
        outputs.append(estimator.partial_fit(table, Y).predict_proba(table))
    np.testing.assert_array_equal(*outputs)


def test_a_batch_is_dense_at_a_time(monkeypatch):
    rows = []
    dense = SparseRows.dense
    monkeypatch.setattr(SparseRows, "dense", lambda self: rows.append(len(self)) or dense(self))
    table = sp.random(400, 50_000, 1e-3, format="csr", rng=np.random.default_rng(0))
    target = np.asarray(table.sum(1)).ravel()
    regressor = OnnxRegressor(hidden=(2,), epochs=1, batch_size=40, optimizer="sgd")
    assert regressor.fit(table, target).predict(table).shape == (400,)
    assert max(rows) == 40


def test_kfac_trains_on_the_table_of_an_encoder():
    rng = np.random.default_rng(0)
    words = rng.choice(["red", "green", "blue", "grey"], (300, 2))
    labels = np.where((words[:, 0] == "red") ^ (words[:, 1] == "blue"), "yes", "no")
    encoder = make_column_transformer((OneHotEncoder(), [0, 1]), sparse_threshold=1.0)
    pipeline = make_pipeline(encoder, OnnxClassifier(hidden=(16,), epochs=30))
    assert sp.issparse(encoder.fit_transform(words))
    assert cross_val_score(pipeline, words, labels, cv=3).min() == 1


def test_values_that_the_input_cannot_hold_are_refused():
    table = sp.csr_array(np.where(DENSE > 0, 1e300, 0))
    with pytest.raises(ke.NonFiniteError, match="beyond the range"):
        OnnxClassifier(hidden=(8,)).fit(table, Y)
    nan = sp.csr_array(np.where(DENSE > 11, np.nan, DENSE))
    with pytest.raises(ValueError, match="NaN"):
        OnnxClassifier(hidden=(8,)).fit(nan, Y)
