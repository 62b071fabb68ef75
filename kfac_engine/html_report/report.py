"""``report``: writes the page of a run from its history or from its log."""

from pathlib import Path

from kfac_engine.errors import InputError
from kfac_engine.html_report.page import page
from kfac_engine.html_report.run_log import gathered, read_log
from kfac_engine.system.writing import check_outputs, checked_path, write_file
from kfac_engine.training.history import History


def report(run: History | str | Path, path: str | Path) -> None:
    """Write the report of a training run: one HTML page, which loads nothing.

    The page shows losses, metrics, learning rate, damping and reduction ratio against steps and
    seconds, the time of each stage, the spectra of the factors, the layers and the settings.

    Args:
        run: The result of ``fit``, or the path of its log.
        path: File of the page, which is replaced whole or not at all.

    Raises:
        InputError: The log is missing or damaged, or the page cannot be written.
    """
    if isinstance(run, History):
        log = gathered(run.lines())
    elif isinstance(run, str | Path):
        check_outputs({"the page": checked_path(path)}, {"the log": checked_path(run)})
        log = read_log(checked_path(run))
    else:
        raise InputError(f"a report needs a History or the path of a log, got {run!r:.80}.")
    write_file(path, [page(log).encode()])
