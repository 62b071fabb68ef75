"""Train a small CNN on handwritten digits with K-FAC, Muon, Adam and SGD, and compare the losses.

    python examples/digits.py 0 3 4

The arguments are seeds; the default is 0. K-FAC and Muon have the defaults of the library. Adam and
SGD have learning rates that suit these digits. The command `python -m kfac_engine demo` compares
the same optimizers after equal CPU time.
"""

import sys

import numpy as np

import kfac_engine as ke
from kfac_engine.data import demo_model, digits

EPOCHS, HELD_OUT = 5, 360
OPTIMIZERS = {
    "K-FAC": ke.KfacOptimizer,
    "Muon": ke.Muon,
    "Adam": lambda engine: ke.Adam(engine, 0.01),
    "SGD": lambda engine: ke.SGD(engine, 0.1, momentum=0.9),
}

images, labels = digits()
runs = {}
print("seed  method  training loss  held-out loss  accuracy")
for seed in map(int, sys.argv[1:] or ["0"]):
    # %% The seed chooses the held-out digits, the batches and the sampled targets.
    order = np.random.default_rng(seed).permutation(len(labels))
    held_out, training = order[:HELD_OUT], order[HELD_OUT:]
    for name, make in OPTIMIZERS.items():
        engine = ke.Engine.from_onnx(demo_model("cnn"), loss="categorical", seed=seed)
        history = ke.fit(
            engine,
            (images[training], labels[training]),
            optimizer=make(engine),
            epochs=EPOCHS,
            validation=(images[held_out], labels[held_out]),
            metrics=("loss", "accuracy"),
            seed=seed,
        )
        runs[seed, name] = history.records
        last = history.records[-1]
        print(
            f"{seed:4}  {name:6}  {last['loss']:13.4f}  {last['validation_loss']:13.4f}"
            f"  {last['accuracy']:8.3f}"
        )
