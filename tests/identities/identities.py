"""What must be equal, whatever the case: two batches, or two ways to compute the results of one.

The results of a batch are its loss and gradient, products with its curvature, and the parameters
after two steps of an optimizer.
"""

import copy
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

import kfac_engine as ke
from tests.distributed.threads import run
from tests.identities import cases
from tests.identities.cases import DAMPING, Array, Batch, Case

# Groups of results: arrays by name.
Results = Mapping[str, Mapping[str, Array]]
STEPS = 2
EVERY = ("curvature", "steps")
# A bound of a difference is so many roundings of the largest entry of a group. Where they do not
# suffice, it is raised by so many times the largest difference that changes of all parameters by a
# rounding make: the first step of Adam divides a gradient by its size, however small it is.
ROUNDINGS, MORE, CHANGES = 1000, 100, 3
# Groups of results that divide those of others by their size.
DIVIDED = {"steps": "gradient", "inverse": "curvature"}
# Of a difference of two losses, divided by steps of a thousandth.
BY_DIFFERENCES = 4e6
# Length of the steps along a direction, in which the network hardly bends.
SHORT = 2.0**-5


class Subject:
    """An engine of a case, which begins anew for each batch."""

    def __init__(self, case: Case, folder: Path, **options: Any) -> None:
        self.case = case
        self.engine = case.engine(**options)
        self._file = folder / f"{id(self)}.safetensors"
        communicator = options.get("communicator")
        if communicator is None:
            self.engine.save(self._file)
        self._fresh = True
        self._first = {name: array.copy() for name, array in self.engine.parameters.items()}
        rng = np.random.default_rng([case.seed, 1])
        self.vectors = {
            name: rng.standard_normal(a.shape).astype(a.dtype) for name, a in self._first.items()
        }

    def results(
        self,
        *parts: Batch,
        groups: Sequence[str],
        shaken: int = 0,
        before_step: Callable[[], None] = lambda: None,
    ) -> Results:
        """Of a batch in parts; with a number, all parameters are changed by roundings."""
        start = self._shaken(shaken) if shaken else self._first
        self._begin(start)
        engine, fed = self.engine, [self.case.fed(part) for part in parts]
        given: Any = fed[0] if len(fed) == 1 else (fed,)
        gradient = engine.gradients(*given)
        found: dict[str, dict[str, Array]] = {
            "gradient": {"loss": np.array(gradient.loss), **gradient.gradients}
        }
        if "curvature" in groups:
            self._fresh = False
            engine.observe(*given)
            found["curvature"] = engine.precondition(self.vectors, 1)
            found["inverse"] = engine.precondition(self.vectors)
        if "steps" in groups:
            self._begin(start)
            self._fresh = False
            optimizer = self.case.steps(engine)
            for _ in range(STEPS):
                before_step()
                optimizer.step(*given)
            found["steps"] = {n: a - start[n] for n, a in engine.parameters.items()}
        return found

    def _begin(self, start: Mapping[str, Array]) -> None:
        if not self._fresh:
            self.engine.damping = DAMPING
            self.engine.load(self._file)
        self._fresh = True
        self.engine.set_parameters(start)

    def _shaken(self, seed: int) -> dict[str, Array]:
        rng = np.random.default_rng([self.case.seed, 3, seed])
        return {
            name: a * (1 + np.finfo(a.dtype).eps * rng.choice([-1, 1], a.shape)).astype(a.dtype)
            for name, a in self._first.items()
        }


class Computed:
    """Results, and those after changes of all parameters by a rounding.

    ``compute`` takes the number of a change, or 0 for none.
    """

    def __init__(self, compute: Callable[[int], Results]) -> None:
        self._compute, self.results = compute, compute(0)

    @cached_property
    def changed(self) -> list[Results]:
        return [self._compute(number) for number in range(1, CHANGES + 1)]

    def is_rounding(self, group: str, name: str) -> bool:
        """Whether results divide roundings by their size: Adam gradients, inverses curvature."""
        read = self.results[DIVIDED.get(group, group)]
        size = max(float(abs(a).max()) for n, a in read.items() if n != "loss")
        least = ROUNDINGS * np.finfo(read[name].dtype).eps * size
        return group in DIVIDED and float(abs(read[name]).max()) <= least

    def change(self, group: str, name: str) -> float:
        """The largest change of an entry."""
        array = self.results[group][name]
        return max(float(abs(other[group][name] - array).max()) for other in self.changed)


@dataclass(frozen=True)
class Pair:
    """Results that must be equal."""

    found: Results
    expected: Computed
    roundings: float = ROUNDINGS

    def differences(self) -> dict[tuple[str, str], float]:
        """By group and name, the largest difference of an entry in units of its bound."""
        worst = {}
        for group, found in self.found.items():
            expected = self.expected.results[group]
            assert found.keys() == expected.keys(), f"{group} of {[*found]} and of {[*expected]}"
            size = max(float(abs(a).max()) for a in expected.values())
            for name, array in expected.items():
                if self.expected.is_rounding(group, name):
                    continue
                assert found[name].shape == array.shape, name
                gap = float(abs(found[name] - array).max())
                bound = self.roundings * np.finfo(array.dtype).eps * size
                if not gap <= bound:
                    bound += MORE * self.expected.change(group, name)
                worst[group, name] = gap / bound if bound else 0.0 if gap == 0 else np.inf
        return worst


