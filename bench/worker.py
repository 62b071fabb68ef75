"""The process of a contender: it reads orders and writes answers, one line of JSON each.

- ``{"setup": operation, "sizes": {…}, "result": path}`` prepares a job, runs it once and writes the
  result into a file. The answer has the resources of this run.
- ``{"runs": n, "warm": m, "settle": s}`` waits ``s`` seconds, makes ``m`` runs that warm the caches
  and then ``n`` timed runs. The answer has the resources of the timed runs.
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

# Name of a result without parts.
RESULT = "result"


def serve(module: str, orders: TextIO, answers: TextIO) -> None:
    """Execute orders until the input ends."""
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
            assert run is not None, "no job is set up"
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
    """Return the parts of a result as arrays by name."""
    parts = result if isinstance(result, Mapping) else {RESULT: result}
    return {name: _joined(part) for name, part in parts.items()}


def _joined(result: Any) -> Array:
    """Return an array unchanged, or the concatenation of a list of arrays."""
    if not isinstance(result, list):
        return np.asarray(result)
    return np.concatenate([np.asarray(array).ravel() for array in result])


if __name__ == "__main__":
    # Libraries may print on stdout; only answers may go to the channel.
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    keep_to_cores(int(sys.argv[2]))
    serve(sys.argv[1], sys.stdin, channel)
