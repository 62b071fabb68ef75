"""Describes a run and its factors for the log, in values that JSON can hold."""

import platform
import re
from collections.abc import Mapping
from math import isfinite
from typing import Any, TypeAlias

import numpy as np

from kfac_engine.engine.engine import Engine
from kfac_engine.engine.factor_spectra import factor_spectra
from kfac_engine.engine.spectra import FactorSpectrum
from kfac_engine.losses.base import LossFunction
from kfac_engine.summary import installed_version
from kfac_engine.training.batches import RunData
from kfac_engine.training.optimizer import Optimizer

Description: TypeAlias = dict[str, Any]

# Matrices of more rows would delay the end of a run: their eigenvalues take cubic time.
MOST_ROWS = 1024
_LISTED = 64
# In the text of an object; each process has another one.
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
_PACKAGES = ("kfac-engine", "numpy", "scipy", "onnx", "onnxruntime")


def describe(optimizer: Optimizer, settings: Mapping[str, object]) -> Description:
    """Return the settings, versions and layers of a run.

    The entries are ``model``, ``settings``, ``versions``, ``layers`` and the shapes of the
    ``factors`` that are refreshed, by name: numbers, texts, None and lists.
    """
    engine = optimizer.engine
    choices = {"optimizer": type(optimizer).__name__, **optimizer.options, **settings}
    return {
        "model": engine.name,
        "settings": {name: _plain(value) for name, value in choices.items()},
        "versions": {
            "python": platform.python_version(),
            "platform": platform.platform(),
            **{name: installed_version(name) or "not installed" for name in _PACKAGES},
        },
        "layers": [
            {
                "parameters": [n + p for n, p in zip(layer.parameters, layer.parts, strict=True)],
                "kind": layer.kind,
                "block": f"{layer.approximation}: {layer.formula}",
                "factors": [list(shape) for shape in layer.factor_shapes],
                "numbers": layer.numbers,
                "bytes": layer.factor_bytes,
                "reason": layer.reason,
            }
            for layer in engine.layers
        ],
    }


def contents(engine: Engine, data: RunData) -> dict[str, str | float | None]:
    """Return the settings and data of a run, which a resumed run compares.

    The texts of ``loss``, ``data`` and ``validation`` are equal for equal losses and data.
    """
    objective = engine.objective
    losses = [
        f"{loss.coefficient:g} {type(loss.function).__name__}{_plain(_attributes(loss.function))}"
        for loss in objective.losses
    ]
    text = without_addresses(f"{objective.reduction} of {', '.join(losses)}")
    return {"loss": text, **data.contents()}


def without_addresses(text: str) -> str:
    """Return the text of objects without their addresses, equal in all processes."""
    return _ADDRESS.sub("", text)


def _attributes(loss: LossFunction) -> list[object]:
    """Return the public attributes of a loss but the seed of its samples, by name."""
    entries = sorted(vars(loss).items())
    return [[n, v] for n, v in entries if not n.startswith("_") and n != "seed"]


def described_spectra(engine: Engine) -> list[Description]:
    """Return the spectrum of each factor; empty for an engine without statistics.

    Spectra of matrices of more than 1024 rows have no eigenvalues.
    """
    if any(factor.average.value is None for factor in engine.fisher.factors):
        return []
    return [described(spectrum) for spectrum in factor_spectra(engine, most_rows=MOST_ROWS)]


def described(spectrum: FactorSpectrum) -> Description:
    """Return a spectrum as values that JSON can hold, with at most 64 of its eigenvalues."""
    entry: Description = {
        "parameters": list(spectrum.parameters),
        "factor": spectrum.factor,
        "shape": list(spectrum.shape),
    }
    if spectrum.eigenvalues is None:
        return entry
    descending = np.sort(spectrum.eigenvalues, axis=None)[::-1]
    ranks = np.unique(np.linspace(1, len(descending), _LISTED).round().astype(int))
    condition = spectrum.condition
    return entry | {
        "count": len(descending),
        "eigenvalues": [[int(rank), float(descending[rank - 1])] for rank in ranks],
        "smallest": float(descending[-1]),
        "largest": float(descending[0]),
        "resolution": spectrum.resolution,
        "damping": None if spectrum.damping is None else float(spectrum.damping.min()),
        "below_damping": spectrum.below_damping,
        "condition": condition if condition is not None and isfinite(condition) else None,
        "damped_condition": spectrum.damped_condition,
    }


def _plain(value: object) -> object:
    """Return a setting as a number, a text, None or a list of these."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    if callable(value) and hasattr(value, "__name__"):
        return f"function {value.__name__}"
    return repr(value)
