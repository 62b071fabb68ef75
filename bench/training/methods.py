"""The optimizers that are compared, with the settings among which each is tuned."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np
from scipy.optimize import minimize

import kfac_engine as ke
from kfac_engine._types import Array
from kfac_engine.bench.training.rivals import Step, ahead, soap
from kfac_engine.errors import InputError
from kfac_engine.registry import Registry
from kfac_engine.training.budget import SCHEDULES

# Returns the step of an engine for a learning rate (None where a method has none) and options.
Factory: TypeAlias = Callable[[ke.Engine, float | None, Mapping[str, Any]], Step]

TAIL, COSINE = "tail", "cosine"
# Part of the budget in which the learning rate of a method with a rate rises.
WARM_UP = 0.02
_FIRST = 1e-3  # added to the spent part, so that the first step has an effect
_SEPARATOR, _EQUALS = ":", "="


@dataclass(frozen=True, slots=True)
class Method:
    """An optimizer, with the schedules and the learning rates that are tried.

    ``factory`` returns its step. ``rates`` has the tasks whose rates differ from the usual ones; a
    method without a rate has ``(None,)``.
    """

    factory: Factory
    schedules: tuple[str, ...]
    usual_rates: tuple[float | None, ...]
    rates: Mapping[str, tuple[float, ...]]

    def rates_of(self, task: str) -> tuple[float | None, ...]:
        """Return the learning rates that are tried on a task, whatever its batch size."""
        return self.rates.get(task.partition("@")[0], self.usual_rates)

    def scale(self, schedule: str, spent: float) -> float:
        """Return the factor of the learning rate when a part of the budget is spent.

        Methods with a learning rate start with a linear rise.
        """
        rise = 1.0 if self.usual_rates == (None,) else min(1.0, (spent + _FIRST) / WARM_UP)
        return rise * SCHEDULES[schedule](spent)


def _kfac(engine: ke.Engine, rate: float | None, options: Mapping[str, Any]) -> Step:
    del rate  # a rate of its own is an option
    return _step_of(ke.KfacOptimizer(engine, **options))


def _first_order(kind: type) -> Factory:
    return lambda engine, rate, options: _step_of(kind(engine, learning_rate=rate, **options))


def _step_of(optimizer: Any) -> Step:
    return lambda inputs, targets, scale: float(optimizer.step(inputs, targets, scale).loss)


def _soap(engine: ke.Engine, rate: float | None, options: Mapping[str, Any]) -> Step:
    assert rate is not None, "the table has rates"
    if options:
        raise InputError(f"method 'soap' has no options, got {', '.join(options)}.")
    return soap(engine, rate)


def _ema_nesterov(engine: ke.Engine, rate: float | None, options: Mapping[str, Any]) -> Step:
    """Return the step of Muon from a point ahead; options of ``ahead`` and of ``ke.Muon``."""
    of_muon = dict(options)
    of_ahead = {name: of_muon.pop(name) for name in ("distance", "decay") if name in of_muon}
    return ahead(engine, _first_order(ke.Muon)(engine, rate, of_muon), **of_ahead)


def _quadratic(engine: ke.Engine, rate: float | None, options: Mapping[str, Any]) -> Step:
    """Return the step of the quadratic model on whole batches, with damping that is adapted."""
    whole = {"statistics_part": 1.0, "adapt_damping": True, "damping": 1.0}
    rule = {"learning_rate": "quadratic", "momentum": "quadratic"}
    return _kfac(engine, rate, {**whole, **rule, **options})


def _lbfgs(engine: ke.Engine, rate: float | None, options: Mapping[str, Any]) -> Step:
    """Return a step of some iterations of SciPy's L-BFGS on one batch.

    It starts anew in each step, after many more iterations than it has vectors.
    """
    del rate

    def step(inputs: Mapping[str, Array], targets: Array, scale: float) -> float:
        del scale
        first = engine.parameters
        places = np.cumsum([0, *(value.size for value in first.values())])
        losses: list[float] = []

        def evaluated(vector: Array) -> tuple[float, Array]:
            parts = zip(first.items(), pairwise(places), strict=True)
            engine.set_parameters(
                {
                    name: vector[start:stop].reshape(value.shape).astype(value.dtype)
                    for (name, value), (start, stop) in parts
                }
            )
            result = engine.gradients(inputs, targets)
            losses.append(result.loss)
            gradients = (result.gradients[name].ravel() for name in first)
            return result.loss, np.concatenate(list(gradients)).astype(np.float64)

        start = np.concatenate([value.ravel() for value in first.values()]).astype(np.float64)
        settings = {"maxiter": 100, "maxcor": 20, "ftol": 0.0, "gtol": 0.0, **options}
        minimum = minimize(evaluated, start, jac=True, method="L-BFGS-B", options=settings)
        evaluated(minimum.x)
        return losses[0]

    return step


_ADAM = (0.001, 0.002, 0.004, 0.008, 0.016)
_HIGH_ADAM = (0.002, 0.004, 0.008, 0.016, 0.032)
_LOW_ADAM = (0.0005, 0.001, 0.002, 0.004, 0.008)
_ADAM_RATES = {"mlp": _LOW_ADAM, "cnn": _LOW_ADAM, "digits": _HIGH_ADAM, "function": _HIGH_ADAM}
# Losses that sum over pixels have larger gradients.
_LOW_SGD = (0.0003, 0.001, 0.003, 0.01, 0.03)
_SGD_RATES = {
    "autoencoder": _LOW_SGD,
    "restorer": (0.00003, 0.0001, 0.0003, 0.001, 0.003),
    "function": (0.003, 0.01, 0.03, 0.1, 0.3),
}

METHODS: Mapping[str, Method] = Registry(
    "method",
    {
        "kfac": Method(_kfac, (TAIL,), (None,), {}),
        "adam": Method(_first_order(ke.Adam), (TAIL, COSINE), _ADAM, _ADAM_RATES),
        "sgd": Method(_first_order(ke.SGD), (TAIL,), (0.01, 0.03, 0.1, 0.3, 1.0), _SGD_RATES),
        "muon": Method(_first_order(ke.Muon), (TAIL,), (0.01, 0.03, 0.1), {}),
        "soap": Method(_soap, (TAIL,), (0.003, 0.01, 0.03), {}),
        "ema-nesterov": Method(_ema_nesterov, (TAIL,), (0.01, 0.03, 0.1), {}),
        "quadratic": Method(_quadratic, (TAIL,), (None,), {}),
        "lbfgs": Method(_lbfgs, (TAIL,), (None,), {}),
    },
)


def parse_method(text: str) -> tuple[Method, dict[str, Any]]:
    """Return a method and its options.

    The text is ``name``, or ``name:option=value:…`` with values in JSON.
    """
    name, *pairs = text.split(_SEPARATOR)
    method, options = METHODS[name], {}
    for pair in pairs:
        key, equals, value = pair.partition(_EQUALS)
        try:
            options[key] = json.loads(value)
        except ValueError as error:
            raise InputError(
                f"method '{text}': write options as {name}:option=value, with a value in JSON."
            ) from error
        if not (key and equals):
            raise InputError(f"method '{text}': an option has no name.")
    return method, options
