"""Matches the parameters of a file with the arrays of the framework that wrote the file."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import Any

import numpy as np

from kfac_engine._types import Array
from kfac_engine.arguments import check_instance
from kfac_engine.backend.namespace import as_array, on_host
from kfac_engine.engine.engine import Engine
from kfac_engine.errors import InputError, ShapeError, UnknownNameError, suggestion
from kfac_engine.graph.analysis.exporter_changes import REMEDY, without_numbers
from kfac_engine.graph.passes.upcast import in_single
from kfac_engine.printable import quoted

_MOST_NAMES = 6


@dataclass(frozen=True, slots=True)
class ParameterLayout:
    """The array of a framework that is one parameter of a file, and its layout there."""

    # Names of the array in the framework; several names are one array in memory.
    names: tuple[str, ...]
    axes: tuple[int, ...]  # order of its axes in the file, before the array is reshaped
    shape: tuple[int, ...]  # shape in the framework
    file_shape: tuple[int, ...]  # shape in the file

    def to_file(self, array: Array) -> Array:
        """Return an array of the framework's shape in the layout of the file."""
        return array.transpose(self.axes).reshape(self.file_shape)

    def from_file(self, array: Array) -> Array:
        """Return a new array in the layout of the framework."""
        permuted = array.reshape([self.shape[axis] for axis in self.axes])
        return np.array(permuted.transpose(np.argsort(self.axes)), order="C")


class ParameterMatches:
    """Converts arrays between a module of a framework and an engine; see ``match_parameters``.

    Attributes:
        layouts: Layout of each parameter of the engine, by name in the file.
        unmatched: Names of arrays of the framework that are not parameters of the engine, such as
            running statistics and frozen weights.
    """

    def __init__(
        self, engine: Engine, layouts: Mapping[str, ParameterLayout], rest: Sequence[str]
    ) -> None:
        self._engine = engine
        self.layouts, self.unmatched = dict(layouts), tuple(rest)

    def to_engine(self, arrays: Mapping[str, Array]) -> dict[str, Array]:
        """Return parameters or gradients under the names and in the layout of the file.

        Args:
            arrays: Arrays of any library, by name in the framework; they may be tensors that
                require gradients. Names in ``unmatched`` are ignored.

        Returns:
            Arrays of the host, by name in the file, for the parameters that ``arrays`` has.

        Raises:
            UnknownNameError: A name is not one of the framework's arrays.
            InputError: A value is None, or is not an array of numbers.
            ShapeError: An array has another shape than at the match.
        """
        known = {name for layout in self.layouts.values() for name in layout.names}
        for name, value in arrays.items():
            if name not in known and name not in self.unmatched:
                raise UnknownNameError(
                    f"'{name}'{suggestion(name, known)} is not the name of a matched array."
                )
            if value is None:
                raise InputError(f"the array of '{name}' is None; leave the name out.")
        read = {name: value for name, value in arrays.items() if name in known}
        host = on_host(read, self._engine.collection.backend)
        result: dict[str, Array] = {}
        for name, layout in self.layouts.items():
            for other in layout.names:
                if other in host:
                    array = np.asarray(as_array(host[other]))
                    _check_shape(other, array, layout.shape)
                    result[name] = layout.to_file(array)
                    break
        return result

    def to_module(self, arrays: Mapping[str, Array]) -> dict[str, Array]:
        """Return parameters, gradients or natural gradients for the framework.

        Args:
            arrays: Arrays by name in the file, as the engine returns them.

        Returns:
            New arrays in the layout of the framework, by its names; other libraries read them by
            DLPack, such as ``torch.from_dlpack``. An array with several names is under each name.
            NumPy lacks bfloat16; such an array is float32.

        Raises:
            UnknownNameError: A name is not a parameter of the engine.
            ShapeError: An array has another shape than its parameter.
        """
        copies = {tie.copy for tie in self._engine.ties}
        result: dict[str, Array] = {}
        for name, value in on_host(arrays, self._engine.collection.backend).items():
            if name not in self.layouts:
                if name in copies:
                    continue
                raise UnknownNameError(
                    f"'{name}'{suggestion(name, self.layouts)} is not a parameter of the engine."
                )
            layout, array = self.layouts[name], self._engine.collection.backend.to_numpy(value)
            _check_shape(name, array, layout.file_shape)
            # Frameworks read float16 from NumPy, but not bfloat16.
            array = in_single(array) if array.dtype.name == "bfloat16" else array
            result |= dict.fromkeys(layout.names, layout.from_file(array))
        return result


