"""The examples of the page on scikit-learn run, and its table has the defaults."""

import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

from kfac_engine.sklearn import OnnxClassifier, OnnxRegressor

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "sklearn.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"^```python\n(.*?)^```", PAGE, re.M | re.S)


@pytest.mark.parametrize("index", range(3))
def test_the_examples_of_the_page_on_scikit_learn_run(index, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert len(EXAMPLES) == 3
    exec(compile(EXAMPLES[index], "sklearn.md", "exec"), {})
    assert (tmp_path / "trained.onnx").exists() == ("export" in EXAMPLES[index])


@pytest.mark.parametrize("estimator", [OnnxClassifier, OnnxRegressor])
def test_the_table_of_options_has_the_arguments_with_their_defaults(estimator):
    rows = re.findall(r"^\| (`.*?) \| (.*?) \|", PAGE, re.M)
    table = {}
    for names, defaults in rows:
        values = re.findall(r"`[^`]*`|None|[\d.]+", defaults)
        table |= dict(zip(re.findall(r"`(\w+)`", names), values, strict=True))
    if estimator is OnnxRegressor:
        del table["class_weight"]
    parameters = inspect.signature(estimator).parameters.values()
    assert {name: eval(text.strip("`")) for name, text in table.items()} == {
        parameter.name: parameter.default for parameter in parameters
    }


def test_an_import_without_scikit_learn_says_what_to_install():
    code = "import sys; sys.modules['sklearn'] = None; import kfac_engine.sklearn"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    last = done.stderr.strip().splitlines()[-1]
    assert last.endswith("needs scikit-learn: pip install 'kfac-engine[sklearn]'.")
