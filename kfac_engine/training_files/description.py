"""Describes training files, as JSON metadata and as text for readers."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from math import prod
from typing import Any

from kfac_engine.errors import InputError
from kfac_engine.graph.structure import Input

# Key of the metadata of the files.
PROPERTY = "kfac_engine.training"
# States: the number of examples of all steps, and of the different ones, which the caller sets.
SEEN, DIFFERENT = "examples seen", "different examples"


@dataclass(frozen=True, slots=True)
class Description:
    """The inputs and outputs of training files."""

    identity: str  # equal in the files of one export
    model: str  # name of the model
    optimizer: str  # name of the optimizer
    options: Mapping[str, Any]  # its options that are not the defaults
    losses: tuple[str, ...]  # name of the class of each loss
    inputs: Mapping[str, int]  # axes of the examples, by input of the model; −1 without
    targets: Mapping[str, int]  # axes of the examples, by input with targets
    outputs: Mapping[str, str]  # the input with the targets of each output of the model, by output
    state: Mapping[str, tuple[int, ...]]  # shapes of the states, by name
    parameters: tuple[str, ...]  # the states that are weights or running statistics of the model
    metrics: tuple[str, ...]  # outputs that are not state
    # Type and shape of each input of a step that is not state, and of ``rate``. A text in a shape
    # is a multiple of the number of examples: ``"batch"`` or ``"4 batch"``.
    data: Mapping[str, Mapping[str, Any]]
    predictions: Mapping[str, Mapping[str, Any]]  # type and shape of each output of the model
    # By input of ``evaluate.onnx``, the output of ``predict.onnx`` that it reads.
    evaluated: Mapping[str, str]
    # Types of the states that are not float32, by name.
    types: Mapping[str, str] = field(default_factory=dict)
    # The state with the number of different examples, which the caller sets; empty if there is
    # none.
    different: str = ""
    # By output of the model, the input with the weights of its targets, if there is one, and the
    # number of axes of this input in a step.
    weights: Mapping[str, tuple[str, int]] = field(default_factory=dict)
    # Shapes of the inputs with random numbers, by name; −1 for the size of the batch, or of the
    # part of it whose statistics a step measures.
    noise: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    # What each factor of the curvature measures, by number of the factor.
    factors: Mapping[str, str] = field(default_factory=dict)
    # Weight, copy in the file, and whether the copy is its transpose.
    ties: tuple[tuple[str, str, bool], ...] = ()
    batch_size: int | None = None  # the only number of examples; None for any

    def properties(self) -> dict[str, str]:
        """Return the metadata of a file."""
        return {PROPERTY: json.dumps(asdict(self))}

    @classmethod
    def read(cls, properties: Mapping[str, str], what: str) -> "Description":
        """Return the description in the metadata of a file, which messages call ``what``.

        A file that is not a training file of this version raises InputError.
        """
        if PROPERTY not in properties:
            raise InputError(
                f"{what} is not a training file; write one with kfac_engine.export_training."
            )
        try:
            entries = json.loads(properties[PROPERTY])
            entries["state"] = {name: tuple(shape) for name, shape in entries["state"].items()}
            entries["ties"] = [tuple(tie) for tie in entries["ties"]]
            tuples = ("losses", "parameters", "metrics", "ties")
            return cls(**{**entries, **{name: tuple(entries[name]) for name in tuples}})
        except (KeyError, TypeError, ValueError, AttributeError) as failure:
            raise InputError(
                f"another version of this library wrote {what}; export the model again."
            ) from failure


_HEAD = """# Training files of {model}

`training.onnx` computes one step of {optimizer}. Any ONNX Runtime executes it; no other library is
needed. kfac_engine wrote the files from a model, and reads the trained state back.

| file | inputs | outputs |
|---|---|---|
| `training.onnx` | a batch, `rate`, the state | {metrics}, `new NAME` for each state NAME |
| `initial.onnx` | none | the first state |
| `predict.onnx` | a batch, the weights | the outputs of the model |
| `evaluate.onnx` | the outputs of `predict.onnx`, targets | sums of metrics |

A step takes the state and returns the new one: the output `new NAME` replaces the input `NAME`.
**An output without entries keeps the old state.** `rate` is the value of a schedule between 0 and
1; 1 is the rate of the options. {finite}

`evaluate.onnx` measures predictions. A metric of several batches is the sum of its `METRIC sum`,
divided by the sum of its `METRIC count` where that is an output and not 0; the ratios of several
losses are added.

## Inputs of a step

| name | type | shape |
|---|---|---|
{inputs}

{size}

## State

{count} arrays with {bytes} in all. Those of the first table are the weights and running statistics
of the model; average them for federated learning, and send them back to write the trained model.

| name | shape |
|---|---|
{parameters}

The others belong to the optimizer.

| name | shape |
|---|---|
{others}
{different}{factors}
## The loop

Without graph optimizations, the session of `training.onnx` is created in a quarter of the time, and
a step takes as long as with them.

JavaScript (`onnxruntime-web`, `onnxruntime-node`):

```js
const options = {{ graphOptimizationLevel: 'disabled' }};
const trainer = await ort.InferenceSession.create('training.onnx', options);
const state = {{ ...(await (await ort.InferenceSession.create('initial.onnx')).run({{}})) }};
for (const batch of batches) {{          // {{{batch}}}
  const rate = new ort.Tensor('float32', [1], []);
  const result = await trainer.run({{ ...batch, rate, ...state }});
  for (const name in state) if (result['new ' + name].size) state[name] = result['new ' + name];
}}
```

Python (`onnxruntime`):