def match_parameters(engine: Engine, arrays: Mapping[str, Array]) -> ParameterMatches:
    """Match the parameters of an engine with the module that its file was exported from.

    A parameter is matched by its name. If no array has this name, the parameter is matched by its
    values, bit by bit, also with permuted axes or another shape. If the module was trained after
    the export, no values are equal; the parameter is then matched by its shape if only one array
    has this shape.

    Args:
        engine: The engine.
        arrays: Arrays of the module by name, such as ``module.state_dict()``.

    Returns:
        The matches, which convert arrays in both directions.

    Raises:
        InputError: A parameter matches no array or several, an exporter folded a normalization into
            it, or an exporter merged arrays of the module; the message names them.
    """
    check_instance("engine", engine, Engine)
    return _Matching(engine, arrays).result()


class _Matching:
    """The state of one matching: arrays of both sides, and the pairs so far."""

    def __init__(self, engine: Engine, arrays: Mapping[str, Array]) -> None:
        copies = {tie.copy for tie in engine.ties} if engine.options.tie_weights else set()
        host = on_host(engine.parameters, engine.collection.backend)
        self.engine = engine
        to_numpy, read = (
            engine.collection.backend.to_numpy,
            on_host(arrays, engine.collection.backend),
        )
        self.file = {n: in_single(to_numpy(a)) for n, a in host.items() if n not in copies}
        module = {n: np.asarray(as_array(a)) for n, a in read.items()}
        self.names = {names[0]: names for names in _aliases(module, arrays)}
        module = {n: in_single(a) for n, a in module.items()}
        self.module = {name: module[name] for name in self.names}
        self.pairs: dict[str, tuple[str, tuple[int, ...]]] = {}

    def result(self) -> ParameterMatches:
        folded = [name for name in self.engine.export_changes.folded if name in self.file]
        if folded:
            raise InputError(
                f"the exporter folded a normalization into {quoted(folded, _MOST_NAMES)}, which "
                f"are parameters of no module; export with {REMEDY}."
            )
        self._by_name()
        self._by_choice(_equal)
        if not self._shows_equal_values():
            self._by_choice(_alike)
        self._refuse_merged()
        self._refuse_unmatched()
        layouts = {
            name: ParameterLayout(
                self.names[other], axes, self.module[other].shape, self.file[name].shape
            )
            for name, (other, axes) in self.pairs.items()
        }
        rest = [n for n in self._free() for n in self.names[n]]
        return ParameterMatches(self.engine, layouts, rest)

    def _by_name(self) -> None:
        first = {alias: names[0] for names in self.names.values() for alias in names}
        for name, array in self.file.items():
            other = first.get(name, "")
            if other and self.module[other].shape == array.shape:
                self.pairs[name] = other, tuple(range(array.ndim))

    def _by_choice(self, fits: Callable[[Array, Array], Sequence[tuple[int, ...]]]) -> None:
        """Pair parameters that fit one array only, until no further pair follows."""
        while True:
            choices = {name: self._choices(name, fits) for name in self._missing()}
            single = {name: pairs[0] for name, pairs in choices.items() if len(pairs) == 1}
            wanted = [other for other, _ in single.values()]
            new = {n: pair for n, pair in single.items() if wanted.count(pair[0]) == 1}
            self.pairs |= new
            if not new:
                return

    def _choices(
        self, name: str, fits: Callable[[Array, Array], Sequence[tuple[int, ...]]]
    ) -> list[tuple[str, tuple[int, ...]]]:
        array = self.file[name]
        return [(other, axes) for other in self._free() for axes in fits(self.module[other], array)]

    def _missing(self) -> list[str]:
        return [name for name in self.file if name not in self.pairs]

    def _free(self) -> list[str]:
        paired = {other for other, _ in self.pairs.values()}
        return [name for name in self.module if name not in paired]

    def _shows_equal_values(self) -> bool:
        """Return whether the values of a pair show that the file was exported from the module."""
        return any(
            not _is_one_number(self.file[name]) and _equal(self.module[other], self.file[name])
            for name, (other, _) in self.pairs.items()
        )

    def _refuse_unmatched(self) -> None:
        remedy = self.engine.export_changes.remedy
        for name in self._missing():
            array = self.file[name]
            equal = [other for other, _ in self._choices(name, _equal)]
            owner = next((o for o, _ in self.pairs.values() if _equal(self.module[o], array)), "")
            if equal:
                others = dict.fromkeys(equal)
                raise InputError(
                    f"parameter '{name}' equals {quoted(others, _MOST_NAMES)}, and cannot be "
                    f"matched by its values; {remedy}, or export the model after its first step of "
                    f"training."
                )
            if owner:
                raise InputError(
                    f"parameter '{name}' is a copy of '{owner}', which another parameter of the "
                    f"file is as well; pass tie_weights=True to Engine.from_onnx."
                )
            raise InputError(
                f"parameter '{name}' of shape {array.shape} equals no array of the model, so it "
                f"was computed in the export or changed after it; {remedy}, or leave it out by "
                f"trainable=…."
            )

    def _refuse_merged(self) -> None:
        """Refuse arrays that the file lacks because another of its arrays has equal values."""
        for name in self.engine.export_changes.merged:
            pair = self.pairs.get(name)
            stem = pair and without_numbers(pair[0])
            merged = [
                other
                for other, array in self.module.items()
                if _equal(array, self.file[name]) or (pair and without_numbers(other) == stem)
            ]
            if len(merged) > 1:
                raise InputError(
                    f"the exporter merged {quoted(merged, _MOST_NAMES)}, which had equal values, "
                    f"into one parameter '{name}'; export with {REMEDY}."
                )


