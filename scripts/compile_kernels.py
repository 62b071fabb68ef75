"""Writes kernels/compiled.json, with the resources of each kernel variant on each architecture.

For some sources, it also has the instructions of each loop.

Run it in the environment of ``make setup`` after a change of a kernel:
``python -m scripts.compile_kernels``, then ``python -m scripts.kernel_report``. Compilers come with
the extra ``nvrtc``. Sources that did not change are not compiled again.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from kfac_engine.kernels.launch import MACROS, source, variants
from tests.cuda_on_cpu import nvrtc

TABLE = Path(__file__).parents[1] / "kernels" / "compiled.json"

# Sources whose loops are counted, and the architectures.
LOOPS = (
    *("patch_products", "pair_products", "pair_rows", "patch_sums"),
    *("averages", "spans", "few_products", "example_sums"),
)
LOOP_ARCHITECTURES = ("sm_80", "sm_90")

# Map from a variant and an architecture to kernels and their resources.
Compiled = Mapping[str, Mapping[str, nvrtc.Resources]]


def main() -> None:
    """Compile the sources that changed and write the table."""
    old = _stored()
    table = {}
    for name in MACROS:
        digest = fingerprint(name)
        same = name in old and old[name]["source"] == digest
        known = old[name]["compiled"] if same else {}
        missing = [variant for variant in _all_variants(name) if entry(*variant) not in known]
        with ThreadPoolExecutor() as pool:
            resources = pool.map(
                lambda variant, name=name: nvrtc.resources(name, *variant), missing
            )
            known |= zip((entry(*variant) for variant in missing), resources, strict=True)
        compiled = {entry(*variant): known[entry(*variant)] for variant in _all_variants(name)}
        table[name] = {"source": digest, "compiled": compiled}
        if name in LOOPS:
            stored = old[name].get("loops") if same else None
            table[name]["loops"] = stored or dict(_loops(name))
        print(f"{name}: {len(missing)} of {len(compiled)} compiled")
    TABLE.write_text("\n".join(_lines(table)) + "\n", encoding="utf-8")


def fingerprint(name: str) -> str:
    """Return a hash of a source, its headers, and the flags common to all variants."""
    text = "\n".join([*nvrtc.FLAGS, source(name)])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def fingerprints() -> dict[str, str]:
    """Return the fingerprint of each source at its last compilation."""
    return {name: stored["source"] for name, stored in _stored().items()}


def compiled(name: str) -> Compiled:
    """Return the resources of each variant and kernel of a source."""
    return {
        key: {
            kernel: nvrtc.Resources(*kernel_resources)
            for kernel, kernel_resources in kernels.items()
        }
        for key, kernels in _stored()[name]["compiled"].items()
    }


def loops(name: str) -> Mapping[str, Mapping[str, list[nvrtc.Loop]]]:
    """Return the loops of each variant and kernel of a source of ``LOOPS``."""
    return {
        key: {kernel: [nvrtc.Loop(*loop) for loop in rows] for kernel, rows in kernels.items()}
        for key, kernels in _stored()[name]["loops"].items()
    }


def entry(options: tuple[str, ...], architecture: str) -> str:
    """Return the name of a variant in the table."""
    return " ".join([architecture, *options])


def _all_variants(name: str) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield every variant of a source for every architecture."""
    for architecture in nvrtc.ARCHITECTURES:
        for options in variants(name):
            yield options, architecture


def _loops(name: str) -> Iterator[tuple[str, dict[str, list[nvrtc.Loop]]]]:
    """Yield each variant of a source with its loops."""
    for architecture in LOOP_ARCHITECTURES:
        for options in variants(name):
            yield entry(options, architecture), nvrtc.loops(name, options, architecture)


def _stored() -> dict[str, Any]:
    return json.loads(TABLE.read_text(encoding="utf-8")) if TABLE.exists() else {}


def _lines(table: Mapping[str, Any]) -> Iterator[str]:
    """Yield lines of JSON, with one line for each entry, so that diffs show changes."""
    yield "{"
    for name, stored in table.items():
        comma = "," if name != list(table)[-1] else ""
        yield f'"{name}": {{"source": "{stored["source"]}", "compiled": {{'
        yield from _rows(stored["compiled"])
        if "loops" in stored:
            yield '}, "loops": {'
            yield from _rows(stored["loops"])
        yield f"}}}}{comma}"
    yield "}"


def _rows(entries: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line for each entry."""
    last = list(entries)[-1]
    for key, value in entries.items():
        yield f'  "{key}": {json.dumps(value)}{"," if key != last else ""}'


if __name__ == "__main__":
    main()
