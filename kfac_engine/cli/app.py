"""Runs the commands, and turns a failure into one line on stderr and an exit status."""

import sys
import traceback
from collections.abc import Sequence

import click

from kfac_engine import __version__
from kfac_engine.cli.bench import bench
from kfac_engine.cli.command import debug_option
from kfac_engine.cli.curvature import run_curvature
from kfac_engine.cli.demo import demo
from kfac_engine.cli.display import tell
from kfac_engine.cli.doctor import doctor
from kfac_engine.cli.edits import (
    run_add_adapters,
    run_merge_adapters,
    run_replace_head,
    run_save_adapter,
)
from kfac_engine.cli.exports import run_derivatives, run_differentiate, run_export_training
from kfac_engine.cli.influence import influence
from kfac_engine.cli.inspect import inspect
from kfac_engine.cli.interruption import Invocation, SignalReceived
from kfac_engine.cli.laplace import laplace
from kfac_engine.cli.merge import run_merge
from kfac_engine.cli.precondition import run_precondition
from kfac_engine.cli.prune import run_prune, run_saliency
from kfac_engine.cli.train import run_report, train
from kfac_engine.cli.verify import run_verify
from kfac_engine.distributed.job import end_job, launched_by_mpi, rank_in_job
from kfac_engine.errors import KfacError
from kfac_engine.printable import one_line, printable

WRONG_INPUT, BUG, INTERRUPTED = 2, 1, 130


class Program(click.Group):
    """A group whose help lists the commands in the order in which they were added."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of the commands."""
        return list(self.commands)


_PROGRAM = Program(
    "kfac-engine",
    help="K-FAC natural gradients for any ONNX model.",
    params=[debug_option],
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="'kfac-engine COMMAND --help' shows the options of a command and an example.",
    commands=(
        demo, train, run_precondition, inspect, run_replace_head, run_add_adapters,
        run_merge_adapters, run_save_adapter, run_differentiate, run_derivatives,
        run_export_training, run_report, run_verify, run_curvature, laplace, influence,
        run_saliency, run_prune, run_merge, bench, doctor,
    ),
)  # fmt: skip
app = click.version_option(__version__, prog_name="kfac-engine")(_PROGRAM)


def run(arguments: Sequence[str] | None) -> int:
    """Run the program, and report a failure in one line on stderr.

    Args:
        arguments: Command line without the name of the program; None for that of this process,
            which a signal then ends within two seconds.

    Returns:
        0 if the command is done, 2 if the input is wrong, 3 if a check of ``verify`` fails, 1 for a
        bug. After a signal, 128 plus its number: 130 after Ctrl-C, 143 after SIGTERM. An error that
        one of several processes has alone ends all of them; of other errors and of signals, the
        first process prints the line.
    """
    with Invocation() as invocation:
        try:
            if arguments is None:
                invocation.watch()
            status = app.main(
                list(sys.argv[1:] if arguments is None else arguments) or ["--help"],
                prog_name="kfac-engine",
                standalone_mode=False,
                obj=invocation,
            )
        except (Exception, KeyboardInterrupt, SignalReceived) as error:  # all failures end here
            status = _report(error, invocation)
    # Unless a command exits explicitly, as --help does, click returns its value: None.
    return status or 0


def _report(error: BaseException, invocation: Invocation) -> int:
    """Print an error on stderr, once if several processes have it; return the exit status."""
    status, message = invocation.explanation or _explain(error, invocation.command)
    common = _is_of_all_processes(error, invocation)
    if common and launched_by_mpi() and rank_in_job() > 0:
        return status
    if invocation.debug:
        for line in "".join(traceback.format_exception(error)).splitlines():
            click.echo(printable(line), err=True)
    tell("error", one_line(message if common else f"rank {rank_in_job()}: {message}"))
    if not common:
        end_job(status)
    return status


def _is_of_all_processes(error: BaseException, invocation: Invocation) -> bool:
    # A signal reaches all processes: each of them ends by itself, and may first store its state.
    # All of them have the same command line.
    signaled = invocation.received is not None
    if not launched_by_mpi() or signaled or isinstance(error, click.UsageError):
        return True
    from kfac_engine.distributed.agreement import raised_by_all_ranks

    return raised_by_all_ranks(error)


def _explain(error: BaseException, command: click.Command | None) -> tuple[int, str]:
    """Return the exit status and the message of an error."""
    match error:
        case KfacError():
            return WRONG_INPUT, _with_flag(error, command)
        case click.UsageError():
            path = error.ctx.command_path if error.ctx else "kfac-engine"
            return WRONG_INPUT, f"{error.format_message()} See '{path} --help'."
        case click.ClickException():
            return WRONG_INPUT, error.format_message()
        case click.Abort() | KeyboardInterrupt():
            return INTERRUPTED, "interrupted."
        case OSError() if error.filename:
            return WRONG_INPUT, f"cannot use '{error.filename}': {error.strerror}."
        case OSError():
            return WRONG_INPUT, str(error)
        case MemoryError():
            detail = f" ({error})" if str(error) else ""
            return WRONG_INPUT, (
                f"out of memory{detail}; 'kfac-engine inspect' shows the memory of each part: a "
                "smaller batch reduces activations, --approx KIND=diagonal reduces factors."
            )
    return BUG, (
        f"internal error, {type(error).__name__}: {str(error).rstrip('.')}. This is a bug: please "
        "report it with the output of the same command and --debug."
    )


def _with_flag(error: KfacError, command: click.Command | None) -> str:
    """Return the message of an error, which begins with the flag of a wrong option."""
    message, name = str(error), error.option
    for option in command.params if command and name else ():
        if option.name == name and message.startswith(name):
            return max(option.opts, key=len) + message.removeprefix(name)
    return message
