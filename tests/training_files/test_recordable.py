"""The functions of the library that training files record have a mark, and each is recorded."""

import sys
from pathlib import Path

import pytest

import kfac_engine as ke
from kfac_engine.backend.namespace import RECORDABLE
from kfac_engine.recording.recorded import Recorded
from kfac_engine.training_files.parts import EvaluationGraph
from tests.training_files.nets import network

HOME = Path(ke.__file__).parent
WRITERS = tuple(str(HOME / folder) for folder in ("training_files", "recording", "export"))
# Network, loss and optimizer of files that record all of them together.
FILES = [
    ("dense", "categorical", "kfac"),
    ("dense", "categorical", "adamw"),
    ("dense", "normal", "kfac"),
    ("dense", "multi_bernoulli", "kfac"),
    ("tokens", "ctc", "adamw"),
    ("grouped", "categorical", "kfac"),
    ("experts", "categorical", "kfac"),
]


def is_recorded(value):
    if isinstance(value, dict):
        return any(map(is_recorded, value.values()))
    if isinstance(value, list | tuple):
        return any(map(is_recorded, value))
    return isinstance(value, Recorded | EvaluationGraph)


def called_with_recorded_arrays(call):
    """The functions outside of the writers of files that these call with recorded arrays."""
    found = set()

    def enter(frame, event, _):
        code, caller = frame.f_code, frame.f_back
        if event != "call" or caller is None or not caller.f_code.co_filename.startswith(WRITERS):
            return
        inside = code.co_filename.startswith(str(HOME)) and code not in found
        if inside and not code.co_filename.startswith(WRITERS):
            names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
            # A lambda or a comprehension belongs to the function that has it.
            if not code.co_name.startswith("<") and any(
                is_recorded(frame.f_locals.get(name)) for name in names
            ):
                found.add(code)

    sys.setprofile(enter)
    try:
        call()
    finally:
        sys.setprofile(None)
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    def export():
        for net, loss, optimizer in FILES:
            folder = tmp_path_factory.mktemp("files")
            ke.export_training(network(net), loss, optimizer, path=folder)

    return called_with_recorded_arrays(export)


def test_functions_that_files_record_are_marked(found):
    unmarked = found - RECORDABLE.keys()
    assert not [f"{code.co_filename}: {code.co_name}" for code in unmarked]


def test_each_marked_function_is_recorded(found):
    assert not [name for code, name in RECORDABLE.items() if code not in found]
