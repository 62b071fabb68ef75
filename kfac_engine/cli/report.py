"""``report``: the page of a finished run, from its log."""

from pathlib import Path

import click

from kfac_engine.cli.command import Command, Group, file_path
from kfac_engine.cli.display import report_beside, say
from kfac_engine.cli.options import debug_option


@click.command(cls=Command, example="kfac-engine report run.jsonl -o run.html")
@click.argument("log", type=file_path)
@Group.OUTPUT.file("-o", "--out", required=True, help="File of the page (.html).")
@debug_option
def report(log: Path, out: Path) -> None:
    """Write a page with the charts and tables of a training run."""
    import kfac_engine as ke
    from kfac_engine.system.writing import check_outputs

    check_outputs({"--out": out}, {"the log": log})
    ke.report(log, out)
    with report_beside(out):
        say(f"wrote {out}")
