"""The help texts of the options of an engine on the command line, by field of its records.

They are no docstrings, because ``python -OO`` removes docstrings.
"""

from collections.abc import Mapping

TEXTS: Mapping[str, str] = {
    "loss": "Name of the loss.",
    "output": "Output that a loss by name reads; by default the only output of the model.",
    "class_axis": "Axis of the classes or features in that output.",
    "find_logits": "Let a loss on probabilities read the logits from which the model computes "
    "them.",
    "loss_weights": "Factor of each loss; by default 1.",
    "ignore_index": "Target that does not count; by default -100 for classes and binary targets.",
    "class_weights": "File with a weight ≥ 0 for the targets of each class, .npy or numbers as "
    "text.",
    "positive_weights": "File with the weight ≥ 0 of targets of 1 of a sigmoid loss, one or one "
    "for each feature.",
    "label_smoothing": "Part of each target, in [0, 1), that is divided among all classes.",
    "reduction": "Reduction of the loss over examples and positions.",
    "trainable": "Pattern of the names of parameters to train; by default every constant that the "
    "graph uses like a parameter.",
    "freeze": "Pattern of the names of parameters to exclude from training.",
    "gradient_dtype": "Element type of the gradients and parameters of a half-precision model: "
    "that of the file, or float32.",
    "tie_weights": "Train weights that are equal in the file as one parameter.",
    "batch_axes": "Axis of the examples of an input; by default detected by running the model.",
    "train_form": "Put the normalizations and dropouts of a model that was exported for inference "
    "into training form.",
    "damping": "Damping λ > 0, added to the Fisher matrix.",
    "ema_decay": "Decay of the moving averages, in [0, 1).",
    "estimation_mode": "Estimation mode of the Fisher matrix.",
    "approximations": "Approximation of a kind of layer, in place of the default.",
    "seed": "Seed of sampled targets.",
    "structure": "Structure of the matrix.",
    "fisher": "Which Fisher matrix: exact, an estimate from one sampled target for each "
    "prediction, or the empirical matrix of the targets of the data.",
    "biases": "Blocks of biases: joint for a block of the weight with its bias, separate for a "
    "block of the weight and a block of the bias.",
    "layers": "Layers that are measured: all, or last for the last layer before each loss.",
    "covariance_every": "Number of calls from one update of the covariances to the next: they are "
    "updated when counter % covariance_every == 0.",
    "refresh_every": "Number of calls from one refresh of a factor to the next.",
    "policy": "Which factors a call refreshes.",
    "drift": "Relative change of an average since the latest refresh, from which the policy drift "
    "refreshes the factor.",
    "budget": "Largest share of refreshes in the time of all calls, in (0, 1), with the policy "
    "budget.",
    "periods": "Period of the factors of parameters whose names match a pattern, in place of "
    "--refresh-every.",
    "threads": "Number of threads, also of ONNX Runtime; by default that of BLAS.",
    "scratch_bytes": "Bound of the temporary memory of a statistic or of a gradient of convolution "
    "weights; by default 64 MiB, on a GPU 256 MiB.",
    "backend": "Array library.",
    "graph_passes": "Graph passes that make sessions faster or smaller.",
}
# Those of a measurement of curvature that differ.
CURVATURE_TEXTS: Mapping[str, str] = {
    "trainable": "Pattern of the names of parameters to include; by default every constant that "
    "the graph uses like a parameter.",
    "freeze": "Pattern of the names of parameters to exclude.",
    "approximations": "Approximation of a kind of layer, in place of that of the structure.",
    "scratch_bytes": "Bound of the temporary memory of a statistic; by default 64 MiB.",
}
