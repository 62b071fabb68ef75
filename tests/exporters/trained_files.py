"""Trains files of packages with other heads, here and in PyTorch, and compares the two.

Run from the repository root in the environment of the exporters, with the packages whose files are
trained (``pip install --no-deps magika==1.0.3 rapidocr-onnxruntime==1.4.4``)::

    python -m tests.exporters.trained_files [ROW …] [--epochs N]

Each side trains in a process of its own, on one thread: the same nodes, first weights and batches,
AdamW with the same options. A row prints the accuracies, the difference of the first losses, and
the ratios of CPU seconds and of peak memory. The page ``docs/change_a_file.md`` has the table.
"""

import argparse
import json
import resource
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from onnx import numpy_helper
from torch.nn import functional

import kfac_engine as ke
from kfac_engine.data import digits

BATCH, MEBI = 32, 2**20
# Packages whose modules are told apart by their bytes; each gives as many to train and to test.
SOURCES, MODULES, TESTED = ("numpy", "scipy", "onnx", "torch", "sympy", "networkx"), 75, 25
BEGINNING, PADDING = 1024, 256  # bytes of a file that magika reads at each end, and no byte

Data = tuple[np.ndarray, np.ndarray]


def handwritten(seed: int) -> tuple[Data, Data]:
    """Return 1,280 digits as pictures for the reader of text lines, and 500 others."""
    images, labels = digits()
    order = np.random.default_rng(seed).permutation(len(images))[:1780]
    pictures = (np.kron(images, np.ones((1, 3, 6, 6))) * 2 - 1).astype(np.float32)[order]
    labels = labels[order]
    return (pictures[:1280], labels[:1280]), (pictures[1280:], labels[1280:])


def modules(seed: int) -> tuple[Data, Data]:
    """Return bytes of modules of six packages, and the packages they are from."""
    parts: dict[bool, list[tuple[np.ndarray, int]]] = {True: [], False: []}
    rng = np.random.default_rng(seed)
    for label, package in enumerate(SOURCES):
        folder = Path(sysconfig.get_paths()["purelib"]) / package
        paths = [p for p in sorted(folder.rglob("*.py")) if p.stat().st_size > BEGINNING]
        for i, number in enumerate(rng.permutation(len(paths))[: MODULES + TESTED]):
            text = np.frombuffer(paths[number].read_bytes().strip(), np.uint8).astype(np.int32)
            row = np.full(2 * BEGINNING, PADDING, np.int32)
            first, last = text[:BEGINNING], text[-BEGINNING:]
            row[: len(first)], row[len(row) - len(last) :] = first, last
            parts[i < MODULES].append((row, label))
    train, test = (
        (np.array([row for row, _ in part]), np.array([label for _, label in part]))
        for part in (parts[True], parts[False])
    )
    return train, test


@dataclass(frozen=True, slots=True)
class Row:
    """A file of a package, and what is trained."""

    package: str
    file: str
    data: Callable[[int], tuple[Data, Data]]
    seed: int = 0
    trained: tuple[str, ...] | None = None
    rate: float = 1e-3
    side: int | None = None  # of pictures, where the file leaves it open


LINES = ("rapidocr-onnxruntime", "ch_ppocr_mobile_v2.0_cls_infer.onnx", handwritten)
BYTES = ("magika", "model.onnx", modules)
ROWS: Mapping[str, Row] = {
    "mobilenet": Row(*LINES, side=48),
    "mobilenet-1": Row(*LINES, seed=1, side=48),
    "magika-head": Row(*BYTES, trained=("head.*",), rate=3e-3),
    "magika": Row(*BYTES),
}


def changed(row: Row) -> onnx.ModelProto:
    """Return the file with a head for the classes of the row's data."""
    found = metadata.files(row.package) or []
    path = Path(str(next(part.locate() for part in found if part.name == row.file)))
    classes = int(row.data(row.seed)[0][1].max()) + 1
    model = ke.replace_head(onnx.load(path), classes=classes, seed=0)
    for size in model.graph.input[0].type.tensor_type.shape.dim[2:] if row.side else ():
        size.dim_value = row.side
    return model


# -- one side --------------------------------------------------------------------------------------


