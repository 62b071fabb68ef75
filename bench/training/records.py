"""The file of finished runs: a line of JSON for each."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import kfac_engine
from kfac_engine.bench.training.run import Outcome, Run
from kfac_engine.errors import InputError
from kfac_engine.system.reading import check_file


@dataclass(frozen=True, slots=True)
class Record:
    """A finished run on some images, with the ``revision()`` of the sources that ran."""

    run: Run
    outcome: Outcome
    data: str
    revision: str

    def line(self) -> str:
        """Return the record as a line of JSON."""
        settings = {**asdict(self.run), "data": self.data, "revision": self.revision}
        return json.dumps(settings | asdict(self.outcome)) + "\n"

    @classmethod
    def parse(cls, line: str) -> "Record":
        """Return the record of a line; a KeyError, TypeError or ValueError if it is none."""
        entries: dict[str, Any] = json.loads(line)
        data, revision = entries.pop("data"), entries.pop("revision")
        # Records of earlier versions have no budget in steps.
        known = [name for name in Run.__dataclass_fields__ if name in entries]
        run = Run(**{name: entries.pop(name) for name in known})
        return cls(run, Outcome.parse(entries), data, revision)


@cache
def revision() -> str:
    """Return the first digits of the SHA-256 hash of the sources of the package.

    The hash changes with the modules that a training step runs, and with the tasks; not with the
    command line, the documentation and the other suites.
    """
    digest = hashlib.sha256()
    package = Path(kfac_engine.__file__).parent
    for root, left_out in ((package, {"cli", "bench", "kernels"}), (Path(__file__).parent, set())):
        for path in sorted(root.rglob("*.py")):
            if path.relative_to(root).parts[0] not in left_out:
                digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


class Records:
    """Finished runs, in memory and in a file, which need not exist."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._records = _read(path) if path is not None and path.exists() else []

    def add(self, record: Record) -> None:
        """Append a record to the file."""
        self._records.append(record)
        if self._path is None:
            return
        try:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(record.line())
        except OSError as error:
            raise InputError(f"cannot write '{self._path}': {error.strerror}.") from error

    def of(self, data: str, *, any_revision: bool = False) -> Mapping[Run, Outcome]:
        """Return the results by settings.

        With ``any_revision``, runs of other sources count; the last one is returned.
        """
        return {
            record.run: record.outcome
            for record in self._records
            if record.data == data and (any_revision or record.revision == revision())
        }


def _read(path: Path) -> list[Record]:
    check_file(path)
    lines = path.read_text(encoding="utf-8").splitlines()
    return [_parsed(path, number, line) for number, line in enumerate(lines, 1)]


def _parsed(path: Path, number: int, line: str) -> Record:
    try:
        return Record.parse(line)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(
            f"line {number} of '{path}' is no record of the suite train ({error}): remove the "
            f"line, or name another file."
        ) from error
