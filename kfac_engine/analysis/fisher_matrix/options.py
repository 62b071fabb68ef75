"""Defines the options of a curvature measurement, and assembles the model from them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from glob import escape

from kfac_engine._types import Array
from kfac_engine.arguments import check_choice, check_mapping
from kfac_engine.autodiff.differentiate import needed
from kfac_engine.curvature.approximations import KINDS
from kfac_engine.curvature.blocks.base import uses
from kfac_engine.curvature.fisher import Fisher
from kfac_engine.engine.build import Assembly, build
from kfac_engine.engine.loss_bindings import LossChoices
from kfac_engine.engine.options import EngineOptions
from kfac_engine.errors import InputError, ModelError
from kfac_engine.graph.load import ModelSource
from kfac_engine.losses.output import OutputLoss

# Fisher matrix to the estimation mode that measures it.
FISHERS: Mapping[str, str] = {"exact": "exact", "sampled": "gradients", "empirical": "empirical"}
STRUCTURES = ("kron", "ekfac", "diagonal", "full")
BIASES, LAYERS = ("joint", "separate"), ("all", "last")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CurvatureOptions:
    """Options of a measurement of curvature.

    Attributes:
        loss: Name of the loss. A loss object is accepted too, and a list with a loss for each
            output.
        structure: Structure of the matrix. ``"kron"`` has a Kronecker product for each layer,
            ``"ekfac"`` its eigenvectors with measured eigenvalues, ``"diagonal"`` the diagonal of
            the Fisher matrix, ``"full"`` the whole matrix of all parameters.
        fisher: Which Fisher matrix: ``"exact"``, an estimate from one ``"sampled"`` target for each
            prediction, or the ``"empirical"`` matrix of the targets of the data.
        biases: Blocks of biases: ``"joint"`` for a block of the weight with its bias,
            ``"separate"`` for a block of the weight and a block of the bias.
        layers: Layers that are measured: ``"all"``, or ``"last"`` for the last layer before each
            loss.
        draws: Targets for ``fisher="sampled"`` in the order of the examples, in place of random
            targets; for several losses by output.
        output: Output that a loss by name reads; by default as for ``Engine.from_onnx``.
        class_axis: Axis of the classes or features in that output. -1 is the axis of the softmax,
            of the channels or of the columns of the operator that computes the classes, and where
            there is no such operator, the last axis.
        trainable: Pattern of the names of parameters to include; by default every constant that the
            graph uses like a parameter. A list may have several patterns.
        freeze: Pattern of the names of parameters to exclude. A list may have several patterns.
        approximations: Approximation by kind of layer, in place of the structure's choice.
        threads: Number of threads, also of ONNX Runtime; by default as many as BLAS uses.
        backend: Array library.
        seed: Seed of sampled targets.
        sample_inputs: Batch from which shapes are inferred, for models whose inputs cannot be
            generated.
        batch_axes: Axis of the examples of an input; by default detected by running the model.
    """

    loss: LossChoices
    structure: str = "kron"
    fisher: str = "exact"
    biases: str = "joint"
    layers: str = "all"
    draws: Array | Mapping[str, Array] | None = None
    output: str | Sequence[str] | None = None
    class_axis: int = -1
    trainable: str | Sequence[str] | None = None
    freeze: str | Sequence[str] | None = None
    approximations: Mapping[str, str] | None = None
    threads: int | None = None
    backend: str = "auto"
    seed: int = 0
    sample_inputs: Mapping[str, Array] | None = None
    batch_axes: Mapping[str, int] | None = None

    def __post_init__(self) -> None:
        """Check the values.

        Raises:
            InputError: An option is outside its range, or two options contradict each other.
        """
        check_choice("structure", self.structure, STRUCTURES)
        check_choice("fisher", self.fisher, FISHERS)
        check_choice("biases", self.biases, BIASES)
        check_choice("layers", self.layers, LAYERS)
        if self.draws is not None and self.fisher != "sampled":
            raise InputError(
                f"draws are targets of fisher='sampled', but fisher is '{self.fisher}'; leave them "
                f"out."
            )
        if self.biases == "separate" and self.structure == "full":
            raise InputError("structure='full' is one matrix, in which no bias is separate.")
        check_mapping("approximations", self.approximations, "{'conv2d': 'diagonal'}")
        if self.approximations and self.structure == "full":
            raise InputError(
                "structure='full' is one matrix, in which no layer has an approximation of its "
                "own; leave approximations out, or choose another structure."
            )
        self.engine  # noqa: B018 (the options of the engine check themselves)

    @property
    def passes(self) -> int:
        """Number of times that the data are read."""
        return 2 if "ekfac" in (self.engine.approximations or {}).values() else 1

    @property
    def engine(self) -> EngineOptions:
        """The options of the engine that measures."""
        return EngineOptions(
            loss=self.loss,
            output=self.output,
            class_axis=self.class_axis,
            reduction="batch_mean",  # the mean over examples of the sum over positions
            trainable=self.trainable,
            freeze=self.freeze,
            estimation_mode=FISHERS[self.fisher],
            approximations=approximations_of(self.structure) | dict(self.approximations or {}),
            threads=self.threads,
            backend=self.backend,
            seed=self.seed,
            sample_inputs=self.sample_inputs,
            batch_axes=self.batch_axes,
        )


def approximations_of(structure: str) -> dict[str, str]:
    """Return the approximation of each kind of layer that has the approximation of a structure.

    Other kinds have the form of a Kronecker product, without blocks for large layers, or keep
    their default.
    """
    chosen = {}
    for kind, row in KINDS.items():
        if structure in row.approximations and structure != row.default:
            chosen[kind] = structure
        elif row.large and row.large != "diagonal":
            chosen[kind] = row.default
    return chosen


def assembled(model: ModelSource, options: CurvatureOptions) -> tuple[Assembly, Fisher]:
    """Return a model with its layers, without statistics, and an estimator of their blocks.

    A loss that is a single number for the whole batch raises an UnsupportedError.
    """
    assembly, estimator = build(model, options.engine)
    assembly.task.require_examples("a curvature needs")
    for term in assembly.task.objective.terms:
        if options.fisher == "sampled" and isinstance(term, OutputLoss):
            raise term.without_distribution()
    if options.layers == "last":
        only = replace(options.engine, trainable=last_layers(assembly), freeze=None)
        assembly, estimator = build(model, only)
    return assembly, estimator


def last_layers(assembly: Assembly) -> list[str]:
    """Return patterns of the parameters of the last layer before each loss, each of one name.

    The last layer is that whose output the graph computes last among the values on which the loss
    depends. A loss that depends on no layer raises a ModelError.
    """
    nodes = assembly.model.graph.nodes
    names: dict[str, None] = {}
    layers = [layer for layer in assembly.discovery.layers if layer.outputs]
    owners = {part.name: name for name, parts in assembly.discovery.parts.items() for part in parts}
    for value in assembly.task.objective.inputs:
        order = {o: i for i, node in enumerate(needed(nodes, (value,))) for o in node.outputs}
        last = max(
            layers,
            key=lambda layer: max(order.get(name, -1) for name in uses(layer.outputs)),
            default=None,
        )
        if last is None or not any(name in order for name in uses(last.outputs)):
            raise ModelError(f"the loss on '{value}' depends on no layer; use layers='all'.")
        names |= dict.fromkeys(escape(owners[name]) for name in last.parameters)
    return list(names)
