"""Builds further engines of the model under test, and writes its file."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from kfac_engine._types import Array
from kfac_engine.engine.engine import Engine


@dataclass(frozen=True, slots=True)
class Rebuild:
    """Builds engines with the file and the options of an engine.

    Attributes:
        original: The engine.
        file: File that the engine exported.
        inputs: A batch, for the sample run.
    """

    original: Engine
    file: Path
    inputs: Mapping[str, Array]

    @classmethod
    @contextmanager
    def exported(cls, engine: Engine, inputs: Mapping[str, Array]) -> "Iterator[Rebuild]":
        """Export an engine to a temporary folder for the duration of a ``with`` block."""
        with TemporaryDirectory(prefix="kfac-engine-verify-") as folder:
            file = Path(folder) / "model.onnx"
            engine.export(file)
            yield cls(engine, file, inputs)

    def engine(self, **changes: Any) -> Engine:
        """Return an engine without statistics, with some options replaced."""
        options = self.original.options
        values = {field.name: getattr(options, field.name) for field in fields(options)}
        if values["sample_inputs"] is None and self.original.losses[0].fixed_batch:
            values["sample_inputs"] = self.inputs
        return Engine.from_onnx(self.file, **{**values, **changes})
