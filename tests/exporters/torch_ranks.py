"""The processes of ``test_torch_ranks``: each runs ``work`` on its shard of the batches."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed

import kfac_engine as ke
from tests import models
from tests.pages import blocks

PAGE = Path(__file__).resolve().parents[2] / "docs" / "distributed.md"
SIZE = 3
COUNTS = [0, 5, 2]  # entries of the parts of a buffer
EDGES = [0, 2, 7, 12]  # uneven shards of 12 examples
STEPS = 4
DTYPES = ("float32", "float64")
DISTRIBUTIONS = ("replicate", "shard")

Batch = tuple[dict[str, np.ndarray], np.ndarray]
Results = dict[str, np.ndarray]


def code_of(word: str) -> str:
    """The block of Python of the page that contains a word."""
    (code,) = [code for _, code in blocks(PAGE, "python") if word in code]
    return code


def communicator() -> Any:
    """The communicator of the page."""
    names: dict[str, Any] = {}
    exec(compile(code_of("class OverTorch"), PAGE.name, "exec"), names)
    return names["OverTorch"]()


def engine_of(ranks: Any, distribution: str = "replicate") -> ke.Engine:
    return ke.Engine.from_onnx(
        models.mlp(dtype="float64"),
        loss="categorical",
        damping=0.1,
        schedule=ke.Schedule(refresh_every=2),
        communicator=ranks,
        distribution=distribution,
    )


def batches() -> list[Batch]:
    model, targets = models.mlp(dtype="float64"), np.random.default_rng(0)
    inputs = [models.random_inputs(model, batch=EDGES[-1], seed=seed) for seed in range(STEPS)]
    return [(values, targets.integers(0, 3, EDGES[-1])) for values in inputs]


def numbers_of(rank: int, dtype: str) -> np.ndarray:
    return np.random.default_rng(rank).standard_normal(sum(COUNTS)).astype(dtype)


def start(rank: int, folder: str) -> None:
    """Join the ranks, and write the results of this one to a file."""
    meeting = (Path(folder) / "meeting").as_uri()
    torch.distributed.init_process_group("gloo", meeting, rank=rank, world_size=SIZE)
    ranks, results = communicator(), {}
    for dtype in DTYPES:
        results |= _collectives(ranks, dtype)
    for distribution in DISTRIBUTIONS:
        results |= _steps(ranks, distribution)
    results |= _failure(ranks)
    np.savez(Path(folder) / f"{rank}.npz", **results)
    torch.distributed.destroy_process_group()


def _part_of(batch: Batch, rank: int) -> Batch:
    inputs, targets = batch
    rows = slice(*EDGES[rank : rank + 2])
    return {name: array[rows].copy() for name, array in inputs.items()}, targets[rows].copy()


def _collectives(ranks: Any, dtype: str) -> Results:
    own = numbers_of(ranks.rank, dtype)
    summed, gathered, received = own.copy(), own.copy(), own.copy()
    ranks.allreduce(summed)
    part = ranks.reduce_scatter(own.copy(), COUNTS)
    ranks.allgather(gathered, COUNTS)
    ranks.broadcast(received, 2)
    names = ("allreduce", "reduce_scatter", "allgather", "broadcast")
    arrays = (summed, part, gathered, received)
    return {f"{name} {dtype}": array for name, array in zip(names, arrays, strict=True)}


def _steps(ranks: Any, distribution: str) -> Results:
    """Steps at the parameters of one process, which this rank computes as well."""
    alone, engine = engine_of(None), engine_of(ranks, distribution)
    results: Results = {}
    for step, batch in enumerate(batches()):
        expected, result = alone.step(*batch), engine.step(*_part_of(batch, ranks.rank))
        results[f"{distribution} {step} loss"] = np.array(result.loss)
        for name, array in result.natural_gradients.items():
            results[f"{distribution} {step} {name}"] = array
        moved = {n: v - 0.05 * expected.natural_gradients[n] for n, v in alone.parameters.items()}
        alone.set_parameters(moved)
        engine.set_parameters(moved)
    return results


def _failure(ranks: Any) -> Results:
    """A step that one rank refuses, and the next step."""
    first, second, third, _ = batches()
    engine = engine_of(ranks)
    engine.step(*_part_of(first, ranks.rank))
    inputs, targets = _part_of(second, ranks.rank)
    if ranks.rank == 1:
        inputs["input"][0, 0] = np.nan
    with pytest.raises(ke.KfacError) as refused:
        engine.step(inputs, targets)
    natural = engine.step(*_part_of(third, ranks.rank)).natural_gradients
    message = f"{type(refused.value).__name__}: {refused.value}"
    return {
        "message": np.array(message),
        **{f"after {name}": array for name, array in natural.items()},
    }
