"""``inspect``: show the layers, blocks and costs of a model before any step runs."""

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kfac_engine.cli.command import MODEL, command, count_option, output
from kfac_engine.cli.display import (
    print_json,
    print_lines,
    print_table,
    say,
    working,
)
from kfac_engine.cli.engine_options import engine_options
from kfac_engine.cli.options import json_option, sample_option
from kfac_engine.errors import ExportWarning, InputError
from kfac_engine.summary import binary_size, dimensions, scaled

if TYPE_CHECKING:
    import kfac_engine as ke
    from kfac_engine.engine.memory import MemoryReport
    from kfac_engine.engine.report import LayerReport, LossReport
    from kfac_engine.engine.spectra import FactorSpectrum
    from kfac_engine.graph.analysis.exporter_changes import Tie


_FLOPS = ("FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP")
# Number of constants with one reason that have a row each; more of them share a row.
_MOST_ALIKE = 3


@command(
    "Show the layer, block, factors and costs of each parameter.",
    "kfac-engine inspect mlp.onnx --batch-size 128",
    MODEL,
    count_option("Model", "--batch-size",
        help="Number of examples in a batch, for the peak memory; by default the number in "
        "--inputs, or 1."),
    sample_option,
    output("--plot",
        help="Picture of the eigenvalues of the factors of the batch in --inputs, next to the "
        "damping: .png, .svg, .pdf or .html. All but .html need matplotlib."),
    json_option,
    options=engine_options(),
)  # fmt: skip
def inspect(
    model: Path,
    batch_size: int | None,
    inputs: Path | None,
    plot: Path | None,
    options: dict[str, Any],
    as_json: bool,
) -> None:
    import kfac_engine as ke
    from kfac_engine.cli.files import read_inputs
    from kfac_engine.cli.spectra import check_picture, print_spectra, write_picture

    if plot is not None:
        if inputs is None:
            raise InputError("--plot needs a batch for the statistics; give its file by --inputs.")
        check_picture(plot)
    with working("preparing the model"), warnings.catch_warnings():
        warnings.simplefilter("ignore", ExportWarning)  # printed above the tables
        sample = read_inputs(inputs, model)
        engine = ke.Engine.from_onnx(model, sample_inputs=sample, **options)
    spectra: Sequence[FactorSpectrum] = ()
    if plot is not None and sample is not None:
        with working("computing eigenvalues"):
            engine.observe(sample)
            spectra = ke.factor_spectra(engine)
            write_picture(plot, f"Eigenvalues of the factors of {model.name}", spectra)
    batch = batch_size or engine.losses[0].examples
    facts = _facts(engine, engine.memory(batch))
    if as_json:
        from kfac_engine.training.description import described

        print_json({**facts, "spectra": [described(spectrum) for spectrum in spectra]})
        return
    _print(engine, facts, as_one=options["tie_weights"])
    if spectra:
        print_spectra(spectra)
    _print_memory(facts["memory"], batch)


def _facts(engine: "ke.Engine", memory: "MemoryReport") -> dict[str, Any]:
    """Return the facts that are printed, as values that JSON can hold."""
    from kfac_engine.engine.report import inference_notes, large_factor_notes

    layers, model = engine.layers, engine.passes.model
    doubts = (doubt for loss in engine.losses for doubt in loss.doubts)
    notes = (*doubts, *model.loaded.notes, *inference_notes(model))
    return {
        "backend": engine.collection.backend.name,
        "damping": engine.damping,
        "parameters": sum(array.size for array in engine.parameters.values()),
        "parameters_in_kronecker_blocks": sum(
            layer.numbers for layer in layers if "A" in layer.symbols
        ),
        "factor_bytes": sum(layer.factor_bytes for layer in layers),
        # A factor of several layers counts once.
        "refresh_flops": sum(work.cost for work in engine.fisher.works),
        "approximations": _approximations(layers),
        "export_notes": list(engine.export_changes.notes),
        "losses": [asdict(loss) for loss in engine.losses],
        "layers": [asdict(layer) for layer in layers],
        "warnings": list(large_factor_notes(layers, memory.total)),
        "notes": list(dict.fromkeys(notes)),
        "not_trained": list(_untrained(engine)),
        "ties": [asdict(tie) for tie in engine.ties],
        "memory": {**asdict(memory), "total": memory.total},
    }


