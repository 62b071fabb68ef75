"""The cases of all files ``rule_cases_*.py`` beside this one."""

from importlib import import_module
from pathlib import Path

CASES = tuple(
    case
    for path in sorted(Path(__file__).parent.glob("rule_cases_*.py"))
    for case in import_module(f"tests.autodiff.{path.stem}").CASES
)
