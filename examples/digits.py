"""Train a small CNN on handwritten digits with SGD, Adam and K-FAC, and compare the losses.

    python examples/digits.py 0 3 4

The arguments are seeds of the batches; the default is 0. SGD and Adam run with a learning rate that
suits most seeds, K-FAC with the defaults of the library. The command `python -m kfac_engine demo`
makes the same comparison for one seed and searches nine learning rates of SGD and of Adam. The
training loops of both are in `kfac_engine/cli/comparison.py`, where a wheel has them too.
"""

import sys

from kfac_engine.cli.comparison import METHODS, Digits, train
from kfac_engine.data import demo_model, digits

STEPS, TARGET = 60, 0.1
SETTINGS = {
    "SGD": {"learning rate": 0.4},
    "Adam": {"learning rate": 0.02},
    "K-FAC": {"KL clip": 0.003},
}

print("seed  method  steps to 0.1  training loss  held-out loss")
runs = {}
for seed in map(int, sys.argv[1:] or ["0"]):
    # %% Five epochs in batches of 128; 261 digits are held out.
    data = Digits.draw(*digits(), STEPS, seed)
    for name, setting in SETTINGS.items():
        run = train(demo_model("cnn"), METHODS[name], setting, data, seed)
        runs[seed, name] = run
        steps = run.steps_to(TARGET) or "never"
        print(f"{seed:4}  {name:6}  {steps:>12}  {run.final_loss:13.4f}  {run.held_out_loss:13.4f}")
