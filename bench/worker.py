"""A contender's own process: takes orders, one JSON line each, and answers likewise.

Orders are ``{"setup": operation, "sizes": {…}, "result": path}``, which prepares a job and writes
the result of its first run, and ``{}``, which runs it once and answers what that used.
"""

import gc
import json
import os
import sys
from collections.abc import Callable
from dataclasses import asdict
from importlib import import_module
from time import sleep
from typing import Any, TextIO

import numpy as np

from kfac_engine._types import Array
from kfac_engine.bench.usage import Meter

# Threads of the contender that came before spin while they wait for work, for up to a quarter of a
# second. After this pause a run that is not timed warms the caches again.
_SETTLING = 0.3


def serve(module: str, orders: TextIO, answers: TextIO) -> None:
    """Obey until there are no more orders.

    Args:
        module: Name of the contender's module, with its ``OPERATIONS``.
        orders: Lines.
        answers: Lines.
    """
    operations = import_module(module).OPERATIONS
    run: Callable[[], Any] | None = None
    for line in orders:
        order = json.loads(line)
        if "setup" in order:
            run = None
            gc.collect()
            run = operations[order["setup"]](**order["sizes"])
            np.save(order["result"], _joined(run()))
            answer = {}
        else:
            assert run is not None, "nothing was set up"
            sleep(_SETTLING)
            run()
            gc.disable()
            meter = Meter()
            run()
            answer = asdict(meter.usage())
            gc.enable()
        print(json.dumps(answer), file=answers, flush=True)


def _joined(result: Any) -> Array:
    """An array as it is; a list of them one after the other."""
    if not isinstance(result, list):
        return np.asarray(result)
    return np.concatenate([np.asarray(array).ravel() for array in result])


if __name__ == "__main__":
    # Libraries print where they like; only answers go to the channel.
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    serve(sys.argv[1], sys.stdin, channel)
