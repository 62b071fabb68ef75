"""K-FAC training of the two-layer net in float64: statistics, inverses and updates, in one file.

Follows the papers and the specification, not the code: packed matrices ``(in + 1, out)``, dense
inverses, one dictionary of state. The Fisher matrix of the logits is exact, so nothing is drawn.
"""

from dataclasses import dataclass, field

import numpy as np

from tests.training import softmax_net as net

LAYERS = {"1": ("w1", "b1"), "2": ("w2", "b2")}


def pack(vectors, layer):
    w, b = LAYERS[layer]
    return np.vstack([vectors[w].T, vectors[b]])


def unpack(packed):
    vectors = {}
    for layer, (w, b) in LAYERS.items():
        vectors[w], vectors[b] = packed[layer][:-1].T, packed[layer][-1]
    return vectors


def moments(theta, x):
    """Second moments of inputs with a one, and of gradients at pre-activations, by layer."""
    h, z = net.forward(theta, x)
    p = net.probabilities(z)
    fisher = np.einsum("ni,ij->nij", p, np.eye(net.K)) - np.einsum("ni,nj->nij", p, p)
    jacobian = np.einsum("kh,nh->nkh", theta["w2"], 1 - h**2)
    ones = np.ones((len(x), 1))
    a1, a2 = np.hstack([x, ones]), np.hstack([h, ones])
    g1 = np.einsum("nia,nij,njb->ab", jacobian, fisher, jacobian)
    return {
        "1": (a1.T @ a1 / len(x), g1 / len(x)),
        "2": (a2.T @ a2 / len(x), fisher.mean(0)),
    }


def dot(left, right):
    return sum(float((left[name] * right[name]).sum()) for name in left)


