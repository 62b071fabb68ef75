"""``bench``: how fast the backend is on this machine, beside the plain definition."""

from pathlib import Path

import click

from kfac_engine.cli.options import debug_option, file_path


@click.command
@click.option("--suite", multiple=True, metavar="NAME", help="Only this suite; may be repeated.")
@click.option("--json", "json_path", type=file_path, metavar="FILE", help="Write JSON as well.")
@debug_option
def bench(suite: tuple[str, ...], json_path: Path | None) -> None:
    """Time covariances and inverses beside plain NumPy, and how engines are built."""
    from kfac_engine.bench.run import run_suites

    run_suites(suite, json_path)