def _print(engine: "ke.Engine", facts: Mapping[str, Any], *, as_one: bool) -> None:
    _say_all(f"warning: {note}." for note in facts["export_notes"])
    _print_losses(engine.losses)
    print_layers(engine)
    _say_all(_uncovered(engine))
    print_legend(layer.formula for layer in engine.layers)
    total, covered = facts["parameters"], facts["parameters_in_kronecker_blocks"]
    rows = [
        ("parameters", f"{total:,}"),
        ("in Kronecker blocks", f"{covered:,} ({_percent(covered, total)})"),
        ("factors", binary_size(facts["factor_bytes"])),
        ("refresh of all factors", show_flops(facts["refresh_flops"])),
    ]
    print_table("totals", ("quantity", "value"), rows, sentences="value")
    _print_choices(facts["approximations"])
    _say_all(f"warning: {clause}." for clause in facts["warnings"])
    _say_all(f"note: {note}." for note in facts["notes"])
    _say_all(_tied(engine.ties, as_one))
    if facts["not_trained"]:
        heads = ("name", "shape", "because it is")
        rows_of_constants = list(_gathered(facts["not_trained"]))
        print_table("constants that are not trained", heads, rows_of_constants, sentences=heads[-1])


def print_layers(engine: "ke.Engine") -> None:
    """Print a row for each layer, and for each parameter without a layer."""
    print_table(
        "layers",
        ("parameters", "shapes", "kind", "block", "factors", " bytes", " refresh"),
        [
            (
                _names(layer),
                [dimensions(engine.parameters[name].shape) for name in layer.parameters],
                layer.kind,
                layer.formula,
                [dimensions(shape) for shape in layer.factor_shapes],
                binary_size(layer.factor_bytes),
                show_flops(layer.inverse_flops),
            )
            for layer in engine.layers
        ],
    )


def _untrained(engine: "ke.Engine") -> Iterator[dict[str, Any]]:
    """Yield name, shape and reason of each float constant that is not a parameter."""
    from kfac_engine.graph.analysis.trainable import excluded_reason

    model = engine.passes.model
    graph = model.loaded.graph
    for name, array in graph.constants.items():
        if name not in engine.parameters and array.dtype.kind == "f":
            reason = model.left_out.get(name) or excluded_reason(graph, name)
            reason = reason or "not among those asked for"
            yield {"name": name, "shape": array.shape, "reason": reason}


def _say_all(lines: Iterable[str]) -> None:
    """Print lines, and an empty line after them."""
    paragraph = list(lines)
    for line in paragraph:
        say(line)
    if paragraph:
        print_lines([""])


def _uncovered(engine: "ke.Engine") -> Iterator[str]:
    """Yield the reason for each parameter without a layer."""
    reasons: dict[str, list[str]] = {}
    for layer in engine.layers:
        if layer.reason:
            reasons.setdefault(layer.reason, []).extend(_names(layer))
    for reason, names in reasons.items():
        yield f"{', '.join(names)}: no layer, {reason}"
    alone = engine.fisher.differentiated_alone
    if engine.passes.model.backward(engine.objective.inputs, alone).gradients:
        yield "without a layer: each update differentiates the examples one by one"


def _tied(ties: "tuple[Tie, ...]", as_one: bool) -> Iterator[str]:
    """Yield a line for each weight with copies in the file."""
    copies: dict[str, list[str]] = {}
    for tie in ties:
        transposed = ", transposed" if tie.transposed else ""
        copies.setdefault(f"{tie.first}{transposed}", []).append(tie.copy)
    training = "trained as one" if as_one else "trained apart, as one with --tie-weights"
    for first, names in copies.items():
        yield f"{', '.join(names)} {'equals' if len(names) == 1 else 'equal'} {first}: {training}"


