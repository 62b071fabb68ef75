"""The tables of the suite ``train``: losses within a budget, and the time until a loss."""

from collections.abc import Mapping
from typing import Any

from kfac_engine.bench.report import Form
from kfac_engine.bench.training.run import budget_text


def _result(row: Mapping[str, Any]) -> list[str]:
    accuracy, rise = row["accuracy"], row.get("rise")  # older reports have no rise
    return [
        row["task"], row["method"], row["setting"], _budget(row, "seconds", "budget_steps"),
        f"{row['steps']:g}",
        f"{row['milliseconds']:.1f}", f"{row['loss']:.4g}",
        ", ".join(f"{loss:.4g}" for loss in row["losses"]), formatted(rise, ".2f"),
        "" if accuracy is None else f"{accuracy:.2%}", str(row["died"] or ""),
    ]  # fmt: skip


def _comparison(row: Mapping[str, Any]) -> list[str]:
    variant = "" if row["method"] == "kfac" else f" ({row['method']})"
    return [
        row["task"], f"{row['rival']}, {_budget(row, 'rival_seconds', 'rival_steps')}{variant}",
        f"{row['level']:.4g}",
        formatted(row["seconds"], ".1f", "not reached"), formatted(row["seconds_ratio"], ".2f"),
        formatted(row["steps"], ".0f"), formatted(row["steps_ratio"], ".2f"),
        formatted(row["loss_ratio"], ".3f"), formatted(row["accuracy_gain"], "+.2f"),
    ]  # fmt: skip


RESULTS = Form(
    ("task", "method", "rate, schedule"),
    (
        "budget", "steps", "ms a step", "loss", "all seeds", "last ÷ lowest", "accuracy",
        "runs that died",
    ),
    _result,
)  # fmt: skip
COMPARISONS = Form(
    ("task", "rival"),
    (
        "its loss", "K-FAC, s", "÷ rival's", "steps", "÷ rival's", "loss ÷ rival's, equal time",
        "accuracy, points",
    ),
    _comparison,
)  # fmt: skip


def formatted(value: float | None, form: str, missing: str = "") -> str:
    """Return a number as text; ``missing`` for None."""
    return missing if value is None else format(value, form)


def _budget(row: Mapping[str, Any], seconds: str, steps: str) -> str:
    """Return the budget of a row; older reports have seconds alone."""
    text: str = budget_text(row[seconds], row.get(steps, 0))
    return text
