"""Random cases: a model, losses on its outputs, and a batch whose examples can be taken apart."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

import kfac_engine as ke
from tests.identities.losses import LOSSES, Head, options_of
from tests.identities.networks import (
    Draft,
    Value,
    finished,
    gathered,
    grow,
    patches,
    pooled,
    product,
    start,
)
from tests.models import VOCABULARY, Net
from tests.oracle import along, derivative

Array = NDArray[Any]

# Of the curvature: it moves with the scale of the loss, as the curvature does.
DAMPING = ke.RelativeDamping(0.1)
OPTIMIZERS: Mapping[str, tuple[type, dict[str, Any]]] = {
    "kfac": (ke.KfacOptimizer, {}),
    "kfac, no counts": (ke.KfacOptimizer, {"weight_decay": 0.0, "damping": 0.1}),
    "kfac, rate": (ke.KfacOptimizer, {"learning_rate": 0.05, "damping": ke.RelativeDamping(0.2)}),
    "adamw": (ke.AdamW, {"learning_rate": 0.01}),
    "muon": (ke.Muon, {"learning_rate": 0.01}),
    "sgd": (ke.SGD, {"learning_rate": 0.05}),
}


@dataclass(frozen=True)
class Batch:
    """Examples with their targets, and weights of the targets by output, where there are any."""

    inputs: Mapping[str, Array]
    targets: Mapping[str, Array]
    weights: Mapping[str, Array] = field(default_factory=dict)


@dataclass(frozen=True)
class Case:
    """A model in training."""

    seed: int  # it repeats the case
    model: onnx.ModelProto
    axes: Mapping[str, int]  # axis of the examples of each input
    heads: tuple[Head, ...]  # losses
    batch: Batch  # examples
    engine_options: Mapping[str, Any]  # of the engine
    optimizer: str  # a row of ``OPTIMIZERS``
    mode: str  # estimation mode of the curvature
    # Of the examples of a padded batch; the last two tokens of all of them are padding.
    lengths: tuple[int, ...] = ()
    fixed_length: bool = False  # whether the graph needs the number of tokens of the sample inputs
    pieces: tuple[str, ...] = ()  # what the model consists of

    @property
    def double(self) -> bool:
        return any(t.data_type == onnx.TensorProto.DOUBLE for t in self.model.graph.initializer)

    @property
    def size(self) -> int:
        """Number of examples."""
        name, axis = next(iter(self.axes.items()))
        return self.batch.inputs[name].shape[axis]

    def description(self) -> str:
        """What the case consists of, in a line."""
        shown = {k: v for k, v in self.engine_options.items() if k != "sample_inputs"}
        shapes = {name: x.shape for name, x in self.batch.inputs.items()}
        weighted = {name: str(w.dtype) for name, w in self.batch.weights.items()}
        return (
            f"{', '.join(self.pieces)}; inputs {shapes}; {self.heads}; weights {weighted}; "
            f"{shown}; {self.optimizer}; {self.mode}; lengths {self.lengths}"
        )

    # -- batches --

    def taken(self, rows: Any) -> Batch:
        """Some of the examples, in an order."""
        batch = self.batch
        heads = {head.output: head for head in self.heads}
        return Batch(
            {n: np.take(x, rows, self.axes[n]) for n, x in batch.inputs.items()},
            {n: np.take(t, rows, heads[n].axis) for n, t in batch.targets.items()},
            {
                n: np.take(w, rows, 0 if heads[n].form == "examples" else heads[n].axis)
                for n, w in batch.weights.items()
            },
        )

    def weighted(self, factors: Array) -> Batch:
        """The batch with the weights of its examples multiplied.

        The weights of examples that share an axis with positions are Booleans.
        """
        weights = {}
        for head in self.heads:
            old = self.batch.weights.get(head.output, np.ones(head.weight_shape(self.size)))
            axis = 0 if head.form == "examples" else head.axis
            shape = [1] * old.ndim
            shape[axis] = -1
            new = old * factors.reshape(shape)
            weights[head.output] = new > 0 if head.flat else new
        return replace(self.batch, weights=weights)

    def has_files(self) -> bool:
        """Whether weights and targets of classes have one form, as the inputs of a file have."""
        forms = {head.form for head in self.heads}
        of_classes = {h.probabilities for h in self.heads if h.loss == "categorical"}
        return len(of_classes) < 2 and (len(forms) == 1 or not self.batch.weights)

    def shortened(self, length: int) -> Batch:
        """The batch without the last tokens."""

        def cut(array: Array, axis: int) -> Array:
            return np.take(array, np.arange(length), axis)

        heads = {head.output: head for head in self.heads}
        return Batch(
            {n: cut(x, 1 - self.axes[n]) for n, x in self.batch.inputs.items()},
            {n: cut(t, 1 - heads[n].axis) for n, t in self.batch.targets.items()},
            {
                n: w if heads[n].form == "examples" else cut(w, 1 - heads[n].axis)
                for n, w in self.batch.weights.items()
            },
        )

    def fed(self, batch: Batch) -> tuple[dict[str, Array], Any]:
        """Inputs and targets as arguments."""
        targets: dict[str, Any] = {}
        for head in self.heads:
            t, w = batch.targets[head.output], batch.weights.get(head.output)
            if head.flat:
                t = t.reshape(-1, *t.shape[2:])
                w = None if w is None else w.reshape(-1, *w.shape[2:])
            targets[head.output] = t if w is None else ke.Weighted(t, w)
        single = len(targets) == 1
        return dict(batch.inputs), next(iter(targets.values())) if single else targets

    # -- the definition --

    def loss(self, batch: Batch, outputs: Sequence[Array]) -> float:
        """The reduced loss of a batch, from the predictions of each head."""
        total = 0.0
        for head, z in zip(self.heads, outputs, strict=True):
            t = batch.targets[head.output]
            if head.flat:
                z = z.reshape(*t.shape[:2], -1)
            value, weight = head.total(z, t, batch.weights.get(head.output))
            n = t.shape[head.axis]
            reduction = self.engine_options["reduction"]
            total += head.weight * value / {"mean": weight, "batch_mean": n, "sum": 1.0}[reduction]
        return total

    def slope(self, direction: Mapping[str, Array]) -> tuple[float, float]:
        """The loss, and its derivative along a direction."""
        names = [head.predicted for head in self.heads]
        outputs = along(self.model, self.batch.inputs, names, direction)

        def loss(step: Array) -> Array:
            return np.array(self.loss(self.batch, outputs(step[0])))

        return float(loss(np.zeros(1))), float(derivative(loss, np.zeros(1), (0,)))

    # -- what is tested --

    def loss_argument(self) -> Any:
        """The losses as an argument."""
        if len(self.heads) == 1:
            return self.heads[0].kind()
        return {head.output: head.kind() for head in self.heads}

    def engine(self, **options: Any) -> ke.Engine:
        given = {
            "loss": self.loss_argument(), "threads": 1, "backend": "numpy", "damping": DAMPING,
            "estimation_mode": self.mode, "schedule": ke.Schedule(refresh_every=1),
        }  # fmt: skip
        return ke.Engine.from_onnx(self.model, **{**given, **self.engine_options, **options})

    def optimizer_options(self) -> dict[str, Any]:
        kind, options = OPTIMIZERS[self.optimizer]
        return {**options, **({"statistics_part": 1.0} if kind is ke.KfacOptimizer else {})}

    def steps(self, engine: ke.Engine) -> Any:
        """The optimizer."""
        return OPTIMIZERS[self.optimizer][0](engine, **self.optimizer_options())


# The definition of "ctc" follows all sequences, whose number grows exponentially with the frames.
MOST_FRAMES = 5
FAMILIES = ("rows", "rows", "rows", "tokens", "tokens", "ids", "ids", "pixels", "pixels")


def case(seed: int, single: bool = False) -> Case:
    """The case of a seed; in single precision, or where ONNX Runtime has the kernels in double."""
    rng = np.random.default_rng([seed, 40])
    family = str(rng.choice(FAMILIES))
    sequence = family in ("tokens", "ids")
    padded = sequence and bool(rng.random() < 0.4)
    time_first = sequence and bool(rng.random() < 0.25)
    single = single or family == "pixels" or (sequence and bool(rng.random() < 0.25))
    net = Net("float32" if single else "float64", int(rng.integers(1 << 30)))
    d = Draft(rng, net, time_first, padded)
    x = grow(d, start(d, family), int(rng.integers(1, 5)))
    heads, outputs = _heads(d, x)
    # Numbers of their own leave the cases of other seeds as they are.
    if (
        not d.padded
        and _may_be_frames(heads[0])
        and np.random.default_rng([seed, 42]).random() < 0.6
    ):
        head = replace(heads[0], loss="ctc", form="examples", options={}, probabilities=False)
        heads = (head,)
    model = finished(d, outputs)
    axes = {name: sides.index("batch") for name, sides in d.inputs.items()}
    n = int(rng.integers(4, 8))
    # Alone in its attention, a token has queries and keys without a gradient but rounding.
    lengths = tuple(int(k) for k in rng.integers(2, d.length - 1, n)) if padded else ()
    batch = _batch(d, heads, n, lengths)
    heads, batch = _left_out(rng, heads, batch, n, lengths)
    reduction = str(rng.choice(["mean", "mean", "mean", "batch_mean", "sum"]))
    options: dict[str, Any] = {"reduction": reduction}
    if len(heads) > 1 and rng.random() < 0.5:
        heads = [replace(head, weight=k) for head, k in zip(heads, (0.5, 2.0), strict=True)]
    if heads[0].class_axis == 1 and (heads[0].loss != "categorical" or rng.random() < 0.5):
        options["class_axis"] = 1
    if rng.random() < 0.3:
        names = [t.name for t in model.graph.initializer if t.name[0] == "w"]
        options["freeze"] = [str(name) for name in rng.choice(names, len(names) // 2, False)]
    if d.fixed_length:
        options["sample_inputs"] = dict(batch.inputs)
    # The exact Fisher matrix needs the examples alone on the first axis.
    without = any(head.flat or head.axis or head.loss == "ctc" for head in heads)
    exact = [] if without else ["exact", "exact"]
    mode = str(rng.choice([*exact, "empirical", "gradients"]))
    return Case(
        seed, model, axes, heads, batch, options, str(rng.choice([*OPTIMIZERS])), mode, lengths,
        d.fixed_length, tuple(d.pieces),
    )  # fmt: skip


def _may_be_frames(head: Head) -> bool:
    """Whether the positions of an output may be the frames of sequences of labels."""
    plain = head.class_axis == -1 and not (head.axis or head.flat)
    few = len(head.sides) == 2 and head.sides[0] <= MOST_FRAMES
    return plain and few and head.loss != "multi_bernoulli"  # of a Sigmoid


def _heads(d: Draft, x: Value) -> tuple[tuple[Head, ...], dict[str, list[int | str]]]:
    """Losses on one output or on two, and the shapes of the outputs."""
    if x.kind == "pixels" and d.chance(0.75):
        x = gathered(d, x) if d.chance(0.8) else patches(d, x)
    if x.kind == "tokens" and not d.padded and d.chance(0.5):
        x = pooled(d, x)
    if x.kind == "pixels":
        k = int(d.rng.integers(2, 4))
        weight = d.weight(k, x.sides[0], *[1] * (len(x.sides) - 1))
        d.net.op("Conv", x.name, weight, d.weight(k, name="b"), to="output")
        return (_head(d, "output", "output", (k, *x.sides[1:]), 1),), {
            "output": ["batch", k, *x.sides[1:]]
        }
    names = ["output"] if x.kind == "tokens" or d.chance(0.8) else ["first", "second"]
    pairs = [_output(d, x, name) for name in names]
    return tuple(head for head, _ in pairs), {head.output: sides for head, sides in pairs}


def _output(d: Draft, x: Value, name: str) -> tuple[Head, list[int | str]]:
    y = product(d, x, int(d.rng.integers(2, 4)))
    axis = int(x.kind == "tokens" and d.time_first)
    flat = x.kind == "tokens" and not (d.padded or axis) and d.chance(0.2)
    head = _head(d, name, y.name, y.sides, -1, axis, flat)
    length: int | str = "time" if d.padded else y.sides[0]
    sides = {"rows": ["batch", y.sides[-1]], "tokens": ["batch", length, y.sides[-1]]}[y.kind]
    if axis:
        sides = [sides[1], sides[0], sides[2]]
    links = {"categorical": "Softmax", "multi_bernoulli": "Sigmoid"}
    if flat:
        d.net.op("Reshape", y.name, d.whole(-1, y.sides[-1]), to=name)
        return replace(head, predicted=name), ["rows", y.sides[-1]]
    if head.loss in links and d.chance(0.15):
        d.net.op(links[head.loss], y.name, to=name)
    else:
        d.net.op("Identity", y.name, to=name)
    return head, sides


def _head(
    d: Draft, output: str, predicted: str, sides: tuple[int, ...], class_axis: int, axis: int = 0,
    flat: bool = False,
) -> Head:  # fmt: skip
    loss = str(d.choose(["categorical", "categorical", *LOSSES]))
    classes = sides[0 if class_axis == 1 else -1]
    options = options_of(loss, classes, d.rng)
    if flat:  # weights of examples on an axis with positions are Booleans
        options.pop("class_weights", None)
    probabilities = loss == "categorical" and "class_weights" not in options and d.chance(0.15)
    if probabilities:
        options = {k: v for k, v in options.items() if k != "ignore_index"}
    forms = ["predictions"]
    forms += [] if axis or flat else ["examples"]
    forms += [] if loss == "categorical" else ["targets"]
    return Head(
        output, predicted, loss, sides, class_axis, axis, flat, str(d.choose(forms)), options,
        probabilities,
    )  # fmt: skip


def _batch(d: Draft, heads: Sequence[Head], n: int, lengths: Sequence[int]) -> Batch:
    inputs, dtype = {}, d.net.dtype
    for name, form in d.inputs.items():
        shape = [{"batch": n, "time": d.length}.get(str(side), side) for side in form]
        if name == "seen":
            inputs[name] = np.arange(d.length) < np.array(lengths)[:, None]
            inputs[name] = inputs[name].astype(np.int64 if d.of_ids else dtype)
        elif d.of_ids:
            inputs[name] = d.rng.integers(0, VOCABULARY, shape)
        else:
            inputs[name] = d.rng.standard_normal(shape).astype(dtype)
    targets = {h.output: h.draw(d.rng, n) for h in heads}
    return Batch(
        inputs, {k: t.astype(dtype) if t.dtype.kind == "f" else t for k, t in targets.items()}
    )


# -- what does not count ---------------------------------------------------------------------------


def _left_out(
    rng: np.random.Generator, heads: Sequence[Head], batch: Batch, n: int, lengths: Sequence[int]
) -> tuple[tuple[Head, ...], Batch]:
    """Weights, targets that are ignored, and padding, which counts in neither way."""
    targets, weights, found = {}, {}, []
    for head in heads:
        t, padding = batch.targets[head.output], _padding(head, n, lengths)
        if head.ignored is not None and rng.random() < (0.6 if lengths else 0.4):
            t = _ignored(rng, head, t, padding, lengths)
            padding = np.zeros_like(padding)
        if padding.any() and head.form == "examples":
            head = replace(head, form="predictions")
        if padding.any() or rng.random() < 0.4:
            w = _weights(rng, head.weight_shape(n))
            w = w > 0 if head.flat else w
            if padding.any():
                entries = padding if w.ndim == padding.ndim else _over_classes(head, padding)
                w = np.where(entries, w.dtype.type(0), w)
                t = np.where(_over_classes(head, padding), head.junk(rng), t)
            weights[head.output] = w
        targets[head.output] = t.astype(batch.targets[head.output].dtype)
        found.append(head)
    return tuple(found), Batch(batch.inputs, targets, weights)


def _padding(head: Head, n: int, lengths: Sequence[int]) -> Array:
    """Whether a prediction is behind the end of its example."""
    shape = head.prediction_shape(n)
    if not lengths:
        return np.zeros(shape, bool)
    padding = np.arange(shape[1 - head.axis]) >= np.array(lengths)[:, None]
    return padding.T if head.axis else padding


def _ignored(
    rng: np.random.Generator, head: Head, t: Array, padding: Array, lengths: Sequence[int]
) -> Array:
    """Targets of which padding and some others are ignored, but the first of some examples."""
    hidden = (rng.random(t.shape) < 0.2) | _over_classes(head, padding)
    rows = [slice(None)] * t.ndim
    rows[head.axis] = slice(None, None, 2)
    if lengths:
        rows[1 - head.axis] = slice(0, 1)
    hidden[tuple(rows)] = False
    return np.where(hidden, t.dtype.type(head.ignored), t)


def _over_classes(head: Head, predictions: Array) -> Array:
    """An array of predictions that broadcasts to targets."""
    if not head.entrywise:
        return predictions
    return np.expand_dims(predictions, 1 if head.class_axis == 1 else predictions.ndim)


def _weights(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    """Numbers, whole numbers or Booleans, of which the first counts."""
    kinds = (
        rng.random(shape) * (rng.random(shape) > 0.2),
        rng.integers(0, 3, shape),
        rng.random(shape) > 0.3,
    )
    found: Array = kinds[int(rng.integers(3))]
    found[(0,) * len(shape)] = 1
    return found