def _gathered(untrained: Iterable[Mapping[str, Any]]) -> Iterator[tuple[str, str, str]]:
    """Yield rows for constants; more than a few with one reason share a row."""
    alike: dict[str, list[tuple[str, str]]] = {}
    for entry in untrained:
        row = entry["name"], dimensions(entry["shape"])
        alike.setdefault(entry["reason"].partition(" (")[0], []).append(row)
    for reason, entries in alike.items():
        if len(entries) > _MOST_ALIKE:
            (name, shape), others = entries[0], len(entries) - 1
            same = len({shape for _, shape in entries}) == 1
            yield f"{name} and {others} more", shape if same else f"{shape}, …", reason
        else:
            yield from ((name, shape, reason) for name, shape in entries)


def _names(layer: "LayerReport") -> list[str]:
    """Return the parameters of a layer, each followed by the part that belongs to the layer."""
    pairs = zip(layer.parameters, layer.parts, strict=True)
    return [f"{name} {part}" if part else name for name, part in pairs]


def _print_losses(losses: "tuple[LossReport, ...]") -> None:
    """Print the tensor that each loss reads, and the axis of the examples."""
    rows = [
        (
            loss.output,
            loss.loss.removesuffix("NegativeLogProbLoss"),
            f"'{loss.reads}', {loss.how}" if loss.how else "the output",
            f"axis {loss.batch_axis}"
            + (f", with {loss.positions} positions each" if loss.positions > 1 else ""),
        )
        for loss in losses
    ]
    print_table("losses", ("output", "loss", "reads", "examples"), rows, sentences="reads")
    _say_all(_assumptions(losses[0]))


def _assumptions(loss: "LossReport") -> Iterator[str]:
    """Yield a line for each restriction of batches and for each dependence of examples."""
    if loss.fixed_batch:
        yield f"one batch size only: {loss.fixed_batch}."
    if loss.joint_batch:
        yield f"batches are not cut: {loss.joint_batch}."
    if loss.coupling:
        yield (
            f"examples depend on each other, first by {loss.coupling}: "
            f"the curvature takes them for independent."
        )


def print_legend(formulas: Iterable[str]) -> None:
    """Print the meaning of the symbols in formulas of blocks."""
    from kfac_engine.curvature.approximations import explained

    rows = list(explained(formulas).items())
    print_table("symbols of the blocks", ("symbol", "meaning"), rows, sentences="meaning")


def _print_choices(choices: Mapping[str, Mapping[str, Sequence[str]]]) -> None:
    """Print the other approximations of each kind of layer that has others."""
    rows = [
        (kind, ", ".join(of_kind["in_use"]), ", ".join(others))
        for kind, of_kind in choices.items()
        if (others := [name for name in of_kind["choices"] if name not in of_kind["in_use"]])
    ]
    if rows:
        heads = ("KIND", "in use", "other choices of NAME")
        print_table("approximations: --approx KIND=NAME", heads, rows, sentences=heads[-1])


def _print_memory(memory: Mapping[str, int], batch: int) -> None:
    """Print the parts of the peak memory of a step."""
    shown = {name: count for name, count in memory.items() if name not in {"device", "optimizer"}}
    if memory["device"]:
        shown["of it on the GPU"] = memory["device"]
    rows = [(part, binary_size(count)) for part, count in shown.items()]
    print_table(f"peak memory, batch of {batch}", ("part", " bytes"), rows)


def _approximations(layers: "Sequence[ke.LayerReport]") -> dict[str, dict[str, Sequence[str]]]:
    """Return the approximations that each kind of layer uses, and all that it accepts."""
    from kfac_engine.curvature.approximations import accepted

    used: dict[str, dict[str, None]] = {}
    for layer in layers:
        used.setdefault(layer.kind, {})[layer.approximation] = None
    return {
        kind: {"in_use": list(names), "choices": accepted(kind)} for kind, names in used.items()
    }


def show_flops(count: float) -> str:
    """Return a number of floating-point operations with three digits and a decimal unit."""
    return scaled(count, 1000, _FLOPS)


def _percent(part: int, total: int) -> str:
    """Return a share in percent as text; rounding yields neither 0 % nor 100 %."""
    share = 100 * part / total if total else 0.0
    if part not in (0, total):
        share = min(max(share, 0.1), 99.9)
    return f"{share:.3g} %"
