"""A Flower app that trains a file federated: the devices average weights and, on request, factors.

Each device has training files, its data and ONNX Runtime. ``README.md`` has the commands.
"""

import json
from pathlib import Path

import numpy as np
from device import Arrays, Device, batches_of, evaluate, split
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

client = ClientApp()
server = ServerApp()


def record(arrays: Arrays) -> ArrayRecord:
    """Return arrays as Flower sends them."""
    return ArrayRecord({name: Array(np.asarray(a, order="C")) for name, a in arrays.items()})


def arrays_of(record: ArrayRecord) -> Arrays:
    """Return the arrays of a record by name."""
    return {name: array.numpy() for name, array in record.items()}


@client.train()
def train(message: Message, context: Context) -> Message:
    """Take the steps of a round; the state of the optimizer stays on the device."""
    options, place = context.run_config, context.node_config
    device = Device(Path(str(options["files"])), bool(options["factors"]))
    if "state" in context.state:
        device.state |= arrays_of(context.state["state"])
    with np.load(str(options["data"])) as data:
        part = split(data["targets"], int(place["parts"]), bool(options["skewed"]))
        own = {name: data[name][part[int(place["part"])]] for name in data.files}
    seed = 1000 * int(place["part"]) + int(device.state["step"])
    batches = batches_of(own, int(options["steps"]), int(options["batch-size"]), seed)
    new = device.train(arrays_of(message.content["arrays"]), batches)
    context.state["state"] = record(device.state)
    metrics = MetricRecord({"num-examples": len(own["targets"])})
    content = RecordDict({"arrays": record(new), "metrics": metrics})
    return Message(content=content, reply_to=message)


@server.main()
def main(grid: Grid, context: Context) -> None:
    """Average what the devices return, and measure it on data that no device has."""
    options = context.run_config
    folder = Path(str(options["files"]))
    first = Device(folder, bool(options["factors"]))
    with np.load(str(options["held-out"])) as data:
        held_out = {name: data[name] for name in data.files}
    records = []

    def measured(number: int, arrays: ArrayRecord) -> MetricRecord:
        metrics = evaluate(folder, arrays_of(arrays), held_out)
        records.append({"round": number, **metrics})
        return MetricRecord(metrics)

    strategy = FedAvg(
        fraction_evaluate=0.0,
        min_train_nodes=int(options["devices"]),
        min_available_nodes=int(options["devices"]),
    )
    start = record({name: first.state[name] for name in first.shared})
    rounds = int(options["rounds"])
    strategy.start(grid, start, num_rounds=rounds, evaluate_fn=measured)
    Path(str(options["result"])).write_text(json.dumps(records))
