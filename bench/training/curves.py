"""Pictures of the suite ``train``: validation loss against CPU seconds and against steps."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path

from kfac_engine.bench.training.plan import Group
from kfac_engine.bench.training.run import Outcome, Run
from kfac_engine.bench.training.tasks import find_task
from kfac_engine.system.writing import write_rendered

_SIZE, _DOTS_AN_INCH = (10.0, 4.6), 120
_STYLES = ("-", "--", ":", "-.")


def draw_curves(folder: Path, results: Mapping[Group, Mapping[Run, Outcome]]) -> list[Path]:
    """Write ``train-<task>.png`` for each task.

    Each method has a colour, each of its budgets a line style, each seed a line.
    """
    from matplotlib.figure import Figure

    colours = {m: f"C{i}" for i, m in enumerate(dict.fromkeys(group.method for group in results))}
    paths = []
    for name in dict.fromkeys(group.task for group in results):
        figure = Figure(figsize=_SIZE, layout="constrained")
        panels = figure.subplots(1, 2, sharey=True)
        of_method: dict[str, int] = {}
        for group, runs in ((g, r) for g, r in results.items() if g.task == name):
            style = _STYLES[of_method.get(group.method, 0) % len(_STYLES)]
            of_method[group.method] = of_method.get(group.method, 0) + 1
            for number, outcome in enumerate(runs.values()):
                # The loss of the initial model would compress all others.
                points = outcome.curve[1:]
                losses = [point.loss for point in points]
                label = f"{group.method}, {group.seconds:g} s" if number == 0 else "_"
                axes = [point.cpu for point in points], [point.step for point in points]
                for panel, x in zip(panels, axes, strict=True):
                    panel.plot(x, losses, style, color=colours[group.method], label=label,
                               linewidth=1.2)  # fmt: skip
        for panel, label in zip(panels, ("CPU seconds", "steps"), strict=True):
            panel.set(xlabel=label, xscale="log")
            panel.grid(alpha=0.3)
        panels[0].set(ylabel="validation loss", title=find_task(name)[0].title)
        panels[1].legend(fontsize="small")
        paths.append(folder / f"train-{name}.png")
        write_rendered(paths[-1], partial(figure.savefig, format="png", dpi=_DOTS_AN_INCH))
    return paths
