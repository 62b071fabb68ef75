"""``kfac_engine.torch`` without torch; tests/exporters tests it with torch."""

import importlib
import sys

import pytest

import kfac_engine as ke


def test_missing_torch_raises_error_with_remedy(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.delitem(sys.modules, "kfac_engine.torch", raising=False)
    with pytest.raises(ke.BackendError, match="pip install torch onnxscript"):
        importlib.import_module("kfac_engine.torch")


def test_package_does_not_import_torch():
    assert "torch" not in ke.__all__
    assert "kfac_engine.torch" not in sys.modules
