"""Reads data sets from an ``.npz`` file or from a folder of shards.

A file has an array for each input of the model, under its name, and ``targets``. The targets of
several losses have the names of their outputs. ``weights`` are how much each target counts. A shard
of a folder is an ``.npz`` file of this kind, or a group of ``.npy`` files ``SHARD.NAME.npy``. Other
files of the folder are ignored.
"""

import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TypeAlias, TypeGuard

import numpy as np

from kfac_engine._types import Array
from kfac_engine.datasets.examples import TARGETS, WEIGHTS, Batch, ExampleAxes
from kfac_engine.datasets.shards import ShardFile
from kfac_engine.errors import InputError
from kfac_engine.losses.observed import Targets, Weighted
from kfac_engine.printable import quoted
from kfac_engine.system.arrays import ArrayHeader, array_headers, map_arrays, read_arrays
from kfac_engine.system.reading import check_file, folder_members

# The files of a shard: the file of each array; or one file of all arrays, under None.
Files: TypeAlias = Mapping[str | None, Path]
_SEPARATORS = ".-_"


def is_path(data: object) -> TypeGuard[str | os.PathLike[str]]:
    """Return whether data are the path of a file or of a folder."""
    return isinstance(data, str | os.PathLike)


def files_of(data: object) -> Iterator[Path]:
    """Yield the files and folders that data are read from: paths, and the files of mapped arrays.

    Data have a form of ``fit``. Iterables besides tuples, lists and mappings are not read.
    """
    if is_path(data):
        yield Path(data)
    elif isinstance(data, Mapping):
        yield from files_of(list(data.values()))
    elif isinstance(data, tuple | list):
        for part in data:
            yield from files_of(part)
    while isinstance(data, np.ndarray):
        if isinstance(data, np.memmap) and data.filename is not None:
            yield Path(data.filename)
        data = data.base


def shards_of(
    path: str | os.PathLike[str], axes: ExampleAxes, *, labeled: bool = True
) -> list[ShardFile]:
    """Return the shards of a folder, in the order of their names.

    ``InputError`` is raised if a file is damaged, or if the shards differ in names, types or shapes
    of their arrays.
    """
    place = Path(path)
    shards = _grouped(place, axes.names)
    first, *others = shards
    headers = {name: _headers(files) for name, files in shards.items()}
    for name in others:
        _compare(place, (first, headers[first]), (name, headers[name]), axes)
    return [
        ShardFile(
            _counted(place / name, headers[name], axes, labeled=labeled),
            partial(_load, place / name, files, headers[name], axes, labeled=labeled),
        )
        for name, files in shards.items()
    ]


def first_shard(folder: Path, names: Collection[str]) -> dict[str, Array]:
    """Return the arrays of the first shard of a folder by name, mapped.

    ``names`` are the inputs and targets of the model.
    """
    return _mapped(next(iter(_grouped(folder, names).values())))


def opened_inputs(path: str | os.PathLike[str]) -> Array | dict[str, Array]:
    """Return the array of an ``.npy`` file, or the arrays of an ``.npz`` file by name; mapped."""
    arrays = map_arrays(Path(path))
    return arrays[None] if None in arrays else {str(name): a for name, a in arrays.items()}


def opened_targets(path: str | os.PathLike[str], outputs: Collection[str]) -> Targets:
    """Return the targets in a file, mapped.

    They are the array ``targets`` of the file, its arrays by output, or its only array. Otherwise
    ``InputError`` is raised. ``outputs`` are the names of the outputs with a loss.
    """
    arrays = opened_inputs(path)
    if not isinstance(arrays, Mapping):
        return arrays
    if WEIGHTS in arrays and WEIGHTS not in outputs:
        weights = arrays.pop(WEIGHTS)
        return Weighted(arrays.get(TARGETS, arrays), weights)
    if TARGETS in arrays:
        return arrays[TARGETS]
    if arrays.keys() & {*outputs}:
        return arrays
    if len(arrays) != 1:
        names = quoted(arrays) or "none"
        raise InputError(
            f"'{path}' must hold one array, one named '{TARGETS}', or an array for each of "
            f"{', '.join(outputs)}; it holds {names}."
        )
    return next(iter(arrays.values()))


def numbers_in(path: str | os.PathLike[str]) -> Array:
    """Return the numbers in a file: an ``.npy`` file, or text with spaces or commas.

    ``InputError`` is raised if the file cannot be read, or if it does not hold one list of numbers.
    """
    place = Path(path)
    if place.suffix == ".npy":
        return read_arrays(place)[None]
    check_file(place)
    try:
        words = place.read_text(encoding="utf-8").replace(",", " ").split()
        return np.array([float(word) for word in words])
    except (OSError, ValueError) as failure:  # ValueError: no text, or no number
        raise InputError(
            f"'{path}' must be an .npy file, or text with numbers between spaces or commas."
        ) from failure


