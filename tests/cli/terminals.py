"""Commands in a terminal: a pseudo-terminal of a given width, and an emulator that shows lines."""

import os
import struct
import subprocess
import sys
from dataclasses import dataclass

import pyte

# The emulator is wider than the terminal that the command sees: it shows lines that are too long.
_COLUMNS, _LINES = 400, 600


@dataclass(frozen=True)
class Screen:
    """The lines that a command prints."""

    lines: list[str]  # lines without trailing blanks
    colours: list[set[str]]  # for each line, the colours of its characters but the default
    width: int  # width of the terminal
    printed: str  # all that the command prints, with what it erases later

    @property
    def widest(self):
        return max(map(len, self.lines))

    @property
    def text(self):
        return "\n".join(self.lines)


def run_in_terminal(arguments, width, code=0, variables=None):
    """Return the screen after a command with some arguments has ended with an exit status.

    Args:
        arguments: Arguments of the program.
        width: Width of the terminal.
        code: Exit status.
        variables: Environment variables besides those of the test.
    """
    import fcntl
    import pty
    import termios

    reader, writer = pty.openpty()
    fcntl.ioctl(writer, termios.TIOCSWINSZ, struct.pack("HHHH", _LINES, width, 0, 0))
    ignored = ("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE")
    environment = {key: value for key, value in os.environ.items() if key not in ignored}
    with subprocess.Popen(
        [sys.executable, "-m", "kfac_engine", *arguments],
        stdin=writer,
        stdout=writer,
        stderr=writer,
        env=environment | {"TERM": "xterm-256color", "PYTHONUTF8": "1"} | (variables or {}),
    ) as process:
        os.close(writer)
        printed = _read(reader)
    assert process.returncode == code, printed.decode()
    screen = pyte.Screen(_COLUMNS, _LINES)
    pyte.ByteStream(screen).feed(printed)
    lines = [line.rstrip() for line in screen.display]
    while lines and not lines[-1]:
        lines.pop()
    colours = [
        {screen.buffer[row][column].fg for column in range(len(line))} - {"default"}
        for row, line in enumerate(lines)
    ]
    return Screen(lines, colours, width, printed.decode())


def table(lines, title):
    """Return the lines between a title and the next empty line."""
    start = lines.index(title) + 2
    return lines[start : lines.index("", start)]


def _read(reader):
    """Return all that a process writes until it closes the terminal."""
    parts = []
    try:
        while part := os.read(reader, 1 << 16):
            parts.append(part)
    except OSError:  # Linux reports a closed terminal as an error
        pass
    finally:
        os.close(reader)
    return b"".join(parts)
