"""The progress of a run: lines at their times, and a display of 80 columns."""

import io

from rich.console import Console

import kfac_engine as ke
from kfac_engine.training.callbacks.progress import Progress
from tests.training import softmax_net as net


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def record(step, epoch=0, **more):
    stages = {"gradients": 0.3, "statistics": 0.1, "inverses": 0.05, "update": 0.05}
    times = {f"seconds/{stage}": value for stage, value in stages.items()}
    entries = {"step": step, "epoch": epoch, "seconds": 61.0 * step, "loss": 0.25 * step}
    return entries | {"learning_rate": 0.025, "damping": 0.00123456} | times | more


def shown(steps, seconds, epochs=3, terminal=False, width=80):
    """What is printed for records that come ``seconds`` apart; the last one ends the run."""
    stream, clock = io.StringIO(), Clock()
    console = Console(file=stream, force_terminal=terminal, width=width)
    progress = Progress(True, epochs, console=console, clock=clock)
    progress.on_run_start(None, ())
    for i, (entries, ends_epoch) in enumerate(steps):
        clock.now += seconds
        entries |= {"spent": (i + 1) / len(steps)}
        if ends_epoch:
            progress.on_epoch_end(entries, None)
        progress.on_record(entries, None)
    progress.close()
    return stream.getvalue()


def test_an_epoch_has_a_line_with_its_mean_loss_and_the_share_of_curvature():
    steps = [
        (record(1), False),
        (record(2, validation_loss=0.5, accuracy=0.9), True),
        (record(3, epoch=1), False),
        (record(4, epoch=1, validation_loss=0.25), True),
    ]
    # Losses 0.25, 0.5 and 0.75, 1; a third of a step's 0.5 seconds is for curvature.
    assert shown(steps, 5).splitlines() == [
        "epoch 1/3 step 2: loss 0.375, validation_loss 0.5, accuracy 0.9, rate 0.025, "
        "damping 0.001235, curvature 30%, 2:02",
        "epoch 2/3 step 4: loss 0.875, validation_loss 0.25, rate 0.025, damping 0.001235, "
        "curvature 30%, 4:04",
    ]


def test_a_display_fits_into_80_columns():
    long = {"validation_loss": 1.23456789e-05, "accuracy": 0.123456, "reduction_ratio": -1.2345e-5}
    large = {"loss": 123456.789, "learning_rate": 1.23456789e-05, "damping": 1.23456789e-10}
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, width=80, color_system=None)
    progress = Progress(True, 1000, console=console, clock=Clock())
    progress.on_run_start(None, ())
    progress.on_record(record(99_999, 998, **long, **large, spent=0.45), None)
    progress._live.refresh()
    frames = stream.getvalue().replace("\x1b[2K", "").replace("\x1b[1A", "").split("\r")
    lines = [line for frame in frames for line in frame.splitlines() if "\x1b" not in line]
    bar = next(line for line in lines if "epoch 999/1000" in line)
    assert "45%" in bar
    numbers = next(line for line in lines if line.startswith("loss"))
    for entry in ("loss 1.23e+05", "rate 1.23e-05", "damping 1.23e-10", "curvature 30%"):
        assert entry in numbers
    assert all(len(line) <= 80 for line in lines)
    progress.close()


def test_a_run_shows_its_progress_on_stderr_if_asked(capsys):
    options = {"optimizer": "kfac", "epochs": 2, "batch_size": 16}
    ke.fit(net.engine(), net.batch(n=32), validation=net.batch(7), progress=True, **options)
    out, err = capsys.readouterr()
    assert out == ""
    last = err.splitlines()[-1]
    assert last.startswith("epoch 2/2 step 4: loss ")
    assert "validation_loss " in last
    assert "curvature " in last
    ke.fit(net.engine(), net.batch(n=32), **options)
    assert capsys.readouterr().err == ""
