"""Train a transformer on lines with padding, and on the same lines cut without, into a file.

Run: ``python -m scripts.measure_padding``. A line of the results file is an evaluation of a run.
``python -m scripts.draw_padding`` draws the lines.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from time import process_time
from typing import TypeAlias

import numpy as np

import kfac_engine as ke
from kfac_engine._types import Array
from kfac_engine.bench.environment import environment
from kfac_engine.bench.training.data import load_text
from kfac_engine.bench.training.layers import INPUT
from kfac_engine.bench.training.models import POSITIONS, READ, transformer
from kfac_engine.bench.training.run import MARKS
from kfac_engine.system.writing import write_file
from kfac_engine.training.schedules import SCHEDULES

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench/results/2026-11-26-padding.jsonl"
SEEDS, SECONDS = (0, 1, 2), 40.0
HELD_OUT = 1_000  # lines
# Characters of a batch, padding included: 32 pieces. Lengths of padded lines are multiples of 4.
CHARACTERS, MULTIPLE = 32 * POSITIONS, 4
NEWLINE, UNCOUNTED = 0, -100

Batch: TypeAlias = tuple[dict[str, Array], Array]


@dataclass(frozen=True, slots=True)
class Point:
    """An evaluation.

    Attributes:
        form: Form of the lines that are trained on, a key of ``FORMS``.
        seed: Seed of the weights, of the order of the lines and of the engine.
        step: Number of steps so far.
        characters: Number of targets so far that count.
        cpu: CPU seconds of the steps so far.
        padded: Loss of a character of the held-out lines, each of them alone.
        cut: Loss of a character of the held-out lines, joined and cut into pieces.
    """

    form: str
    seed: int
    step: int
    characters: int
    cpu: float
    padded: float
    cut: float


def read_lines() -> tuple[list[Array], list[Array]]:
    """Return the lines to train on and the held-out lines, in a random order.

    Empty lines and lines that are longer than a piece are left out. A line that occurs several
    times is kept once, so that no held-out line is trained on.
    """
    symbols = load_text().symbols.astype(np.int64)
    parts = np.split(symbols, np.flatnonzero(symbols == NEWLINE) + 1)  # a line ends in its newline
    lines = list({part.tobytes(): part for part in parts if 1 < len(part) <= POSITIONS}.values())
    order = np.random.default_rng(5).permutation(len(lines))
    return [lines[i] for i in order[HELD_OUT:]], [lines[i] for i in order[:HELD_OUT]]


def padded(lines: Sequence[Array]) -> list[Sequence[Array]]:
    """Return lines in groups of similar lengths."""
    groups: list[Sequence[Array]] = []
    for length, alike in groupby(sorted(lines, key=_padded_length), _padded_length):
        bucket, size = list(alike), CHARACTERS // length
        groups += [bucket[i : i + size] for i in range(0, len(bucket), size)]
    return groups


def _padded_length(line: Array) -> int:
    return -(-len(line) // MULTIPLE) * MULTIPLE


def batch_of_lines(lines: Sequence[Array]) -> Batch:
    """Return lines as rows of one length: a newline and the line without its own, and padding."""
    shape = len(lines), max(map(_padded_length, lines))
    x, y = np.full(shape, NEWLINE), np.full(shape, UNCOUNTED)
    for row, line in enumerate(lines):
        x[row, 1 : len(line)], y[row, : len(line)] = line[:-1], line
    return {INPUT: x, READ: y != UNCOUNTED}, y


def cut(lines: Sequence[Array]) -> list[Array]:
    """Return groups of pieces of the joined lines, each with the character that follows it."""
    joined = np.concatenate([[NEWLINE], *lines])
    starts = np.arange(0, len(joined) - POSITIONS, POSITIONS)
    pieces = joined[starts[:, None] + np.arange(POSITIONS + 1)]
    size = CHARACTERS // POSITIONS
    return [pieces[i : i + size] for i in range(0, len(pieces), size)]


def batch_of_pieces(pieces: Array) -> Batch:
    """Return pieces and the character that follows each position."""
    return {INPUT: pieces[:, :-1]}, pieces[:, 1:]


# A form of the lines: groups of a permutation of the lines, and the batch of a group.
FORMS: Mapping[str, tuple[Callable, Callable]] = {
    "padded": (padded, batch_of_lines),
    "cut": (cut, batch_of_pieces),
}


def batches(form: str, lines: Sequence[Array], seed: int) -> Iterator[Batch]:
    """Yield batches without end; each epoch has a new order."""
    rng, (groups_of, batch_of) = np.random.default_rng(1000 + seed), FORMS[form]
    while True:
        groups = groups_of([lines[i] for i in rng.permutation(len(lines))])
        for i in rng.permutation(len(groups)):
            yield batch_of(groups[i])


class Evaluator:
    """Computes the held-out losses of parameters, in both forms and with one model."""

    def __init__(self, lines: Sequence[Array]) -> None:
        self._engine = ke.Engine.from_onnx(
            transformer(0, padded=True).data, loss="categorical", threads=1
        )
        self._batches = {
            "padded": [batch_of_lines(group) for group in padded(lines)],
            "cut": [
                ({**inputs, READ: np.ones(targets.shape, bool)}, targets)
                for inputs, targets in map(batch_of_pieces, cut(lines))
            ],
        }

    def __call__(self, parameters: Mapping[str, Array]) -> dict[str, float]:
        """Return the loss of a character by form."""
        self._engine.set_parameters(parameters)
        return {
            form: self._engine.evaluate(batches, ["loss"])["loss"]
            for form, batches in self._batches.items()
        }


def train(form: str, seed: int, seconds: float = SECONDS) -> Iterator[Point]:
    """Train with the defaults of K-FAC, and yield evaluations, which are off the clock."""
    lines, held_out = read_lines()
    model = transformer(seed, padded=form == "padded")
    engine = ke.Engine.from_onnx(model.data, loss="categorical", threads=1, seed=seed)
    optimizer, evaluate = ke.KfacOptimizer(engine), Evaluator(held_out)
    engine.gradients(*next(batches(form, lines, seed)))  # builds sessions
    step = characters = 0
    cpu, marks = 0.0, [seconds * mark for mark in MARKS]
    yield Point(form, seed, step, characters, cpu, **evaluate(engine.parameters))
    source = batches(form, lines, seed)
    while marks:
        start = process_time()
        inputs, targets = next(source)
        optimizer.step(inputs, targets, SCHEDULES["tail"](cpu / seconds))
        cpu += process_time() - start
        step, characters = step + 1, characters + int((targets != UNCOUNTED).sum())
        if cpu >= marks[0]:
            marks = [mark for mark in marks if mark > cpu]
            yield Point(form, seed, step, characters, cpu, **evaluate(engine.parameters))


def main() -> None:
    """Measure all runs, each in a process with one thread, and write the results file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", nargs=2, metavar=("FORM", "SEED"), help="print one run")
    chosen = parser.parse_args().run
    if chosen:
        for point in train(chosen[0], int(chosen[1])):
            print(json.dumps(asdict(point)), flush=True)
        return
    content = b""
    for run in ([form, str(seed)] for seed in SEEDS for form in FORMS):
        command = [sys.executable, "-m", "scripts.measure_padding", "--run", *run]
        content += subprocess.run(
            command, env=environment(1), stdout=subprocess.PIPE, check=True
        ).stdout
        print(*run, content.splitlines()[-1].decode(), flush=True)
    write_file(RESULTS, [content])


if __name__ == "__main__":
    main()
