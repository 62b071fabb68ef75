"""Ends the program within two seconds of Ctrl-C or SIGTERM, even in ONNX Runtime or BLAS.

Python calls a handler when the main thread returns from C, which may take minutes. Therefore the
system also writes the number of the signal into a socket that a thread reads. The handler stops the
command in order; the thread ends the process if that takes too long.
"""

import os
import signal
import socket
import sys
from collections.abc import Mapping
from threading import Event, Thread, current_thread, main_thread
from types import FrameType

import click

from kfac_engine.distributed.job import rank_in_job, wait_for_first_rank
from kfac_engine.system.signals import SIGNALS, Handling
from kfac_engine.system.writing import abandon_files

# Messages of the signals that end the program; Windows has no third one.
_MESSAGES: Mapping[int, str] = dict(
    zip(SIGNALS, ("interrupted.", "terminated.", "the terminal was closed."), strict=False)
)
# A signal's exit status is its number plus this.
_SIGNAL_STATUS = 128
# The rest of the two seconds is a reserve for a busy machine.
_GRACE_SECONDS = 0.7
# A progress bar may have left the cursor in the middle of a line, and hidden.
_RESTORE_TERMINAL = "\r\x1b[2K\x1b[?25h"


class SignalReceived(BaseException):
    """The program received a signal to end."""


class Invocation(Handling):
    """State of one run of the program: a context in which a signal raises ``SignalReceived``.

    The context has no effect outside the main thread, where Python receives no signals.

    Attributes:
        debug: Whether a failure shows its traceback; ``--debug`` sets it at any position.
        command: The command that runs; None before its options are read.
        received: Number of the first signal; None before it.
        patient: Whether the first signal does not end the process soon, because the command stores
            its state first; the next signal does.
        advice: A clause at the end of the message of an interruption.
    """

    def __init__(self) -> None:
        super().__init__()
        self.debug = False
        self.command: click.Command | None = None
        self.received: int | None = None
        self.patient = False
        self.advice = ""
        self._ended = Event()

    def watch(self) -> None:
        """End the process soon after a signal, even where Python calls no handler."""
        if current_thread() is not main_thread():
            return
        reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        Thread(target=self._end_after_signal, args=(reader,), daemon=True).start()
        # In ``__del__``, where Python ignores exceptions, the thread ends the process.
        report = sys.unraisablehook
        sys.unraisablehook = lambda error: (
            None if isinstance(error.exc_value, SignalReceived) else report(error)
        )

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self._ended.set()
        self._restore()

    @property
    def explanation(self) -> tuple[int, str] | None:
        """Exit status and message; None if there was no signal."""
        if self.received is None:
            return None
        message = _MESSAGES[self.received]
        if self.advice:
            message = f"{message.removesuffix('.')}; {self.advice}."
        return _SIGNAL_STATUS + self.received, message

    def _handle(self, number: int, frame: FrameType | None) -> None:
        # A second signal must not disturb the shutdown by the first.
        if self.received is None and not self._ended.is_set():
            self.received = number
            raise SignalReceived

    def _end_after_signal(self, reader: socket.socket) -> None:
        while True:
            number = reader.recv(1)[0]
            if number in _MESSAGES and self.patient:
                self.patient = False
            elif number in _MESSAGES and not self._ended.wait(_GRACE_SECONDS):
                _end(number)


def _end(number: int) -> None:
    """End the process at once, without temporary files."""
    abandon_files()
    if rank_in_job() == 0:
        restored = _RESTORE_TERMINAL if os.isatty(2) else ""
        os.write(2, f"{restored}error: {_MESSAGES[number]}\n".encode())
    wait_for_first_rank()
    os._exit(_SIGNAL_STATUS + number)


def exit_after_signal(status: int) -> None:
    """End the process without waiting for threads or libraries, if a signal ended the command."""
    if status > _SIGNAL_STATUS:
        abandon_files()
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except OSError:  # the reader of the pipe has ended
                continue
        wait_for_first_rank()
        os._exit(status)