@dataclass
class Trial:
    """A case with its results, each computed once."""

    case: Case
    folder: Path
    rng: np.random.Generator = field(init=False)

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng([self.case.seed, 2])

    @cached_property
    def subject(self) -> Subject:
        return Subject(self.case, self.folder)

    @cached_property
    def whole(self) -> Computed:
        return self.computed(self.case.batch, EVERY)

    def computed(self, batch: Batch, groups: Sequence[str]) -> Computed:
        return Computed(lambda number: self.subject.results(batch, groups=groups, shaken=number))

    @property
    def repeatable(self) -> tuple[str, ...]:
        """Results that depend on no random number of an example."""
        if self.case.mode != "gradients":
            return EVERY
        return () if self.case.optimizer.startswith("kfac") else ("steps",)

    @property
    def countless(self) -> tuple[str, ...]:
        """Those that do not depend on the number of different examples, either."""
        without = ("steps",) if self.case.optimizer == "kfac" else ()
        return tuple(group for group in self.repeatable if group not in without)


# -- identities ------------------------------------------------------------------------------------


def differences(trial: Trial) -> Iterator[Pair]:
    """The loss and its slope along a random direction are those of the definition in float64."""
    case, gradients = trial.case, trial.whole.results["gradient"]
    kind = np.float64 if case.double else np.float32  # a bound follows from the type
    direction = {n: SHORT * v for n, v in trial.subject.vectors.items()}
    loss, slope = case.slope(direction)
    found = sum(float((gradients[n] * v).sum(dtype=np.float64)) for n, v in direction.items())
    norms = [np.sqrt(sum(float((a**2).sum()) for a in arrays)) for arrays in (
        [gradients[n] for n in direction], direction.values())]  # fmt: skip
    size = max(float(np.prod(norms)), abs(loss))  # of the terms that are added
    ratios = {"loss": np.array([gradients["loss"], size]), "slope": np.array([found, size])}
    expected = {"loss": np.array([loss, size]), "slope": np.array([slope, size])}
    defined = {name: {"": array.astype(kind)} for name, array in expected.items()}
    yield Pair(
        {name: {"": array.astype(kind)} for name, array in ratios.items()},
        Computed(lambda number: defined),
        BY_DIFFERENCES if case.double else ROUNDINGS,
    )


def parts(trial: Trial) -> Iterator[Pair]:
    """Parts of a batch are the batch."""
    case, n = trial.case, trial.case.size
    cuts = sorted(trial.rng.choice(np.arange(1, n), int(trial.rng.integers(1, 3)), False))
    pieces = [case.taken(rows) for rows in np.split(np.arange(n), cuts)]
    yield Pair(trial.subject.results(*pieces, groups=EVERY), trial.whole)


def copies(trial: Trial) -> Iterator[Pair]:
    """Weight two is two copies."""
    case, n = trial.case, trial.case.size
    if case.engine_options["reduction"] == "batch_mean" or any(h.flat for h in case.heads):
        return  # n counts examples; weights of examples on an axis with positions are Booleans
    chosen = trial.rng.random(n) < 0.4
    twice = case.taken(np.repeat(np.arange(n), 1 + chosen))
    weighted = trial.subject.results(case.weighted(1.0 + chosen), groups=trial.countless)
    yield Pair(weighted, trial.computed(twice, trial.countless))


def absent(trial: Trial) -> Iterator[Pair]:
    """Weight zero is absent, whatever the target."""
    case, n = trial.case, trial.case.size
    if case.engine_options["reduction"] == "batch_mean":
        return
    kept = trial.rng.random(n) < 0.7
    kept[0] = True
    batch, targets = case.weighted(kept * 1.0), {}
    for head in case.heads:
        t = batch.targets[head.output].copy()
        rows = [slice(None)] * t.ndim
        rows[head.axis] = ~kept
        t[tuple(rows)] = head.junk(trial.rng)
        targets[head.output] = t
    found = trial.subject.results(replace(batch, targets=targets), groups=trial.countless)
    rest = case.taken(np.flatnonzero(kept))
    yield Pair(found, trial.computed(rest, trial.countless))


def permuted(trial: Trial) -> Iterator[Pair]:
    """The order of the examples does not matter."""
    batch = trial.case.taken(trial.rng.permutation(trial.case.size))
    yield Pair(trial.subject.results(batch, groups=trial.repeatable), trial.whole)


