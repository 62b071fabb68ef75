"""Converts a model's parameters and buffers between the model, the caller and files."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from kfac_engine._types import Array
from kfac_engine.backend.memory_space import HOST
from kfac_engine.backend.namespace import in_library, on_host, read_only
from kfac_engine.backend.protocol import Backend
from kfac_engine.errors import NonFiniteError, ShapeError, UnknownNameError, suggestion
from kfac_engine.graph.analysis.exporter_changes import Tie, find_ties, spread
from kfac_engine.graph.export import export_files
from kfac_engine.graph.files import write_model
from kfac_engine.runtime.model import OnnxModel
from kfac_engine.system.writing import checked_path


class ModelArrays:
    """Converts arrays of a model to arrays of a caller or of a file, and back.

    The model may run in another memory space than ``backend``, the array library of the caller.
    """

    def __init__(self, model: OnnxModel, backend: Backend) -> None:
        self._model, self._backend = model, backend
        self._library_array = type(backend.asarray(np.zeros(1)))

    def for_model(self, values: Mapping[str, Array]) -> dict[str, Array]:
        """Convert arrays of any library to arrays of the memory space that the model runs in."""
        read = on_host if self._model.memory_space is HOST else in_library
        return read(values, self._backend)

    def for_backend(self, arrays: Mapping[str, Array]) -> dict[str, Array]:
        """Convert arrays of the model to arrays of the backend; each is copied once at most."""
        of_library, asarray = self._library_array, self._backend.asarray
        return {name: a if type(a) is of_library else asarray(a) for name, a in arrays.items()}

    def for_caller(self, arrays: Mapping[str, Array]) -> dict[str, Array]:
        """Return parameters or buffers as the file stores them, read-only.

        The arrays are of the backend; they are copies where a library has no read-only arrays.
        """
        return {name: read_only(array) for name, array in self.stored(arrays).items()}

    def stored(self, arrays: Mapping[str, Array]) -> dict[str, Array]:
        """Return parameters or buffers as the file stores them, without a copy where possible."""
        return self.for_backend(self._model.to_file_layout(arrays))

    def on_host(self) -> tuple[dict[str, Array], dict[str, Array]]:
        """Return the parameters and the buffers as arrays of the host, by name."""
        model = self._model
        return on_host(model.parameters, self._backend), on_host(model.buffers, self._backend)

    def set_buffers(self, values: Mapping[str, Array]) -> None:
        """Replace buffers by arrays of any library; see ``Engine.set_buffers``."""
        buffers, arrays = self._model.buffers, {}
        for name, value in on_host(values, self._backend).items():
            if name not in buffers:
                listed = ", ".join(map(repr, buffers)) or "none"
                raise UnknownNameError(
                    f"'{name}'{suggestion(name, buffers)} is not a running statistic; there are: "
                    f"{listed}."
                )
            array = arrays[name] = np.array(value, buffers[name].dtype)
            if array.shape != buffers[name].shape:
                raise ShapeError(
                    f"the new value of '{name}' has shape {array.shape}, not {buffers[name].shape}."
                )
            if not np.isfinite(array).all():
                raise NonFiniteError(f"the new value of '{name}' holds NaN or infinity.")
        as_feed = self._model.memory_space.as_feed
        buffers.update({name: as_feed(array) for name, array in arrays.items()})

    def ties(self) -> tuple[Tie, ...]:
        """Return the weights that equal another weight of the file."""
        return self._model.ties or find_ties(self.on_host()[0], self._model.parameters)

    def export(self, path: str | Path) -> None:
        """Write the model with its current parameters and buffers; see ``Engine.export``."""
        parameters, buffers = self.on_host()
        values = {**spread(self._model.ties, parameters), **buffers}
        location = f"{checked_path(path).name}.data"
        write_model(path, export_files(self._model.loaded, values, location))