def batches(row: Row, count: int, epochs: int) -> list[np.ndarray]:
    """Return the numbers of the examples of each step."""
    rng = np.random.default_rng(row.seed)
    orders = (rng.permutation(count)[: count // BATCH * BATCH] for _ in range(epochs))
    return [part for order in orders for part in order.reshape(-1, BATCH)]


def ours(row: Row, path: Path) -> tuple[Callable[[Data], float], Callable[[Data], float]]:
    """Return a step of AdamW and a measurement of the accuracy, here."""
    engine = ke.Engine.from_onnx(path, loss="categorical", trainable=row.trained)
    optimizer = ke.AdamW(engine, learning_rate=row.rate, weight_decay=0)
    return (
        lambda batch: float(optimizer.step(*batch).loss),
        lambda data: float(engine.evaluate(data)["accuracy"]),
    )


def peer(row: Row, path: Path) -> tuple[Callable[[Data], float], Callable[[Data], float]]:
    """Return a step of AdamW and a measurement of the accuracy, in PyTorch."""
    file = File(onnx.load(path), set(json.loads(path.with_suffix(".json").read_text())))
    optimizer = torch.optim.AdamW(file.trained, row.rate, weight_decay=0)

    def step(batch: Data) -> float:
        optimizer.zero_grad()
        loss = functional.cross_entropy(file(batch[0]), torch.from_numpy(batch[1]).long())
        loss.backward()
        optimizer.step()
        return loss.item()

    def accuracy(data: Data) -> float:
        with torch.no_grad():
            parts = [file(data[0][i : i + 100]).numpy() for i in range(0, len(data[0]), 100)]
        return float((np.concatenate(parts).argmax(axis=1) == data[1]).mean())

    return step, accuracy


SIDES = {"ours": ours, "torch": peer}


def side(name: str, row: Row, path: Path, epochs: int) -> dict[str, Any]:
    """Train with one of the sides; return losses, the accuracy, CPU seconds and MiB."""
    torch.set_num_threads(1)
    (inputs, targets), test = row.data(row.seed)
    before = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    step, accuracy = SIDES[name](row, path)
    steps, start = batches(row, len(inputs), epochs), time.process_time()
    losses = [step((inputs[numbers], targets[numbers])) for numbers in steps]
    seconds = time.process_time() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before
    found = {"seconds": seconds, "peak": peak / MEBI, "losses": losses}
    return {**found, "accuracy": accuracy(test)}


# -- a file in PyTorch -----------------------------------------------------------------------------


class File:
    """The logits of a file, node by node.

    Args:
        model: Of operators in ``OPERATORS``.
        names: Of the weights that are trained.
    """

    def __init__(self, model: onnx.ModelProto, names: set[str]) -> None:
        graph = model.graph
        self._input = graph.input[0].name
        self._stored = {t.name: torch.tensor(numpy_helper.to_array(t)) for t in graph.initializer}
        heads = [i for i, n in enumerate(graph.node) if any(v.startswith("head.") for v in n.input)]
        self._nodes = []
        for node in graph.node[: heads[-1] + 1]:
            given = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
            if node.op_type == "Constant":
                self._stored[node.output[0]] = torch.tensor(numpy_helper.to_array(given["value"]))
            else:
                function = OPERATORS[node.op_type]
                self._nodes.append((function, given, list(node.input), node.output[0]))
        self.trained = [self._stored[name].requires_grad_() for name in sorted(names)]

    def __call__(self, inputs: np.ndarray) -> torch.Tensor:
        values = {**self._stored, self._input: torch.from_numpy(inputs)}
        for function, given, operands, result in self._nodes:
            values[result] = function(given, *(values[name] if name else None for name in operands))
        return values[result]


def _axes(given: Mapping[str, Any], rest: tuple[torch.Tensor, ...]) -> tuple[int, ...]:
    return tuple(rest[0].tolist() if rest else given["axes"])


def _sliced(_: object, x: Any, *limits: torch.Tensor) -> torch.Tensor:
    starts, ends, axes, *steps = (limit.tolist() for limit in limits)
    index = [slice(None)] * x.ndim
    for i, axis in enumerate(axes):
        index[axis] = slice(starts[i], ends[i], steps[0][i] if steps else None)
    return x[tuple(index)]


def _squeezed(given: Mapping[str, Any], x: Any, *rest: torch.Tensor) -> torch.Tensor:
    return x.squeeze(_axes(given, rest))


def _unsqueezed(given: Mapping[str, Any], x: Any, *rest: torch.Tensor) -> torch.Tensor:
    for axis in sorted(_axes(given, rest)):
        x = x.unsqueeze(axis)
    return x


def _convolved(given: Mapping[str, Any], x: Any, w: Any, bias: Any = None) -> torch.Tensor:
    sides = len(given["kernel_shape"])
    pads = given.get("pads", [0] * 2 * sides)
    assert pads[:sides] == pads[sides:]
    return functional.conv2d(
        x, w, bias, given["strides"], pads[:sides], given["dilations"], given["group"]
    )


def _normalized(given: Mapping[str, Any], x: Any, *rest: Any) -> torch.Tensor:
    scale, bias, mean, variance = rest
    return functional.batch_norm(x, mean, variance, scale, bias, eps=given.get("epsilon", 1e-5))


def _pooled(given: Mapping[str, Any], x: Any) -> torch.Tensor:
    pads = given.get("pads", [0, 0, 0, 0])
    return functional.max_pool2d(x, given["kernel_shape"], given["strides"], pads[:2])


_TYPES = {1: torch.float32, 6: torch.int32, 7: torch.int64}
# Attributes and operands of a node to its result.
OPERATORS: Mapping[str, Callable[..., Any]] = {
    "Add": lambda _, x, y: x + y,
    "BatchNormalization": _normalized,
    "Cast": lambda given, x: x.to(_TYPES[given["to"]]),
    "Clip": lambda _, x, low, high: x.clamp(low, high),
    "Concat": lambda given, *parts: torch.cat(parts, given["axis"]),
    "Conv": _convolved,
    "Div": lambda _, x, y: x / y,
    "Equal": lambda _, x, y: x == y,
    "Expand": lambda _, x, shape: x.expand(torch.broadcast_shapes(x.shape, shape.tolist())),
    "GlobalAveragePool": lambda _, x: x.mean((2, 3), keepdim=True),
    "GlobalMaxPool": lambda _, x: x.amax(tuple(range(2, x.ndim)), keepdim=True),
    "HardSigmoid": lambda given, x: (given["alpha"] * x + given["beta"]).clamp(0, 1),
    "Identity": lambda _, x: x,
    "MatMul": lambda _, x, y: x @ y,
    "Max": lambda _, x, y: torch.maximum(x, y),
    "MaxPool": _pooled,
    "Mul": lambda _, x, y: x * y,
    "Reciprocal": lambda _, x: x.reciprocal(),
    "ReduceSum": lambda given, x, *rest: x.sum(_axes(given, rest), bool(given["keepdims"])),
    "Relu": lambda _, x: x.relu(),
    "Reshape": lambda _, x, shape: x.reshape(
        [x.shape[i] if size == 0 else size for i, size in enumerate(shape.tolist())]
    ),
    "Shape": lambda _, x: torch.tensor(x.shape),
    "Slice": _sliced,
    "Sqrt": lambda _, x: x.sqrt(),
    "Squeeze": _squeezed,
    "Sub": lambda _, x, y: x - y,
    "Tanh": lambda _, x: x.tanh(),
    "Transpose": lambda given, x: x.permute(given["perm"]),
    "Unsqueeze": _unsqueezed,
}


# -- command ---------------------------------------------------------------------------------------


def compared(name: str, epochs: int) -> None:
    """Train a row on both sides, and print what they found."""
    row, found = ROWS[name], {}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "changed.onnx"
        onnx.save(changed(row), path)
        engine = ke.Engine.from_onnx(path, loss="categorical", trainable=row.trained)
        path.with_suffix(".json").write_text(json.dumps(list(engine.parameters)))
        for each in SIDES:
            command = [sys.executable, "-m", __spec__.name, name, "--epochs", str(epochs)]
            done = subprocess.run(
                [*command, "--side", each, "--file", path], check=True, capture_output=True
            )
            found[each] = json.loads(done.stdout)
    here, there = found["ours"], found["torch"]
    first = max(abs(a / b - 1) for a, b in zip(here["losses"][:5], there["losses"], strict=False))
    time_ratio, peak_ratio = (here[each] / there[each] for each in ("seconds", "peak"))
    print(
        f"{name}, {epochs} epochs: accuracy {here['accuracy']:.3f}, {there['accuracy']:.3f}; "
        f"last loss {here['losses'][-1]:.4f}, {there['losses'][-1]:.4f}; first losses differ by "
        f"{first:.1e}; {here['seconds']:.1f} s, ratio {time_ratio:.2f}; "
        f"{here['peak']:.0f} MiB, ratio {peak_ratio:.2f}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("rows", nargs="*", metavar="ROW", help=", ".join(ROWS))
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--file", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    for name in given.rows or ROWS:
        if given.side:
            print(json.dumps(side(given.side, ROWS[name], given.file, given.epochs)))
        else:
            compared(name, given.epochs)


if __name__ == "__main__":
    main()