def padded(trial: Trial) -> Iterator[Pair]:
    """Padding changes nothing."""
    case = trial.case
    if not case.lengths:
        return
    # Of an example with padding, the averages leave out all tokens without a gradient, such as one
    # that is alone in its attention; of others, none. So all examples keep padding there.
    for length, groups in ((max(case.lengths), ()), (max(case.lengths) + 1, trial.countless)):
        short, subject = case.shortened(length), trial.subject
        if case.fixed_length:
            if length == 1:
                continue  # sequences of one step need an axis of size one in the file
            options = {**case.engine_options, "sample_inputs": dict(short.inputs)}
            subject = Subject(replace(case, engine_options=options), trial.folder)
        yield Pair(subject.results(short, groups=groups), trial.whole)


def threads(trial: Trial) -> Iterator[Pair]:
    """Two threads compute what one computes."""
    subject = Subject(trial.case, trial.folder, threads=2)
    yield Pair(subject.results(trial.case.batch, groups=EVERY), trial.whole)


def ranks(trial: Trial) -> Iterator[Pair]:
    """Two processes compute what one computes; of even seeds."""
    if trial.case.seed % 2:
        return
    case, n = trial.case, trial.case.size
    cut = int(trial.rng.integers(1, n))

    def work(communicator: Any) -> Results:
        rows = np.split(np.arange(n), [cut])[communicator.rank]
        subject = Subject(
            case, trial.folder / f"rank{communicator.rank}", communicator=communicator,
            distribution=distribution,
        )  # fmt: skip
        return subject.results(case.taken(rows), groups=groups)

    distribution = str(trial.rng.choice(["replicate", "shard"]))
    groups = (str(trial.rng.choice(EVERY)),)  # an engine of ranks does not begin anew
    for found in run(2, work):
        yield Pair(found, trial.whole)


def file(trial: Trial) -> Iterator[Pair]:
    """The steps of a training file are those of the optimizer."""
    case = of_files(trial.case)
    if not case.has_files():
        return
    subject = Subject(case, trial.folder, gradient_dtype="float32")
    batch, draws = case.batch, []

    def draw() -> None:
        """The numbers that the engine is about to draw for the targets of its statistics."""
        rng, found = copy.deepcopy(subject.engine.estimator.rng), {}
        for index, head in enumerate(case.heads):
            numbers = rng.standard_normal if head.loss == "normal" else rng.random
            found[f"noise {index}" if index else "noise"] = numbers(head.sampled_shape(case.size))
        draws.append({name: found[name] for name in files.description.noise})

    files = written(case, trial.folder / "files")

    def compute(number: int) -> Results:
        known = {"before_step": draw} if number == 0 else {}
        return subject.results(batch, groups=("steps",), shaken=number, **known)

    expected = Computed(compute)
    inputs, targets = case.fed(batch)
    state = first = files.initial()
    for given in draws:
        found = files.step(state, {**inputs, **given}, targets)
        assert bool(found["finite"])
        state = {n: found[f"new {n}"] if found[f"new {n}"].size else a for n, a in state.items()}
    start, end = files.read(first), files.read(state)
    yield Pair({"steps": {name: end[name] - array for name, array in start.items()}}, expected)


def of_files(case: Case) -> Case:
    """A case in single precision, with an optimizer that a training file may have."""
    case = cases.case(case.seed, single=True)
    optimizer = case.optimizer
    if optimizer.startswith("kfac"):
        sampled = all(h.loss in ("categorical", "normal", "multi_bernoulli") for h in case.heads)
        optimizer = "kfac, no counts" if sampled else "adamw"
    return replace(case, optimizer=optimizer, mode="gradients")


def written(case: Case, folder: Path) -> ke.TrainingFiles:
    """The training files of a case, which read the random numbers of the statistics."""
    form, name = case.heads[0].form, case.optimizer.split(",")[0]
    masked = all(w.dtype.kind == "b" for w in case.batch.weights.values())
    weights = {} if not case.batch.weights else {"mask" if masked else "weights": form}
    return ke.export_training(
        case.model, case.loss_argument(), name, path=folder, noise="input",
        probabilities=any(head.probabilities for head in case.heads), **weights,
        **{"sample_inputs": dict(case.batch.inputs), **case.engine_options},
        **case.optimizer_options(),
    )  # fmt: skip


IDENTITIES: Mapping[str, Callable[[Trial], Iterator[Pair]]] = {
    identity.__name__: identity
    for identity in (differences, parts, copies, absent, permuted, padded, file, threads, ranks)
}


# A random model may diverge, and normalizes in the form of inference.
EXPECTED = (ke.DivergenceWarning, ke.InferenceFormWarning)


def failures(trial: Trial) -> Iterator[str]:
    """A line for each result of a case that differs."""
    for name, identity in IDENTITIES.items():
        try:
            with warnings.catch_warnings():
                for expected in EXPECTED:
                    warnings.simplefilter("ignore", expected)
                pairs = [pair.differences() for pair in identity(trial)]
        except Exception as error:
            yield f"{name}: {type(error).__name__}: {error}"
            continue
        for pair in pairs:
            for (group, entry), ratio in pair.items():
                if not ratio <= 1:
                    yield f"{name}: {group} of {entry or 'the loss'}: {ratio:.3g} bounds away"
