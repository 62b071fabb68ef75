"""Runs the commands, and turns a failure into one line on stderr and an exit status."""

import traceback
from collections.abc import Callable, Mapping, Sequence

import click

from kfac_engine import __version__
from kfac_engine.cli.bench import bench
from kfac_engine.cli.command import Invocation, debug_option
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
from kfac_engine.cli.interruption import Interruption, SignalReceived
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
    """The group of the commands."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the commands with their whole texts, in the order of ``COMMANDS``."""
        del ctx
        with formatter.section("Commands"):
            formatter.write_dl([(name, entry.help or "") for name, entry in self.commands.items()])


@click.group(
    cls=Program,
    help="K-FAC natural gradients for any ONNX model.",
    invoke_without_command=True,
    params=[debug_option],
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="'kfac-engine COMMAND --help' shows the options of a command and an example.",
)
@click.version_option(__version__, prog_name="kfac-engine")
@click.pass_context
def app(context: click.Context) -> None:
    """K-FAC natural gradients for any ONNX model."""
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


# The commands with their texts, which are not docstrings, because ``python -OO`` removes these.
COMMANDS: Mapping[click.Command, str] = {
    demo: "Train a small CNN on digits with K-FAC, Muon, Adam and SGD.",
    train: "Train a model, and write it with its new weights.\n\n"
    "Of several processes that mpirun starts, each trains on its share of every batch.",
    run_precondition: "Write the gradients of a batch and the preconditioned gradients.",
    inspect: "Show the layer, block, factors and costs of each parameter.",
    run_replace_head: "Write a model whose last dense layer has new weights, for other classes.",
    run_add_adapters: "Write a model with low-rank updates of its layers, to be trained.",
    run_merge_adapters: "Write a model whose weights contain its adapters.",
    run_save_adapter: "Write the adapters of a model as a file that ONNX Runtime loads.",
    run_differentiate: "Write the gradient of a model as a plain ONNX model.",
    run_derivatives: "Write derivatives of a model with respect to an input as a plain ONNX model.",
    run_export_training: "Write the training step of a model as plain ONNX files.",
    run_report: "Write a page with the charts and tables of a training run.",
    run_verify: "Check gradients, curvature, inverses and export against definitions.",
    run_curvature: "Measure the Fisher matrix of a model on a data set, and store it.",
    laplace: "Predict with the uncertainty of the parameters, by a Laplace approximation.",
    influence: "Score the examples of the training data for queries, or for themselves.",
    run_saliency: "Write the rise of the loss for each weight that becomes zero.",
    run_prune: "Write a model whose weights of small saliency are zero.",
    run_merge: "Write the mean of models of one architecture, weighted by their Fisher matrices.",
    bench: "Measure the time and the memory of each operation, of whole steps, and of training.",
    doctor: "Show versions, libraries, threads, the GPU and the selected backend.",
}
for entry, text in COMMANDS.items():
    entry.help = text
    app.add_command(entry)


def run(arguments: Sequence[str]) -> int:
    """Run the program, and report a failure in one line on stderr.

    Args:
        arguments: Command line without the name of the program.

    Returns:
        0 if the command is done, 2 if the input is wrong, 3 if a check of ``verify`` fails, 1 for a
        bug. After a signal, 128 plus its number: 130 after Ctrl-C, 143 after SIGTERM. An error that
        one of several processes has alone ends all of them; of other errors and of signals, the
        first process prints the line.
    """
    with Interruption() as interruption:
        invocation = Invocation(interruption=interruption)
        try:
            status = app.main(
                list(arguments), prog_name="kfac-engine", standalone_mode=False, obj=invocation
            )
        except (Exception, KeyboardInterrupt, SignalReceived) as error:  # all failures end here
            status = _report(error, invocation)
    # Unless a command exits explicitly, as --help does, click returns its value: None.
    return status or 0


def _report(error: BaseException, invocation: Invocation) -> int:
    """Print an error on stderr, once if several processes have it; return the exit status."""
    status, message = invocation.interruption.explanation or _explain(error, invocation)
    if not launched_by_mpi():
        _print(error, message, invocation)
        return status
    rank = rank_in_job()
    # A signal reaches all processes: each of them ends by itself, and may first store its state.
    if invocation.interruption.received is not None or _is_of_all_processes(error):
        if rank == 0:
            _print(error, message, invocation)
        return status
    _print(error, f"rank {rank}: {message}", invocation)
    end_job(status)
    return status


def _is_of_all_processes(error: BaseException) -> bool:
    """Return whether each process of a job has this error."""
    if isinstance(error, click.UsageError):  # all of them have the same command line
        return True
    from kfac_engine.distributed.agreement import raised_by_all_ranks

    return raised_by_all_ranks(error)


def _print(error: BaseException, message: str, invocation: Invocation) -> None:
    if invocation.debug:
        for line in "".join(traceback.format_exception(error)).splitlines():
            click.echo(printable(line), err=True)
    tell("error", one_line(message))


def _explain(error: BaseException, invocation: Invocation) -> tuple[int, str]:
    if isinstance(error, KfacError):
        return WRONG_INPUT, _with_flag(error, invocation.command)
    for kind, status, describe in _EXPLANATIONS:
        if isinstance(error, kind):
            return status, describe(error)
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


def _describe_usage(error: click.UsageError) -> str:
    path = error.ctx.command_path if error.ctx else "kfac-engine"
    return f"{error.format_message()} See '{path} --help'."


def _describe_os_error(error: OSError) -> str:
    return f"cannot use '{error.filename}': {error.strerror}." if error.filename else str(error)


def _describe_memory(error: MemoryError) -> str:
    detail = f" ({error})" if str(error) else ""
    return (
        f"out of memory{detail}; 'kfac-engine inspect' shows the memory of each part: a smaller "
        "batch reduces activations, --approx KIND=diagonal reduces factors."
    )


# The first matching row explains an exception.
_EXPLANATIONS: tuple[tuple[type[BaseException], int, Callable[..., str]], ...] = (
    (click.UsageError, WRONG_INPUT, _describe_usage),
    (click.ClickException, WRONG_INPUT, click.ClickException.format_message),
    (click.Abort, INTERRUPTED, lambda error: "interrupted."),
    (KeyboardInterrupt, INTERRUPTED, lambda error: "interrupted."),
    (OSError, WRONG_INPUT, _describe_os_error),
    (MemoryError, WRONG_INPUT, _describe_memory),
)