```python
options = onnxruntime.SessionOptions()
options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
trainer = onnxruntime.InferenceSession("training.onnx", options)
first = onnxruntime.InferenceSession("initial.onnx")
state = dict(zip([o.name for o in first.get_outputs()], first.run(None, {{}})))
names = [o.name for o in trainer.get_outputs()]
for batch in batches:  # {{{batch}}}
    feeds = {{**batch, "rate": numpy.array(1, "float32"), **state}}
    result = dict(zip(names, trainer.run(None, feeds)))
    state |= {{n: result["new " + n] for n in state if result["new " + n].size}}
```

C# (`Microsoft.ML.OnnxRuntime`):

```csharp
using var settings = new SessionOptions();
settings.GraphOptimizationLevel = GraphOptimizationLevel.ORT_DISABLE_ALL;
using var trainer = new InferenceSession("training.onnx", settings);
using var first = new InferenceSession("initial.onnx");
using var options = new RunOptions();
var state = first.OutputNames.Zip(first.Run(options, [], [], first.OutputNames))
    .ToDictionary(pair => pair.First, pair => pair.Second);
foreach (var batch in batches) {{        // Dictionary<string, OrtValue> with {batch} and rate
  var feeds = state.Concat(batch).ToDictionary(pair => pair.Key, pair => pair.Value);
  var result = trainer.Run(options, feeds, trainer.OutputNames);
  foreach (var (name, value) in trainer.OutputNames.Zip(result)) {{
    bool isNew = name.StartsWith("new ") && value.GetTensorTypeAndShape().ElementCount > 0;
    if (!isNew) {{ value.Dispose(); continue; }}
    state[name[4..]].Dispose();
    state[name[4..]] = value;
  }}
}}
```

C++ (`onnxruntime_cxx_api.h`). `examples/cpp/train.cpp` of kfac_engine is a whole program. Its
`Names` are those of the inputs or outputs of a session; `view` refers to the memory of a value:

```cpp
Ort::Session trainer(environment, "training.onnx", options);
Ort::Session first(environment, "initial.onnx", options);
Names inputs(trainer, true), outputs(trainer, false), states(first, false);
std::map<std::string, Ort::Value> state;
auto initial = first.Run({{}}, nullptr, nullptr, 0, states.pointers.data(), states.texts.size());
for (size_t i = 0; i < initial.size(); ++i) state.emplace(states.texts[i], std::move(initial[i]));
for (auto& data : batches) {{            // std::map<std::string, Ort::Value>: {batch}, rate
  std::vector<Ort::Value> feeds;
  for (auto& name : inputs.texts)
    feeds.push_back(view(data.count(name) ? data.at(name) : state.at(name)));
  auto results = trainer.Run({{}}, inputs.pointers.data(), feeds.data(), feeds.size(),
                             outputs.pointers.data(), outputs.texts.size());
  for (size_t i = 0; i < results.size(); ++i) {{
    const std::string& name = outputs.texts[i];
    bool changed = results[i].GetTensorTypeAndShapeInfo().GetElementCount() > 0;
    if (name.rfind("new ", 0) == 0 && changed) state.at(name.substr(4)) = std::move(results[i]);
  }}
}}
```

## The state comes home

Write the state to a safetensors file, or send the arrays by name. In Python:

```python
files = kfac_engine.TrainingFiles("this folder", model="{model}")
files.export(state, "trained.onnx")          # the model with its trained weights
engine.set_parameters(files.read(state))     # or on in an engine
```
"""

_FINITE = (
    "If the loss, a gradient or `rate` is not finite, a target is not a class, or `rate` or a "
    "weight is negative, the output `finite` is false and the state stays as it was."
)


_DIFFERENT = """
`different examples` is the only state that you may set: the number of examples of your data, if
you train on them again and again. Few examples shrink the weights more. Its first value, infinity,
is for examples that are new in each step.
"""


def readme(description: Description, data: Sequence[Input]) -> str:
    """Return the text; ``data`` are the inputs of a step that are not state."""
    size = "Every number of examples runs with the same files."
    if description.batch_size is not None:
        size = f"The model runs with {description.batch_size} examples only."
    shapes = dict(description.state)
    numbers = sum(map(prod, shapes.values()))
    parameters = set(description.parameters)
    batch = ", ".join(f"{entry.name}" for entry in data if entry.name != "rate")
    return _HEAD.format(
        model=description.model,
        optimizer=description.optimizer,
        metrics=", ".join(f"`{name}`" for name in description.metrics),
        finite=_FINITE,
        inputs=_table((e.name, str(e.dtype), _spelled(e.shape or ())) for e in data),
        size=size,
        count=len(shapes),
        bytes=f"{4 * numbers / 1e6:.2f} MB",
        parameters=_table((n, _spelled(s)) for n, s in shapes.items() if n in parameters),
        others=_table((n, _spelled(s)) for n, s in shapes.items() if n not in parameters),
        different=_DIFFERENT if DIFFERENT in shapes else "",
        factors=_factors(description),
        batch=batch,
    )


def _factors(description: Description) -> str:
    if not description.factors:
        return ""
    head = "\n`average/K` and `inverse/K` belong to:\n\n| K | what it averages |\n|---|---|\n"
    return head + _table(description.factors.items()) + "\n"


def _table(rows: Iterable[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(_code(cell) for cell in row) + " |" for row in rows]
    return "\n".join(lines) or "| | |"


def _code(cell: str) -> str:
    return f"`{cell}`".replace("|", "\\|")


def _spelled(shape: Sequence[int | str | None]) -> str:
    return " × ".join(map(str, shape)) or "a number"
