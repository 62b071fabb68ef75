"""Runs the program: ``python -m kfac_engine``, also installed as ``kfac-engine``."""

import sys
from collections.abc import Sequence
from io import TextIOWrapper

from kfac_engine.cli.app import run
from kfac_engine.cli.interruption import exit_after_signal


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        arguments: Arguments without the name of the program; by default the arguments of the
            process. A signal then ends the process here.

    Returns:
        The exit status: 0 if done, 2 if the input is wrong, 1 for a bug, above 128 after a signal.
    """
    if arguments is not None:
        return run(arguments)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            # If an encoding lacks "⊗" or a letter of a name, its escape is printed.
            stream.reconfigure(errors="backslashreplace")
    status = run(None)
    exit_after_signal(status)
    return status


if __name__ == "__main__":
    sys.exit(main())
