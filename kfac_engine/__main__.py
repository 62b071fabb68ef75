"""The program: ``python -m kfac_engine``, also installed as ``kfac-engine``."""

import sys
from collections.abc import Sequence

from kfac_engine.cli.app import run


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status: 0 done, 2 the input is wrong, 1 a bug."""
    return run(sys.argv[1:] if arguments is None else list(arguments))


if __name__ == "__main__":
    sys.exit(main())
