"""``demo``: train a small network on real data, and show its curvature and gradients."""

import time
from functools import partial
from math import inf
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

import click

from kfac_engine.cli.command import Option, command, output
from kfac_engine.cli.display import print_table, progress, say, working
from kfac_engine.cli.inspect import print_layers
from kfac_engine.cli.precondition import norm_rows, print_norms

if TYPE_CHECKING:
    from kfac_engine._types import Array
    from kfac_engine.training.history import Record
    from kfac_engine.training.optimizer import Optimizer

    # CPU seconds of the steps so far, and the held-out loss after them, for some steps of a run.
    Curve = list[tuple[float, float]]

# Optimizers of ``fit``; the rates of Adam and SGD are tuned.
METHODS: dict[str, dict[str, object]] = {
    "K-FAC": {"optimizer": "kfac"},
    "Muon": {"optimizer": "muon"},
    "Adam": {"optimizer": "adam", "learning_rate": 0.01},
    "SGD": {"optimizer": "sgd", "learning_rate": 0.1, "momentum": 0.9},
}
TARGETS = (0.5, 0.2, 0.1)  # an early, a middle and a late loss of the held-out digits
BATCH_SIZE, HELD_OUT, EVALUATE_EVERY, MANY = 128, 360, 5, 1_000_000


@command(
    "Train a small CNN on digits with K-FAC, Muon, Adam and SGD.",
    "kfac-engine demo --seconds 0.1 --seeds 1",
    Option("Length of the run", "--seconds", type=click.FloatRange(0.01, 60), default=0.8,
        help="CPU seconds of each run."),
    Option("Length of the run", "--seeds", type=click.IntRange(1, 20), default=3,
        help="Number of seeds; the table has medians."),
    output("--out", writes="folder", default=Path("demo-output"), help="Folder of the picture."),
)  # fmt: skip
def demo(seconds: float, seeds: int, out: Path) -> None:
    import kfac_engine as ke
    from kfac_engine.data import demo_model, digits

    out.mkdir(parents=True, exist_ok=True)
    images, labels = digits()
    with working("preparing the model"):
        engine = ke.Engine.from_onnx(demo_model("cnn"), loss="categorical", threads=1)
        result = engine.step({"image": images[:BATCH_SIZE]}, labels[:BATCH_SIZE])
    click.echo(f"a CNN and {BATCH_SIZE} of 1,797 handwritten digits (8×8 pixels)\n")
    print_layers(engine)
    click.echo(f"loss of the batch: {result.loss:.4f}\n")
    print_norms(norm_rows(result.gradients, result.natural_gradients))
    curves: dict[str, list[Curve]] = {name: [] for name in METHODS}
    with progress() as bar:
        task = bar.add_task("", total=seeds * len(METHODS))
        for seed in range(seeds):  # methods take turns: another load delays all of them
            for name, options in METHODS.items():
                curves[name].append(trained(options, (images, labels), seed, seconds))
                bar.update(task, advance=1, description=name)
    heads = "method", " held-out loss", *(f" seconds to {loss:g}" for loss in TARGETS)
    title = f"{seconds:g} CPU seconds of one thread, median of {seeds} seed(s)"
    print_table(title, heads, [method_row(name, of_method) for name, of_method in curves.items()])
    _draw(curves, out / "demo.png")


def trained(
    options: dict[str, object], data: "tuple[Array, Array]", seed: int, seconds: float
) -> "Curve":
    """Train the network for some CPU seconds; held-out digits select nothing."""
    import numpy as np

    import kfac_engine as ke
    from kfac_engine.data import demo_model
    from kfac_engine.training.budget import SCHEDULES

    order, curve = np.random.default_rng(seed).permutation(len(data[1])), [(0.0, inf)]
    (x, y), (held_x, held_y) = ([a[part] for a in data] for part in np.split(order, [-HELD_OUT]))
    clock = {"spent": 0.0, "start": time.process_time()}

    def after_step(record: "Record", optimizer: "Optimizer") -> bool:
        clock["spent"] += time.process_time() - clock["start"]
        if record["step"] % EVALUATE_EVERY == 0 or clock["spent"] >= seconds:
            curve.append((clock["spent"], optimizer.engine.loss({"image": held_x}, held_y)))
        clock["start"] = time.process_time()
        return clock["spent"] >= seconds

    engine = ke.Engine.from_onnx(demo_model("cnn"), loss="categorical", threads=1, seed=seed)
    engine.gradients({"image": x[:BATCH_SIZE]}, y[:BATCH_SIZE])  # builds sessions
    clock["start"] = time.process_time()
    share = lambda _: SCHEDULES["tail"](min(1.0, clock["spent"] / seconds))  # noqa: E731
    course = {"epochs": MANY, "batch_size": BATCH_SIZE, "schedule": share, "seed": seed}
    ke.fit(engine, (x, y), callbacks=[after_step], **course, **options)  # type: ignore[arg-type]
    return curve[1:]


def method_row(name: str, curves: "list[Curve]") -> list[str]:
    """Return the medians of a method over its runs, as text."""
    reached = (
        median(min((t for t, loss in curve if loss <= target), default=inf) for curve in curves)
        for target in TARGETS
    )
    last = median(curve[-1][1] for curve in curves)
    return [name, f"{last:.4f}", *("never" if t == inf else f"{t:.2f}" for t in reached)]


def _draw(curves: "dict[str, list[Curve]]", path: Path) -> None:
    """Draw the held-out losses against CPU seconds, a line for each run."""
    from kfac_engine.system.writing import write_rendered

    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        click.echo("no picture: pip install 'kfac-engine[plot]' brings matplotlib")
        return
    figure = Figure(figsize=(6.4, 4.4), layout="constrained")
    axes = figure.subplots()
    for index, (name, of_method) in enumerate(curves.items()):
        for number, curve in enumerate(of_method):
            label = "" if number else name
            axes.plot(*zip(*curve, strict=True), color=f"C{index}", label=label, alpha=0.6)
    axes.set(xlabel="CPU seconds of one thread", ylabel="loss of held-out digits", yscale="log")
    axes.legend()
    write_rendered(path, partial(figure.savefig, format="png", dpi=120))
    say(f"loss curves: {path}")
