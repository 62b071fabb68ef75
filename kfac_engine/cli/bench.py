"""``bench``: how fast the package is on this machine, beside the plain definition and peers."""

from pathlib import Path
from typing import Any

import click

from kfac_engine.cli.options import debug_option, file_path


@click.command
@click.option("--suite", multiple=True, metavar="NAME", help="Only this suite; may be repeated.")
@click.option(
    "--compare",
    default="",
    metavar="NAMES",
    help="From a checkout: installed libraries to compare with, separated by commas: torch, "
    "torch-by-example, jax, kfac-jax, curvlinops.",
)
@click.option(
    "--threads", type=int, metavar="N", help="Of each contender; by default one a usable core."
)
@click.option(
    "--repeats",
    type=click.IntRange(min=2),
    metavar="N",
    help="Rounds of each job; 2 to 7 by default.",
)
@click.option("--json", "json_path", type=file_path, metavar="FILE", help="Write JSON as well.")
@click.option("--resume", is_flag=True, help="Keep the suites that the JSON file has already.")
@click.option("--plot", type=file_path, metavar="DIR", help="Draw a chart of each suite.")
@click.option("--profile", is_flag=True, help="Say where the time of a step goes.")
@debug_option
def bench(suite: tuple[str, ...], json_path: Path | None, compare: str, **options: Any) -> None:
    """Time each operation beside its definition, whole steps beside peers, and what they take."""
    from kfac_engine.bench.run import Options, run_suites

    peers = [name.strip() for name in compare.split(",") if name.strip()]
    run_suites(suite, json_path, options=Options(compare=peers, **options))
