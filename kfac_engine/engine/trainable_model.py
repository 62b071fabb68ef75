"""Combines a model with losses, and computes its values and gradients on a batch."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from kfac_engine._types import Array
from kfac_engine.arguments import check_bool, check_int
from kfac_engine.datasets.examples import Batch
from kfac_engine.datasets.forms import Data
from kfac_engine.engine.batch_parts import Inputs
from kfac_engine.engine.batch_passes import BatchPasses
from kfac_engine.engine.build import Assembly
from kfac_engine.engine.curvature_products import CurvatureProducts
from kfac_engine.engine.evaluation import Evaluation
from kfac_engine.engine.memory import require_gradient
from kfac_engine.engine.metrics import MetricChoice
from kfac_engine.engine.report import LossReport, loss_reports
from kfac_engine.engine.result import Result
from kfac_engine.errors import ExportWarning, UnsupportedError, warn
from kfac_engine.graph.analysis.exporter_changes import ExportChanges, Tie, export_changes
from kfac_engine.losses.observed import Targets
from kfac_engine.runtime.trace import Trace
from kfac_engine.sealed import Sealed


class TrainableModel(Sealed):
    """A model with losses, as ``Curvature.model`` has it; ``Engine`` adds curvature.

    Attributes:
        passes: Evaluates and differentiates batches; it has the model and the processes.
        objective: Losses and reduction.
        example_axes: The axes of the examples in inputs and targets.
    """

    def __init__(self, assembly: Assembly) -> None:
        self._assembly, self._model, self._task = assembly, assembly.model, assembly.task
        self.passes = passes = BatchPasses(assembly)
        self.objective, self.example_axes = passes.objective, passes.example_axes
        self._arrays, self._shards, self._history = passes.arrays, passes.shards, passes.history
        self._evaluation = Evaluation(assembly, self._arrays, self.passes.agreement)
        loaded = self._model.loaded
        # Recognized by the values of the file, which a step replaces.
        self._export_changes = export_changes(
            loaded.template, loaded.graph.constants, self._model.parameters
        )
        self._standing_notes = assembly.notes
        self._losses: tuple[LossReport, ...] = ()

    @property
    def name(self) -> str:
        """Name of the model's file, or of its graph for a model that was read from memory."""
        return self._model.loaded.graph.name

    # -- parameters --------------------------------------------------------------------------------

    @property
    def parameters(self) -> dict[str, Array]:
        """Current values by parameter name, read-only; ``set_parameters`` changes values."""
        return self.passes.parameters

    @property
    def buffers(self) -> dict[str, Array]:
        """Running statistics of normalizations in training form by name, read-only."""
        return self._arrays.for_caller(self._model.buffers)

    def set_parameters(self, values: Mapping[str, Array], *, copy: bool = True) -> None:
        """Replace parameter values; the next call uses them, without a new session.

        Args:
            values: Arrays by parameter name, in the parameter's shape, from any library. Real
                numbers of another type, also integers, are converted. Parameters that are absent
                keep their values.
            copy: Whether the values are copied. If False, the engine may store the arrays
                themselves; do not change them afterwards.

        Raises:
            UnknownNameError: A name is not a parameter.
            InputError: An array has no real numbers, or weights that are tied have different
                values.
            ShapeError: A value has another shape than its parameter.
            NonFiniteError: A value contains NaN or infinity. No parameter has changed.
        """
        with self._history.explain():
            self._model.set_parameters(self._arrays.for_model(values), copy=copy)
        self._history.parameters_moved()

    def set_buffers(self, values: Mapping[str, Array]) -> None:
        """Replace running statistics; absent ones keep their values.

        Args:
            values: Arrays by name, in the shape of the buffer, from any library.

        Raises:
            UnknownNameError: A name is not a buffer.
            ShapeError: A value has another shape than its buffer.
            NonFiniteError: A value contains NaN or infinity. No buffer has changed.
        """
        self._arrays.set_buffers(values)

    @property
    def ties(self) -> tuple[Tie, ...]:
        """Weights that equal another weight of the file; ``tie_weights`` trains them as one."""
        return self._arrays.ties()

    def export(self, path: str | Path) -> None:
        """Write the ONNX model of the file with the current parameters and buffers.

        Weights of more than 2 GB are written to a second file in the same folder,
        ``<name>.data``. The first of several processes writes the file.

        Args:
            path: File to write.

        Raises:
            InputError: The file cannot be written.
        """
        with self.passes.agreement.operation("export", ends=True):
            if self.passes.agreement.rank == 0:
                self._arrays.export(path)

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        """Refuse ``copy`` and ``pickle``, because sessions of ONNX Runtime support neither."""
        raise UnsupportedError(
            "an engine cannot be copied or pickled; save its state with engine.save(path), make "
            "another engine with the same options, and load it there."
        )

    # -- values ------------------------------------------------------------------------------------

    def trace(self, inputs: Mapping[str, Array] | Array, targets: Targets = None) -> Trace:
        """Evaluate the model on a batch; no gradient, no statistics.

        ``trace.vjp``, ``trace.jvp`` and ``update_statistics`` start from a trace. Parameters that
        are replaced later do not change it.

        Args:
            inputs: Arrays by input name, in the shapes that the model declares; a model of one
                input takes the array alone.
            targets: The targets of the loss; for several losses, by output. Loss values and the
                mode ``"empirical"`` read them.

        Returns:
            The evaluation. ``trace[name]`` is any value of the graph, in its own shape.

        Raises:
            InputError: An input is missing or of the wrong element type.
            UnknownNameError: A name is not an input, or not an output with a loss.
            ShapeError: An input does not fit its declared shape, or the model runs with another
                number of examples only.
            NonFiniteError: NaN or infinity in an input reaches a value that a loss reads.
        """
        (part,) = self.passes.parts(inputs, targets)
        return self.passes.trace(*part)

    def loss(self, inputs: Inputs, targets: Targets = None) -> float:
        """Return the loss of a batch under the engine's reduction; no gradient, no statistics.

        The value has the same bits as the loss of ``gradients``: normalizations in training form
        use the statistics of the batch. ``evaluate`` uses their running statistics instead.

        Args:
            inputs: As for ``trace``; or a list of the parts of the batch, as for ``gradients``.
            targets: The targets of the loss; for several losses, by output.

        Returns:
            The loss, finite.

        Raises:
            InputError: Inputs or targets are wrong; see ``trace`` for other errors.
            NonFiniteError: The loss is NaN or infinite.
        """
        with self._shards.computing("loss"):
            return self.passes.loss(self.passes.parts(inputs, targets))

    def predict(self, inputs: Data) -> Array | dict[str, Array]:
        """Return the outputs of the model in inference form, with the current parameters.

        ``BatchNormalization`` in training form uses its running statistics (``buffers``), and a
        ``Dropout`` whose training mode is a constant of the file keeps all elements. A training
        mode that is an input has the value that the caller passes. Nodes in the body of a ``Loop``
        or ``Scan`` that was not unrolled run as in ``trace``. Other random operators draw the same
        numbers in each call.

        Args:
            inputs: Inputs of a form of ``fit``, or data of ``fit``, whose targets are not read.

        Returns:
            The output, or arrays by output name for several outputs; new arrays. Outputs that are
            not tensors are left out. Outputs in half precision are float32.

        Raises:
            KfacError: The inputs are wrong, or outputs hold NaN because inputs do; see ``trace``.
        """
        return self._evaluation.predict(inputs)

    def evaluate(
        self, data: Data, metrics: Sequence[MetricChoice] | None = None
    ) -> dict[str, float]:
        """Return metrics of predictions in inference form; see ``predict``.

        ==========================  =============================================================
        metric                      value, over all losses
        ==========================  =============================================================
        ``loss``                    the loss under the engine's reduction
        ``accuracy``                share of predictions whose most probable class is the target
        ``topK``, such as ``top5``  share of predictions with the target among the K most probable
        ``mean_absolute_error``     mean of ``|prediction − target|`` of losses on means
        ``mean_squared_error``      mean of ``(prediction − target)²``; with the prefix ``root_``
                                    its square root
        a function                  mean of ``function(outputs, targets)``, an array with a value,
                                    or a row of values, for each example
        ==========================  =============================================================

        Args:
            data: Data as for ``fit``; files are read in batches of 128 examples. Of several
                processes, each passes its part of the data, or an empty iterable.
            metrics: Names and functions. A function receives the outputs as ``predict`` returns
                them and the targets of a batch, and its value has its name. None for the loss, and
                the accuracy where all targets are discrete.

        Returns:
            Means of the metrics by name, over the predictions of all batches and of all processes.
            A loss under the reduction ``"sum"`` is a sum instead. A loss that the file computes as
            a single number for a batch is a mean weighted by the examples, or a sum if the file
            computes one.

        Raises:
            KfacError: Inputs or targets are wrong (see ``trace``), or the data have no batch.
            UnknownNameError: There is no metric of a name.
            UnsupportedError: A loss does not have the metric, such as the accuracy of means.
            NonFiniteError: A loss is NaN or infinite.
        """
        with self._shards.computing("evaluate"), self._history.explain():
            return self._evaluation.metrics(data, metrics)

    # -- gradients ---------------------------------------------------------------------------------

    def gradients(
        self, inputs: Inputs, targets: Targets = None, *, update_buffers: bool = False
    ) -> Result:
        """Return the loss and the gradients of a batch; no statistics of curvature.

        A batch that does not fit into the memory is given in parts. Each part is differentiated on
        its own, and the result is the same as for the whole batch: reductions divide by the numbers
        of examples and predictions of all parts, which may differ from part to part. Of several
        processes, each passes its examples of every part.

        Args:
            inputs: As for ``trace``; or a list of the parts of the batch, each a pair of inputs
                and targets.
            targets: The targets of the loss; for several losses, by output. None for a list of
                parts.
            update_buffers: Whether ``buffers`` become the running statistics after the batch.

        Returns:
            Loss and gradients; there are no natural gradients.

        Raises:
            InputError: Inputs or targets are wrong; see ``trace`` for other errors.
            NonFiniteError: The loss, a gradient or a running statistic is not finite.
        """
        with self._shards.computing("gradients"):
            parts = self.passes.parts(inputs, targets)
            for of_part, _ in parts:
                require_gradient(self._assembly, of_part)
            moves = check_bool("update_buffers", update_buffers)
            step = self.passes.step_gradients(self.passes.traced(parts), update_buffers=moves)
            in_file = self._model.to_file_layout(step.shard.gradients)
            notes = (*self._standing_notes, *step.notes)
            return Result(step.loss, in_file, {}, notes, ties=self._model.ties)

    def curvature_products(
        self, trace: Trace | Sequence[Batch], examples: int | None = None
    ) -> CurvatureProducts:
        """Return products of the whole Fisher, Gauss–Newton or Hessian matrix of a batch.

        Args:
            trace: The batch, as ``trace`` returns it; or a list of its parts, each a pair of inputs
                and targets, as for ``gradients``. Each product evaluates several parts anew. The
                Hessian matrix needs targets.
            examples: Number of examples of the batch, if the trace has only a part of it. The
                products are then estimates for the whole batch: under the reduction ``"sum"`` they
                are multiplied by the ratio of the numbers.

        Returns:
            Products with vectors that are given by parameter, and quadratic forms.

        Raises:
            InputError: ``examples`` is not a positive whole number.
            KfacError: The values that the losses read do not fit the losses.
        """
        with self.passes.agreement.operation("curvature_products"):
            if examples is not None:
                check_int("examples", examples, least=1)
            batch = trace if isinstance(trace, Trace) else self.passes.parts(trace)
            return self.passes.curvature_products(batch, examples)

    # -- reports -----------------------------------------------------------------------------------

    @property
    def losses(self) -> tuple[LossReport, ...]:
        """A report for each loss: the value that it reads, and the axis of the examples."""
        if not self._losses:
            task = self._task
            self._losses = loss_reports(task.heads, task.batch, self._model, task.inputs)
        return self._losses

    @property
    def export_changes(self) -> ExportChanges:
        """Parameters that an exporter of PyTorch changed, and inputs without readers; ``notes``."""
        return self._export_changes

    # -- private -----------------------------------------------------------------------------------

    def _warn_of_export(self) -> None:
        for note in self.export_changes.notes if self.passes.agreement.rank == 0 else ():
            warn(f"'{self.name}': {note}.", ExportWarning)
