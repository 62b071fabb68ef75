"""The app of Flower trains a file over four processes, with the numbers of the loop in one process.

``make test-flower`` installs flwr into an environment of its own and runs this test. Flower's own
client, server and strategy run; a pipe to each process takes the place of its network.
"""

import json
import multiprocessing
import sys
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import pytest

import kfac_engine as ke
from kfac_engine.data import demo_model
from scripts.browser_files import TRAIN, shuffled

flwr = pytest.importorskip("flwr")

APP = Path(__file__).resolve().parent.parent.parent / "examples" / "flower"
DEVICES, ROUNDS, STEPS, BATCH = 4, 3, 5, 64


def identify(node):
    """Say which task a process is, as the processes of Flower do."""
    from flwr.supercore.task_identity import TaskIdentity

    TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, 1, node


def serve_node(connection, node, options):
    """Answer the messages of the server in a process of its own, whose context has the state."""
    sys.path.insert(0, str(APP))
    import app
    from flwr.app import Context, RecordDict
    from flwr.common.serde import message_from_proto, message_to_proto
    from flwr.proto.message_pb2 import Message

    identify(node)
    place = {"part": node, "parts": DEVICES}
    context = Context(1, node, place, RecordDict(), options)
    while data := connection.recv_bytes():
        reply = app.client(message_from_proto(Message.FromString(data)), context)
        connection.send_bytes(message_to_proto(reply).SerializeToString())


@contextmanager
def nodes(options):
    """Connections to processes with a node each."""
    spawn, processes, connections = multiprocessing.get_context("spawn"), [], []
    with ExitStack() as stack:
        for node in range(DEVICES):
            here, there = spawn.Pipe()
            process = spawn.Process(target=serve_node, args=(there, node, options), daemon=True)
            process.start()
            stack.callback(process.join, 30)
            processes.append(process)
            connections.append(here)
        try:
            yield connections
        finally:
            for connection in connections:
                connection.send_bytes(b"")


def served(options):
    """Run the server of the app on the nodes."""
    from flwr.app import Context, RecordDict
    from flwr.common.serde import message_from_proto, message_to_proto
    from flwr.proto.message_pb2 import Message
    from flwr.serverapp import Grid

    identify(DEVICES)
    with nodes(options) as connections:

        class Pipes(Grid):
            def get_node_ids(self):
                return list(range(DEVICES))

            def send_and_receive(self, messages, **_):
                numbers = []
                for message in messages:
                    numbers.append(message.metadata.dst_node_id)
                    connections[numbers[-1]].send_bytes(
                        message_to_proto(message).SerializeToString()
                    )
                replies = [connections[number].recv_bytes() for number in numbers]
                return [message_from_proto(Message.FromString(reply)) for reply in replies]

            set_run = run = create_message = push_messages = pull_messages = None

        import app

        app.server(Pipes(), Context(1, 0, {}, RecordDict(), options))


def in_one_process(device, folder, train, held_out, factors):
    parts = device.split(train["targets"], DEVICES, skewed=True)
    devices = [device.Device(folder, factors) for _ in parts]
    shared = {name: devices[0].state[name] for name in devices[0].shared}
    losses = [device.evaluate(folder, shared, held_out)["loss"]]
    sizes = np.array([len(part) for part in parts], float)
    for number in range(ROUNDS):
        returned = []
        for i, (one, part) in enumerate(zip(devices, parts, strict=True)):
            own = {name: array[part] for name, array in train.items()}
            batches = device.batches_of(own, STEPS, BATCH, 1000 * i + STEPS * number)
            returned.append(one.train(shared, batches))
        shared = {
            name: np.average([a[name] for a in returned], axis=0, weights=sizes).astype(np.float32)
            for name in shared
        }
        losses.append(device.evaluate(folder, shared, held_out)["loss"])
    return losses


@pytest.mark.filterwarnings("ignore")  # of Flower's dependencies
@pytest.mark.parametrize("factors", [False, True])
def test_four_processes_have_the_losses_of_one(factors, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(APP))
    import device

    files = ke.export_training(demo_model("cnn"), path=tmp_path / "train")
    images, labels = shuffled()
    train = {"image": images[:TRAIN], "targets": labels[:TRAIN]}
    held_out = {"image": images[TRAIN:], "targets": labels[TRAIN:]}
    np.savez(tmp_path / "data.npz", **train)
    np.savez(tmp_path / "held_out.npz", **held_out)
    options = {
        "files": str(files.folder),
        "data": str(tmp_path / "data.npz"),
        "held-out": str(tmp_path / "held_out.npz"),
        "result": str(tmp_path / "rounds.json"),
        "factors": factors,
        "skewed": True,
        "devices": DEVICES,
        "rounds": ROUNDS,
        "steps": STEPS,
        "batch-size": BATCH,
    }
    served(options)
    records = json.loads((tmp_path / "rounds.json").read_text())
    assert [record["round"] for record in records] == list(range(ROUNDS + 1))
    expected = in_one_process(device, files.folder, train, held_out, factors)
    # The server adds the arrays in another order, and the steps multiply the rounding.
    np.testing.assert_allclose([r["loss"] for r in records], expected, rtol=1e-2)
    assert expected[-1] < (0.8 if factors else 2)  # from 2.3