@dataclass
class Reference:
    """One optimizer; ``theta`` moves with ``step``."""

    rate: float | None = None  # None for adaptive lengths
    damping: float | None = None
    momentum: float = 0.9
    decay: float = 0.0
    regular: bool = False
    constraint: float | None = None
    part: float = 0.25
    every: tuple = (5, 25)
    interval: int | None = None
    length: float = 0.025
    adam_rate: float = 0.004
    theta: dict = field(default_factory=net.weights)
    t: int = 0
    log: list = field(default_factory=list)

    def __post_init__(self):
        self.relative = self.rate is None and self.interval is None
        if self.damping is None:
            self.damping = 0.1 if self.relative else 0.01
        self.natural = None
        self.multiples = {"w1": 1.0, "w2": 1.0}
        self.sums = {layer: [0.0, 0.0] for layer in LAYERS}
        self.weight = 0.0
        self.last = [None, None]
        self.v = {name: np.zeros_like(value) for name, value in self.theta.items()}
        self.squares = {name: np.zeros_like(value) for name, value in self.theta.items()}

    def due(self, which):
        last = self.last[which]
        due = last is None or self.t - last >= min(self.every[which], max(1, self.t // 2))
        if due:
            self.last[which] = self.t
        return due

    def matrices(self):
        return {n: [s / self.weight for s in self.sums[n]] for n in LAYERS}

    def observe(self, x):
        size = max(1, round(len(x) * self.part))
        start = min(self.t * size % len(x), len(x) - size)
        self.weight = 0.95 * self.weight + 1
        for layer, pair in moments(self.theta, x[start : start + size]).items():
            self.sums[layer] = [0.95 * s + m for s, m in zip(self.sums[layer], pair, strict=True)]

    def damped(self, A, G, damping):
        if self.relative:
            return tuple(
                M + np.sqrt(damping) * np.trace(M) / len(M) * np.eye(len(M)) for M in (A, G)
            )
        pi = np.sqrt((np.trace(A) / len(A)) / (np.trace(G) / len(G)))
        root = np.sqrt(damping)
        return A + pi * root * np.eye(len(A)), G + root / pi * np.eye(len(G))

    def precondition(self, vectors):
        packed = {}
        for layer, (A, G) in self.inverses.items():
            packed[layer] = A @ pack(vectors, layer) @ G
        return unpack(packed)

    def multiply(self, vectors, damping):
        packed = {}
        for layer, pair in self.matrices().items():
            A, G = self.damped(*pair, damping)
            packed[layer] = A @ pack(vectors, layer) @ G
        return unpack(packed)

    def step(self, x, y, scale=1.0):
        g = net.gradients(self.theta, x, y)
        damping, before = self.damping, self.theta
        if self.due(0):
            self.observe(x)
        refreshed = self.due(1)
        if refreshed:
            self.inverses = {
                n: [np.linalg.inv(m) for m in self.damped(*pair, damping)]
                for n, pair in self.matrices().items()
            }
        update = self.adaptive(g, scale) if self.rate is None else self.rated(g, self.rate * scale)
        self.theta = {name: value - update[name] for name, value in before.items()}
        ratio = None
        if self.interval and (self.t + 1) % self.interval == 0:
            change = net.loss(self.theta, x, y) - net.loss(before, x, y)
            if self.rate is None or self.regular:
                half = 0.5 * dot(update, self.multiply(update, damping))
                model = half - 0.5 * damping * dot(update, update) - dot(g, update)
            else:
                eta = self.rate * scale
                model = 0.5 * eta**2 * dot(self.u, self.v) - eta * dot(self.u, g)
            ratio = change / model
            omega = 0.95**self.interval
            if (change < 0 < model) or ratio > 0.75:
                self.damping *= omega
            elif ratio < 0.25:
                self.damping /= omega
        self.log.append((damping, ratio, refreshed))
        self.t += 1

    def clip(self, p, vector, eta):
        product = eta**2 * dot(p, vector)
        if self.constraint is None:
            return p
        factor = min(1.0, np.sqrt(self.constraint / product))
        return {name: factor * array for name, array in p.items()}

    def rated(self, g, eta):
        if self.regular:
            p = self.clip(self.precondition(g), g, eta)
            self.v = {n: self.momentum * self.v[n] + p[n] for n in g}
            self.u = self.v
        else:
            self.v = {n: self.momentum * self.v[n] + g[n] for n in g}
            self.u = self.clip(self.precondition(self.v), self.v, eta)
        return {n: eta * (self.u[n] + self.decay * self.theta[n]) for n in g}

    def multiple(self, n, g, scale):
        """Adapt the length of a matrix to the agreement of the gradient with the last update."""
        if self.natural is None:
            return 1.0
        slope = (self.last_g[n] * self.natural[n]).sum()
        c = (g[n] * self.natural[n]).sum() / slope if slope > 0 else 0.0
        k = self.multiples[n] ** 0.9 * np.exp(0.4 * min(scale, 1) * np.clip(c, -1, 1))
        return float(np.clip(k, 0.1, 20))

    def adaptive(self, g, scale):
        b = self.momentum
        self.v = {n: b * self.v[n] + (1 - b) * g[n] for n in g}
        self.squares = {n: 0.999 * self.squares[n] + 0.001 * g[n] ** 2 for n in g}
        mean = {n: v / (1 - b ** (self.t + 1)) for n, v in self.v.items()}
        p, update = self.precondition(mean), {}
        for n in g:
            if g[n].ndim == 2:  # weights are (out, in)
                self.multiples[n] = self.multiple(n, g, scale)
                wanted = self.multiples[n] * self.length * np.sqrt(len(g[n])) * scale
                update[n] = p[n] / np.linalg.norm(p[n]) * wanted
                update[n] = update[n] + self.length * scale * self.decay * self.theta[n]
            else:
                root = np.sqrt(self.squares[n] / (1 - 0.999 ** (self.t + 1))) + 1e-8
                update[n] = self.adam_rate * scale * (mean[n] / root + self.decay * self.theta[n])
        self.natural, self.last_g = p, g
        return update
