"""A program that ``mpiexec`` starts: ``python -m tests.distributed.mpi_program PART FOLDER``."""

import json
import os
import signal
import sys
import time
from pathlib import Path

import numpy as np

import kfac_engine as ke
from kfac_engine.distributed import mpi
from tests.comparing import assert_arrays_equal

# Lengths and parts of arrays that are sent in several messages; a part of no entry is among them.
PIECE = 7
LENGTHS = [1, 7, 8, 23, 60]
PARTS = {2: [23, 16], 3: [0, 25, 9]}
# Name to model, options and entries of a message.
CASES = {
    "sampled": ("mlp", {"estimation_mode": "gradients"}, None),
    "empirical": ("mlp", {"estimation_mode": "empirical"}, None),
    "pieces": ("mlp", {"estimation_mode": "gradients"}, 100),
    "single": ("cnn", {"estimation_mode": "gradients"}, None),
}
DISTRIBUTIONS = ["replicate", "shard"]
STEPS, SAVED_AFTER = 5, 3


def options_of(case, distribution):
    options = {"loss": "categorical", "damping": 0.1, "distribution": distribution}
    schedule = ke.Schedule(refresh_every=2)
    return {**options, "schedule": schedule, "threads": 1, **CASES[case][1]}


def array_of(rank, length, dtype):
    """Whole numbers, whose sums have no rounding."""
    return np.random.default_rng([rank, length]).integers(-99, 99, length).astype(dtype)


def send_in_pieces(ranks):
    """Results of all collectives, whose arrays are longer than a message."""
    results = {}
    for dtype in ("float32", "float64"):
        for length in LENGTHS:
            total = array_of(ranks.rank, length, dtype)
            ranks.allreduce(total)
            sent = array_of(ranks.rank, length, dtype)
            ranks.broadcast(sent, ranks.size - 1)
            results |= {f"sum {length} {dtype}": total, f"sent {length} {dtype}": sent}
        counts = PARTS[ranks.size]
        whole = array_of(ranks.rank, sum(counts), dtype)
        results[f"part {dtype}"] = ranks.reduce_scatter(whole, counts)
        edges = np.cumsum([0, *counts])[ranks.rank :][:2]
        gathered = np.full(sum(counts), np.nan, dtype)
        gathered[slice(*edges)] = array_of(ranks.rank, counts[ranks.rank], dtype)
        ranks.allgather(gathered, counts)
        results[f"gathered {dtype}"] = gathered
    return results


def engine_of(ranks, case, distribution):
    from tests.distributed.test_distributions import model_of

    model, options = model_of(CASES[case][0]), options_of(case, distribution)
    return ke.Engine.from_onnx(model, communicator=ranks, **options)


def step(engine, ranks, batch):
    from tests.distributed.test_distributions import CUTS
    from tests.distributed.threads import rows_of

    inputs, targets = batch
    rows = rows_of(ranks, CUTS)
    return engine.step({key: array[rows] for key, array in inputs.items()}, targets[rows])


def follow(ranks, case, distribution, folder):
    """Make the steps of one process with its parameters; return the results."""
    from tests.distributed.test_distributions import batches

    name, _, piece = CASES[case]
    mpi._LARGEST_MESSAGE, whole = piece or mpi._LARGEST_MESSAGE, mpi._LARGEST_MESSAGE
    engine, results = engine_of(ranks, case, distribution), {}
    for index, batch in enumerate(batches(name, STEPS)):
        with np.load(folder / f"{case} parameters {index}.npz") as parameters:
            engine.set_parameters(dict(parameters))
        result = step(engine, ranks, batch)
        results |= {f"{index} {key}": value for key, value in result.natural_gradients.items()}
        results[f"{index} loss"] = np.array(result.loss)
        if (case, index) == ("sampled", SAVED_AFTER - 1):
            engine.save(folder / f"{distribution}.safetensors")
    mpi._LARGEST_MESSAGE = whole
    return results


def refuse(ranks, distribution):
    """A batch with NaN on one rank between two good ones."""
    from tests.distributed.test_distributions import batches
    from tests.distributed.test_failures import assert_same_state, state

    first, bad, last = batches("mlp", 3)
    engine, untroubled = (engine_of(ranks, "sampled", distribution) for _ in range(2))
    step(engine, ranks, first)
    before = state(engine)
    if ranks.rank == 1:
        bad = ({key: np.full_like(array, np.nan) for key, array in bad[0].items()}, bad[1])
    try:
        step(engine, ranks, bad)
    except ke.KfacError as error:
        refused = [type(error).__name__, str(error)]
    assert_same_state(before, state(engine))
    step(untroubled, ranks, first)
    after, expected = (step(e, ranks, last).natural_gradients for e in (engine, untroubled))
    assert_arrays_equal(after, expected)
    return refused


