"""The public names are the documented ones, each has a docstring, and importing them is quick."""

import inspect
import re
import subprocess
import sys

import pytest

import kfac_engine as ke
from tests.violations import assert_none

# The errors' built-in parents, which callers may catch instead.
PARENTS = {
    "InputError": ValueError,
    "ShapeError": ValueError,
    "UnknownNameError": KeyError,
    "UnknownAttributeError": AttributeError,
    "UnsupportedOpError": NotImplementedError,
    "NotReadyError": RuntimeError,
    "BackendError": RuntimeError,
    "RankError": RuntimeError,
    "MemoryLimitError": MemoryError,
}
HEAVY = ("numpy", "scipy", "onnx", "onnxruntime", "safetensors", "rich", "click", "matplotlib")


def test_public_names_exist_with_docstrings():
    assert_none(name for name in ke.__all__[1:] if not getattr(ke, name).__doc__)
    assert dir(ke) == sorted(ke.__all__)


def test_errors_inherit_from_builtin_errors():
    for name, parent in PARENTS.items():
        assert issubclass(getattr(ke, name), ke.KfacError), name
        assert issubclass(getattr(ke, name), parent), name


def test_unknown_public_name_raises_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'Kfac'"):
        ke.Kfac  # noqa: B018  # reading it is the test


def test_import_loads_no_heavy_library():
    code = f"import sys, kfac_engine; print(*({set(HEAVY)!r} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


def callables():
    """Public functions, classes and methods, by their names in the documentation."""
    for name in ke.__all__[1:]:
        found = getattr(ke, name)
        if not isinstance(found, type):
            yield name, found
            continue
        if not issubclass(found, Warning | Exception):
            yield name, found
        for key, member in vars(found).items():
            if not key.startswith("_") and callable(getattr(found, key)):
                yield (
                    f"{name}.{key}",
                    getattr(found, key)
                    if isinstance(member, classmethod | staticmethod)
                    else member,
                )


CALLABLES = dict(callables())
REFUSED = re.compile(r"missing \d+ required|unexpected keyword|positional-only|multiple values")


class Useless:
    """A value that no function has a use for."""


def bound(call):
    """The documented arguments of a call, each by its name, with useless values."""
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    parameters = inspect.signature(call).parameters.values()
    return {parameter.name: Useless() for parameter in parameters if parameter.kind in kinds}


def refusal(call):
    """The message of a call that does not take its own arguments by name; empty for others."""
    try:
        call(**bound(call))
    except TypeError as error:
        return str(error) if REFUSED.search(str(error)) else ""
    except Exception:  # the useless values are refused in many ways
        return ""
    return ""


@pytest.mark.parametrize("name", [name for name, call in CALLABLES.items() if bound(call)])
def test_every_argument_can_be_given_by_its_name(name):
    assert not refusal(CALLABLES[name])


def test_an_argument_by_position_only_is_found():
    def taken(first, second=1):
        raise ke.InputError(f"{first} {second}")

    def wrapped(first, /, **others):
        return taken(first, **others)

    assert not refusal(taken)
    wrapped.__signature__ = inspect.signature(taken)
    assert "missing 1 required" in refusal(wrapped)