def _aliases(
    module: Mapping[str, Array], originals: Mapping[str, Any]
) -> Iterable[tuple[str, ...]]:
    """Return the names of each array; names of the same memory are one array."""
    names: dict[object, tuple[str, ...]] = {}
    for name, array in module.items():
        place = name
        if array.size:  # the address of a tensor, because its array may be a copy
            pointer = getattr(originals[name], "data_ptr", None)
            place = pointer() if pointer else array.__array_interface__["data"][0]
        key = (place, array.shape, array.strides, array.dtype)
        names[key] = (*names.get(key, ()), name)
    return names.values()


def _equal(array: Array, stored: Array) -> Sequence[tuple[int, ...]]:
    """Return the first order of the axes in which an array has the values of a stored array."""
    for axes in _orders(array, stored):
        if np.array_equal(array.transpose(axes).reshape(stored.shape), stored):
            return (axes,)
    return ()


def _alike(array: Array, stored: Array) -> Sequence[tuple[int, ...]]:
    """Return each order of the axes in which an array has the shape of a stored array."""
    return [
        axes
        for axes in _orders(array, stored)
        if tuple(array.shape[axis] for axis in axes) == stored.shape
    ]


def _orders(array: Array, stored: Array) -> Iterator[tuple[int, ...]]:
    """Yield the orders of the axes: unchanged first, then transposed, then all others."""
    if array.size == stored.size and array.dtype == stored.dtype and array.ndim <= 4:
        yield from permutations(range(array.ndim))


def _is_one_number(array: Array) -> bool:
    return array.size == 0 or bool((array == array.flat[0]).all())


def _check_shape(name: str, array: Array, shape: tuple[int, ...]) -> None:
    if array.shape != shape:
        raise ShapeError(f"the array of '{name}' has shape {array.shape}, not {shape}.")
