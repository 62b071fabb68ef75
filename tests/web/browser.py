"""Chromium, and servers of folders on this machine, for the tests of pages."""

import json
import os
import shutil
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

SCRIPTS = Path(__file__).resolve().parent.parent.parent / "web" / "test"
SITE = os.environ.get("SITE", "")
NAMES = ("chromium", "chromium-browser", "google-chrome")
CHROMIUM = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


@contextmanager
def served(folder: object) -> Iterator[str]:
    """The address of a server of a folder."""
    handler = partial(Quiet, directory=str(folder))
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/"
    finally:
        server.shutdown()
        server.server_close()


def driven(script: str, *arguments: object, limit: float = 400) -> dict:
    """What a script of the package's tests prints as JSON within a number of seconds."""
    assert CHROMIUM, "install chromium, or name it with CHROMIUM=/path"
    done = subprocess.run(
        ["node", script, *map(str, arguments)],
        cwd=SCRIPTS,
        capture_output=True,
        text=True,
        timeout=limit,
        check=True,
    )
    return json.loads(done.stdout)