def separated(
    path: str | os.PathLike[str],
    arrays: Mapping[str, Array] | Mapping[str | None, Array],
    axes: ExampleAxes,
    *,
    labeled: bool = True,
) -> Batch:
    """Return the inputs and targets of a file, as ``ExampleAxes.separated`` does.

    Messages name the file. ``InputError`` is raised if the file has one array without a name.
    """
    if None in arrays:
        raise InputError(
            f"'{path}' holds one array; give an .npz file with the inputs by name and "
            f"'{TARGETS}', or a folder of such files."
        )
    try:
        return axes.separated({str(n): array for n, array in arrays.items()}, labeled=labeled)
    except InputError as failure:
        raise InputError(f"'{path}': {failure}") from failure


# -- private ---------------------------------------------------------------------------------------


def _grouped(folder: Path, names: Collection[str]) -> dict[str, Files]:
    """Return the files of each shard, by its name, in the order of the names.

    ``InputError`` is raised if there is no shard, or if a file name names no array of the model.
    """
    members = folder_members(folder) or ()
    paths = [path for path in members if not path.name.startswith(".")]
    archives = [path for path in paths if path.suffix == ".npz"]
    arrays = [path for path in paths if path.suffix == ".npy"]
    if archives and arrays:
        raise InputError(f"the folder '{folder}' has shards of both kinds, .npz and .npy.")
    if archives:
        return {path.name: {None: path} for path in archives}
    shards: dict[str, dict[str | None, Path]] = {}
    for path in arrays:
        shard, name = _split_name(path, names)
        shards.setdefault(shard, {})[name] = path
    if not shards:
        raise InputError(f"the folder '{folder}' has no .npz and no .npy file.")
    return dict(sorted(shards.items()))


def _split_name(path: Path, names: Iterable[str]) -> tuple[str, str]:
    """Return shard and array of a file ``SHARD.NAME.npy``; the shard may be empty."""
    for name in sorted(names, key=len, reverse=True):
        shard = path.stem.removesuffix(name)
        if shard != path.stem and (not shard or shard[-1] in _SEPARATORS):
            return shard.rstrip(_SEPARATORS), name
    raise InputError(
        f"'{path}' belongs to no array: the name of a shard's file must end with one of "
        f"{', '.join(f'{name}.npy' for name in names)}."
    )


def _headers(files: Files) -> dict[str | None, ArrayHeader]:
    if None in files:
        return array_headers(files[None])
    headers = {name: array_headers(path) for name, path in files.items()}
    for name, path in files.items():
        if None not in headers[name]:
            raise InputError(f"'{path}' is not a .npy file, although its name ends in .npy.")
    return {name: entries[None] for name, entries in headers.items()}


def _compare(
    folder: Path,
    expected: tuple[str, Mapping[str | None, ArrayHeader]],
    other: tuple[str, Mapping[str | None, ArrayHeader]],
    axes: ExampleAxes,
) -> None:
    """Refuse a shard whose arrays differ from another shard."""
    (first, headers), (name, others) = expected, other
    for key in dict.fromkeys([*headers, *others]):
        left, right = (_form(entries.get(key), str(key), axes) for entries in (headers, others))
        if left != right:
            raise InputError(
                f"the shards in '{folder}' differ: '{key}' is {right} in '{name}', but {left} in "
                f"'{first}'."
            )


def _form(header: ArrayHeader | None, name: str, axes: ExampleAxes) -> str:
    """Describe an array without its number of examples."""
    if header is None:
        return "absent"
    axis = axes.axis(name)
    sizes = ("n" if i == axis else str(size) for i, size in enumerate(header.shape))
    return f"{header.dtype} ({', '.join(sizes)})"


def _counted(
    path: Path, headers: Mapping[str | None, ArrayHeader], axes: ExampleAxes, *, labeled: bool
) -> int:
    """Return the number of examples that the headers of a shard announce."""
    batch = separated(path, headers, axes, labeled=labeled)  # type: ignore[arg-type] # shapes only
    try:
        return axes.check(*batch)
    except InputError as failure:
        raise InputError(f"'{path}': {failure}") from failure


def _load(
    path: Path,
    files: Files,
    headers: Mapping[str | None, ArrayHeader],
    axes: ExampleAxes,
    *,
    labeled: bool,
) -> Batch:
    """Return the arrays of a shard, which must be as they were when the run began."""
    arrays = _mapped(files)
    present = {name: (array.shape, array.dtype) for name, array in arrays.items()}
    if present != {name: (header.shape, header.dtype) for name, header in headers.items()}:
        raise InputError(f"the shard '{path}' has changed since the run began.")
    return separated(path, arrays, axes, labeled=labeled)


def _mapped(files: Files) -> dict[str, Array]:
    """Return the arrays of a shard by name; files that are not arrays any more are left out."""
    if None in files:
        return {str(name): array for name, array in map_arrays(files[None]).items()}
    arrays = {str(name): map_arrays(file) for name, file in files.items()}
    return {name: entry[None] for name, entry in arrays.items() if None in entry}