def differ(ranks):
    """The message of an engine that has another damping on one rank."""
    from tests.distributed.test_distributions import model_of

    options = options_of("sampled", "shard") | {"damping": 0.2 if ranks.rank == 1 else 0.1}
    try:
        ke.Engine.from_onnx(model_of("mlp"), communicator=ranks, **options)
    except ke.RankError as error:
        return str(error)
    return "no error"


def interrupt(ranks, folder):
    """Steps of a run, one rank of which receives a signal in the third step."""
    from tests.training import softmax_net as net

    steps = []

    def send(record, _):
        steps.append(record["step"])
        if ranks.rank == 1 and record["step"] == 3:
            os.kill(os.getpid(), signal.SIGINT)

    engine = ke.Engine.from_onnx(net.model(), loss="categorical", communicator=ranks, threads=1)
    try:
        ke.fit(
            engine, net.batch(0, n=40), steps=9, batch_size=12, callbacks=[send], checkpoint=folder
        )
    except KeyboardInterrupt:
        return steps
    return "no interruption"


def compute(ranks, folder):
    """All that several processes compute."""
    for case in CASES:
        for distribution in DISTRIBUTIONS:
            results = follow(ranks, case, distribution, folder)
            np.savez(folder / f"{case} {distribution} {ranks.rank}.npz", **results)
    refused = [refuse(ranks, distribution) for distribution in DISTRIBUTIONS]
    (folder / f"refused {ranks.rank}.json").write_text(json.dumps(refused))
    (folder / f"differing {ranks.rank}").write_text(differ(ranks))
    steps = interrupt(ranks, folder / "run")
    (folder / f"interrupted {ranks.rank}.json").write_text(json.dumps(steps))
    mpi._LARGEST_MESSAGE = PIECE
    np.savez(folder / f"collectives {ranks.rank}.npz", **send_in_pieces(ranks))
    if ranks.rank == ranks.size - 1:
        time.sleep(1)  # the other ranks have ended
    (folder / f"end {ranks.rank}").touch()


def resume(ranks, folder):
    """Load the states that three ranks have saved."""
    from tests.distributed.test_distributions import batches

    data = list(batches("mlp", STEPS))
    for saved, distribution in zip(DISTRIBUTIONS, reversed(DISTRIBUTIONS), strict=True):
        engine, results = engine_of(ranks, "sampled", distribution), {}
        engine.load(folder / f"{saved}.safetensors")
        for index in range(SAVED_AFTER, STEPS):
            with np.load(folder / f"sampled parameters {index}.npz") as parameters:
                engine.set_parameters(dict(parameters))
            for key, value in step(engine, ranks, data[index]).natural_gradients.items():
                results[f"{index} {key}"] = value
        np.savez(folder / f"resumed {saved} {ranks.size} {ranks.rank}.npz", **results)


def kill(ranks, _):
    if ranks.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)


def raise_error(ranks, _):
    """Fail while the others wait in a collective of their own."""
    from mpi4py import MPI

    if ranks.rank == 1:
        raise ValueError("no such file")
    MPI.COMM_WORLD.Barrier()


def leave(ranks, _):
    if ranks.rank == 1:
        sys.exit(3)


def leave_late(ranks, _):
    """End a rank without an error, when others have waited for some time."""
    if ranks.rank == 1:
        time.sleep(0.5)
        sys.exit()


def run_command(ranks, folder):
    """Fail in a command of the command line: all ranks together, then one of them alone."""
    import click

    from kfac_engine.cli.app import app, run
    from kfac_engine.distributed.agreement import Agreement

    @app.command()
    @click.option("--together", is_flag=True)
    def fail(together):
        agreement = Agreement(ranks)
        if together:
            with agreement.operation("fail", ends=True):
                if ranks.rank == 1:
                    raise ke.NonFiniteError("input 'image' contains NaN.")
        if ranks.rank == 1:
            raise FileNotFoundError(2, "no such file", "images.npy")
        agreement.of_all(0)

    status = run(["fail", "--together"])
    (folder / f"status {ranks.rank}").write_text(str(status))
    Agreement(ranks).of_all(0)  # the first rank has printed the error
    sys.exit(run(["fail"]))


ENDS = {end.__name__: end for end in (kill, raise_error, leave, leave_late, run_command)}


def main(part, folder):
    ranks = ke.over_mpi()
    if part in ENDS:
        (folder / f"process {os.getpid()}").touch()
        ranks.allreduce(np.zeros(1))
        ENDS[part](ranks, folder)
        ranks.allreduce(np.zeros(1))
    else:
        {"compute": compute, "resume": resume}[part](ranks, folder)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
