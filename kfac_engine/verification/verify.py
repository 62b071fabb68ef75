"""Defines ``kfac_engine.verify``, which runs all checks on the user's model and batch."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from kfac_engine.arguments import check_bool, check_int
from kfac_engine.datasets.examples import Batch
from kfac_engine.datasets.first_examples import with_first_examples
from kfac_engine.datasets.forms import Data, Path, batches_of
from kfac_engine.engine.engine import Engine
from kfac_engine.errors import InputError, UnsupportedError
from kfac_engine.graph.load import ModelSource
from kfac_engine.losses.observed import Targets
from kfac_engine.training.bars import stages
from kfac_engine.verification import blocks, exports, gradients, inverses, products
from kfac_engine.verification.checks import Check, Verification
from kfac_engine.verification.differences import sizes
from kfac_engine.verification.specimen import Rebuild, Specimen, spread_evenly

# Layers whose refresh takes more operations are not inverted or compared.
_MOST_FLOPS = 2e11
_MOST_ENTRIES = 16
# Multiplications of all passes in float64, about half a minute on a core. Of a model whose passes
# take more, fewer examples are read, and then fewer parameters are checked one by one.
_MOST_MULTIPLICATIONS = 1e11
_LEAST_PARAMETERS = 3
# Passes in float64 for all parameters and for products, and for each parameter.
_PASSES_ALONE, _PASSES_EACH = 20 + 5 * (_MOST_ENTRIES + 3), 10
# Part of the size of a parameter by which its entries are moved.
_MOVE = 1e-3
# The checks in their order.
_NAMES = (gradients.NAME, products.NAME, blocks.NAME, inverses.NAME, exports.NAME)


def verify(
    model: ModelSource | Engine,
    inputs: Data,
    targets: Targets | Path = None,
    *,
    examples: int = 8,
    parameters: int = 12,
    progress: bool = False,
    **options: Any,
) -> Verification:
    """Check gradients, curvature, inverses and export on a model and a batch.

    The number of passes is bounded: the checks read the first examples, all parameters together,
    and some parameters and layers one by one. Random vectors depend on the option ``seed`` only.
    ``docs/verify.md`` describes each check with its tolerance.

    Args:
        model: Path, bytes or ``ModelProto``; or an engine, whose state does not change.
        inputs: Inputs with ``targets``, or data with targets as for ``fit``, of which the first
            batch is read.
        targets: The targets of the loss; for several losses, by output.
        examples: Largest number of examples.
        parameters: Largest number of parameters, and of layers, that are checked one by one.
        progress: Whether to show a bar on stderr; there is none if stderr is not a terminal.
        options: The fields of ``EngineOptions``, if ``model`` is not an engine.

    Returns:
        The checks; ``passed`` is True if none failed.

    Raises:
        InputError: Options are given for an engine, or the model, the data or an option is wrong.
        NonFiniteError: The loss of the batch is NaN or infinite.
        UnsupportedError: The engine has a communicator of several processes, or its loss is a
            single number for the whole batch.
    """
    for name, value in (("examples", examples), ("parameters", parameters)):
        check_int(name, value, least=1)
    check_bool("progress", progress)
    if isinstance(model, Engine) and not model.passes.agreement.alone:
        raise UnsupportedError(
            "verify checks in one process; pass the file of the model instead of an engine with a "
            "communicator."
        )
    if isinstance(model, Engine) and options:
        raise InputError(
            f"verify takes the options of the engine; leave out: {', '.join(options)}."
        )
    if not isinstance(model, Engine) and "loss" not in options:
        raise InputError("verify needs loss=, the loss of the model.")
    checks = []
    with stages(progress, 1 + len(_NAMES)) as begin:
        begin("preparing the model")
        data = inputs if targets is None else (inputs, targets)
        engine, data = _prepared(model, data, options)
        engine.passes.task.require_examples("the checks need")
        batch = _batch(engine, data)
        specimen, parameters = _affordable(engine, batch, examples, parameters)
        with Rebuild.exported(engine, batch[0]) as rebuild:
            results = _checks(specimen, rebuild, parameters, _source(model))
            for name in _NAMES:
                begin(name)
                checks.append(next(results))
    names = spread_evenly(tuple(specimen.parameters), parameters)
    return Verification(tuple(checks), specimen.examples, names)


def _prepared(
    model: ModelSource | Engine, data: Data, options: dict[str, Any]
) -> tuple[Engine, Data]:
    """Return the engine of a model, and the data, whose first examples determine its sizes."""
    if isinstance(model, Engine):
        return model, data
    if options.get("sample_inputs") is None:
        axes = options.get("batch_axes")
        data, sample = with_first_examples(model, data, axes, passes=1, divided=False)
        options = {**options, "sample_inputs": sample}
    return Engine.from_onnx(model, **options), data


def _batch(engine: Engine, data: Data) -> Batch:
    """Return the first batch of data; an InputError if there is none."""
    batch = next(iter(batches_of(data, engine.example_axes)), None)
    if batch is None:
        raise InputError("the data have no batch; give one pair (inputs, targets) at least.")
    return batch


def _affordable(
    engine: Engine, batch: Batch, examples: int, parameters: int
) -> tuple[Specimen, int]:
    """Return the first examples, and the number of parameters, whose passes are affordable."""
    specimen = Specimen.of_batch(engine, *batch, examples)
    passes = _PASSES_ALONE + _PASSES_EACH * parameters
    count = int(_MOST_MULTIPLICATIONS * specimen.examples / (passes * specimen.multiplications))
    if count < specimen.examples:
        specimen = Specimen.of_batch(engine, *batch, max(count, 1))
    passes = int(_MOST_MULTIPLICATIONS / specimen.multiplications)
    affordable = max((passes - _PASSES_ALONE) // _PASSES_EACH, _LEAST_PARAMETERS)
    return specimen, min(parameters, affordable)


def _source(model: ModelSource | Engine) -> Any:
    """Return the path or the bytes of a model; None for an engine."""
    if isinstance(model, Engine):
        return None
    return model if not hasattr(model, "SerializeToString") else model.SerializeToString()


def _checks(specimen: Specimen, rebuild: Rebuild, most: int, source: Any) -> Iterator[Check]:
    """Run the checks; ``most`` is the number of parameters and of layers."""
    engine = specimen.engine
    rng, moves = np.random.default_rng(engine.options.seed).spawn(2)
    names = spread_evenly(tuple(specimen.parameters), most)
    cheap = [layer for layer in engine.layers if layer.inverse_flops <= _MOST_FLOPS]
    if specimen.model.draws:
        reason = "each pass of the model draws random numbers"
        for name in (gradients.NAME, products.NAME, blocks.NAME):
            yield Check.without(name, reason)
    else:
        moved = specimen.with_engine(_moved(specimen, rebuild.engine(), moves))
        yield gradients.GradientCheck(moved, rng).run(names)
        yield products.verify_products(moved, names, _MOST_ENTRIES, rng)
        yield blocks.verify_blocks(specimen, rebuild, cheap, most, _MOST_ENTRIES)
    yield inverses.check_inverses(specimen, rebuild, spread_evenly(cheap, most), rng)
    yield exports.check_export(specimen, rebuild.file, source)


def _moved(specimen: Specimen, probe: Engine, rng: np.random.Generator) -> Engine:
    """Move the parameters of ``probe`` by a small part of their size, and return ``probe``.

    At the initial parameters, such as biases of zero, activations lie on kinks, where differences
    are not derivatives.
    """
    scales = sizes(specimen.parameters)
    probe.set_parameters(
        {
            name: (value + _MOVE * scales[name] * rng.standard_normal(value.shape))
            for name, value in specimen.parameters.items()
        }
    )
    return probe
