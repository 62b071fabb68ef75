"""Provides an engine's weights: the parameters that an optimizer updates, and the buffers."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from kfac_engine._types import Array
from kfac_engine.engine.engine import Engine
from kfac_engine.system.signals import HeldInterrupts
from kfac_engine.training.checkpoint import Arrays
from kfac_engine.training.optimizer import trained_names


@dataclass(frozen=True, slots=True)
class Weights:
    """Parameters and buffers."""

    parameters: dict[str, Array]  # arrays by name, without the copies of tied weights
    buffers: dict[str, Array]  # arrays of the running statistics, by name

    @classmethod
    def present(cls, engine: Engine) -> "Weights":
        """Return the weights of an engine; the arrays are read-only, and steps replace them."""
        values = engine.parameters
        return cls({name: values[name] for name in trained_names(engine)}, engine.buffers)

    @classmethod
    def stored(cls, arrays: Arrays) -> "Weights":
        """Return the weights of ``arrays``."""
        return cls(dict(arrays["parameter"]), dict(arrays.get("buffer", {})))

    @property
    def arrays(self) -> Arrays:
        """The arrays by group and name, for the state of a callback."""
        groups = {"parameter": self.parameters, "buffer": self.buffers}
        return {group: arrays for group, arrays in groups.items() if arrays}

    def copy(self) -> "Weights":
        """Return copies of the arrays."""
        parameters = {name: array.copy() for name, array in self.parameters.items()}
        return Weights(parameters, {name: array.copy() for name, array in self.buffers.items()})

    def apply(self, engine: Engine) -> None:
        """Replace the weights of an engine by copies of these weights."""
        engine.set_parameters(self.parameters)
        engine.set_buffers(self.buffers)

    @contextmanager
    def applied(self, engine: Engine) -> Iterator[None]:
        """Return a context in which an engine has these weights, and its own weights after it."""
        present = Weights.present(engine)
        try:
            self.apply(engine)
            yield
        finally:
            with HeldInterrupts():
                present.apply(engine)
