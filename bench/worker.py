"""A contender's own process: takes orders, one JSON line each, and answers likewise.

Orders are ``{"setup": operation, "sizes": {…}, "result": path}``, which prepares a job, writes the
result of its first run and answers what that took, and ``{"runs": n, "warm": …, "settle": …}``,
which after so many seconds of pause runs it so often and answers what that used; ``warm`` runs
before them, which do not count, warm the caches.
"""

import gc
import json
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict
from importlib import import_module
from time import sleep
from typing import Any, TextIO

import numpy as np

from kfac_engine._types import Array
from kfac_engine.bench.environment import keep_to_cores
from kfac_engine.bench.resource_usage import used

# What a result is called that has no parts.
RESULT = "result"


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
            answer = _first(run, order["result"])
        else:
            assert run is not None, "nothing was set up"
            answer = _timed(run, **order)
        print(json.dumps(answer), file=answers, flush=True)


def _first(run: Callable[[], Any], path: str) -> dict[str, Any]:
    results: list[Any] = []
    usage = used(lambda: results.append(run()))
    np.savez(path, **_parts(results.pop()))
    return asdict(usage)


def _timed(run: Callable[[], Any], runs: int, warm: int, settle: float) -> dict[str, Any]:
    sleep(settle)
    for _ in range(warm):
        run()
    gc.disable()
    answer = asdict(used(run, runs))
    gc.enable()
    return answer


def _parts(result: Any) -> dict[str, Any]:
    """A result by its parts, each one array."""
    parts = result if isinstance(result, Mapping) else {RESULT: result}
    return {name: _joined(part) for name, part in parts.items()}


def _joined(result: Any) -> Array:
    """An array as it is; a list of them one after the other."""
    if not isinstance(result, list):
        return np.asarray(result)
    return np.concatenate([np.asarray(array).ravel() for array in result])


if __name__ == "__main__":
    # Libraries print where they like; only answers go to the channel.
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    keep_to_cores(int(sys.argv[2]))
    serve(sys.argv[1], sys.stdin, channel)
