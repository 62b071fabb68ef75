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
    return {"1": (a1.T @ a1 / len(x), g1 / len(x)), "2": (a2.T @ a2 / len(x), fisher.mean(0))}


def dense_fisher(theta, x):
    """The whole Fisher matrix, from the Jacobian matrix of the logits of each example."""
    h, z = net.forward(theta, x)
    p, total = net.probabilities(z), 0.0
    for i in range(len(x)):
        outputs = np.eye(net.K)
        ds = theta["w2"] * (1 - h[i] ** 2)
        rows = {"w1": np.einsum("ks,d->ksd", ds, x[i]), "b1": ds,
                "w2": np.einsum("kj,s->kjs", outputs, h[i]), "b2": outputs}  # fmt: skip
        jacobian = np.hstack([rows[name].reshape(net.K, -1) for name in theta])
        total = total + jacobian.T @ (np.diag(p[i]) - np.outer(p[i], p[i])) @ jacobian
    return total / len(x)


def flat(vectors):
    return np.concatenate([array.ravel() for array in vectors.values()])


def oracle(S, n):
    """The part of a matrix, an average of n rows, that the identity replaces (Chen et al. 2010).

    It is the fixed point of their equations 17 to 19.
    """
    p, part, shrunk = len(S), 1.0, S
    for _ in range(10000):
        shrunk = (1 - part) * S + part * np.trace(S) / p * np.eye(p)
        square, of_both = np.trace(shrunk) ** 2, np.trace(shrunk @ S)
        least = (n + 1 - 2 / p) * of_both + (1 - n / p) * square
        before, part = part, min(((1 - 2 / p) * of_both + square) / least, 1.0)
        if part == before:
            break
    return part


def dot(left, right):
    return sum(float((left[name] * right[name]).sum()) for name in left)


@dataclass
class Reference:
    """One optimizer; ``theta`` moves with ``step``."""

    rate: float | None = None  # None for adaptive lengths
    damping: float | None = None
    momentum: float | None = None
    decay: float | None = None
    part: float = 0.25
    every: tuple = (10, 25)
    interval: int | None = None
    length: float = 0.03
    adam_rate: float = 0.004
    quadratic: str = ""  # "both" or "rate": SPEC's types with a solved model
    l2: float = 0.0
    min_damping: float = 1e-8
    smallest: int = 16  # side of matrices whose singular values become equal
    small: int = 64  # side below which an iteration needs ``rows_of_small`` rows
    rows_of_small: int = 512
    narrow: int = 512  # sides of factors whose matrices have a new direction in each step
    cancelled: float = 0.35  # part of independent squares below which averages span more steps
    longest: float = 2.0  # multiple of the usual length that a gradient has in averages
    theta: dict = field(default_factory=net.weights)
    t: int = 0
    log: list = field(default_factory=list)

    def __post_init__(self):
        self.relative = self.rate is None and self.interval is None and not self.quadratic
        self.shrinks = self.relative and self.damping is None
        if self.damping is None:
            self.damping = 0.1 if self.relative else 0.01
        self.follows = self.momentum is None and self.rate is None and not self.quadratic
        if self.momentum is None:
            self.momentum = 0.85 if self.rate is None and not self.quadratic else 0.9
        if self.decay is None:
            # All examples are new.
            self.decay = 0.05 / 4 if self.rate is None and not self.quadratic else 0.0
        self.mu = self.momentum  # of the matrices
        self.powers = {"w1": np.zeros(2), "w2": np.zeros(2)}
        self.natural, self.usual, self.weights = None, None, []
        self.multiples = {"w1": 1.0, "w2": 1.0}
        self.uphill = []
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

    def chosen(self, x, part, t):
        size = max(1, round(len(x) * part))
        counts = [(i + t) * size // len(x) for i in range(len(x) + 1)]
        return x[[i for i in range(len(x)) if counts[i + 1] > counts[i]]]

    def observe(self, x, decay=0.95):
        self.weight = decay * self.weight + 1
        self.counted, seen = len(x) * self.part, self.chosen(x, self.part, self.t)
        for layer, pair in moments(self.theta, seen).items():
            self.sums[layer] = [decay * s + m for s, m in zip(self.sums[layer], pair, strict=True)]

    def damped(self, A, G, damping):
        if self.relative:
            root = np.sqrt(damping)
            levels = [np.full(len(M), np.trace(M) / len(M)) for M in (A, G)]
            if len(A) == net.D + 1:  # the factor of the features of the input, with a one
                a = np.diag(A)[:-1]
                levels[0] = np.append(np.maximum(a, 0.3 * np.median(a)), A[-1, -1])
                if self.shrinks:
                    S = A / np.sqrt(np.outer(levels[0], levels[0]))
                    part = min(oracle(S, self.counted * self.weight), 0.9)
                    levels[0] = levels[0] * (1 + part / (1 - part) / root)
            return tuple(M + root * np.diag(v) for M, v in zip((A, G), levels, strict=True))
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

    def objective(self, theta, x, y):
        return net.loss(theta, x, y) + 0.5 * self.l2 * dot(theta, theta)

    def step(self, x, y, scale=1.0):
        g = net.gradients(self.theta, x, y)
        residuals = net.probabilities(net.forward(self.theta, x)[1]) - np.eye(net.K)[y]
        least_certain = len(x) * (1 - 1 / net.K)
        self.rows = len(x)
        self.signal = min(1, 10 * np.sqrt((residuals**2).sum() / least_certain))
        g = {name: array + self.l2 * self.theta[name] for name, array in g.items()}
        damping, before = self.damping, self.theta
        if self.due(0):
            self.observe(x)
        refreshed = self.due(1)
        if refreshed:
            self.inverses = {
                n: [np.linalg.inv(m) for m in self.damped(*pair, damping)]
                for n, pair in self.matrices().items()
            }
        self.solution = None
        if self.quadratic:
            update = self.solved(g, x, damping, scale)
        else:
            update = (
                self.adaptive(g, scale) if self.rate is None else self.rated(g, self.rate * scale)
            )
        self.theta = {name: value - update[name] for name, value in before.items()}
        ratio = None
        if self.interval and (self.t + 1) % self.interval == 0:
            ratio = self.adapt(x, y, g, before, update)
        self.log.append((damping, ratio, refreshed))
        self.t += 1

    def adapt(self, x, y, g, before, update):
        """SPEC 9.5; returns the reduction ratio."""
        damping = self.damping
        change = self.objective(self.theta, x, y) - self.objective(before, x, y)
        if self.solution is not None:
            model = self.solution[2]
        elif self.rate is None:
            half = 0.5 * dot(update, self.multiply(update, damping))
            share = 1 - self.l2 / damping
            model = half - 0.5 * share * damping * dot(update, update) - dot(g, update)
        else:
            eta = self.eta
            model = 0.5 * eta**2 * dot(self.u, self.v) - eta * dot(self.u, g)
        ratio = change / model
        omega = 0.95**self.interval
        if (change < 0 < model) or ratio > 0.75:
            self.damping *= omega
        elif ratio < 0.25:
            self.damping /= omega
        self.damping = max(self.damping, self.min_damping + self.l2)
        return ratio

    def solved(self, g, x, damping, rescale):
        """SPEC 9.3 and 9.4, with the dense Fisher matrix of a part of the batch."""
        F = dense_fisher(self.theta, self.chosen(x, self.part, self.t))
        p = self.precondition(g)
        d = {name: -v for name, v in self.v.items()}
        X = np.stack([flat({n: u[n] for n in g}) for u in (p, d)], axis=1)
        b = damping * X.T @ X
        m, c = X.T @ F @ X + b, X.T @ flat(g)
        if not c[1]:
            sol = np.array([-c[0] / m[0, 0], 0.0])
        elif self.quadratic == "both":
            sol = np.array([m[0, 1] * c[1] - m[1, 1] * c[0], m[0, 1] * c[0] - m[0, 0] * c[1]])
            sol /= m[0, 0] * m[1, 1] - m[0, 1] ** 2
        else:
            sol = np.array([-(self.momentum * m[0, 1] + c[0]) / m[0, 0], self.momentum])
            surplus = (1 - self.l2 / damping) * 0.5 * sol @ b @ sol
            self.uphill.append(0.5 * sol @ m @ sol - surplus + c @ sol > 0)
            if self.uphill[-1]:
                sol = np.array([-c[0] / m[0, 0], 0.0])
        whole = sol.copy()
        step = {n: rescale * (sol[1] * self.v[n] - sol[0] * p[n]) for n in g}
        norms = {n: max(1.0, np.linalg.norm(self.theta[n])) for n in g}
        sol /= max(1.0, *(np.linalg.norm(step[n]) / norms[n] for n in g))
        s = rescale * sol
        change = 0.5 * s @ m @ s + c @ s - (1 - self.l2 / damping) * 0.5 * s @ b @ s
        self.v = {n: sol[1] * self.v[n] - sol[0] * p[n] for n in g}
        update = {n: rescale * (self.v[n] + self.decay * self.theta[n]) for n in g}
        if self.decay:  # the decay is part of the update, and of its prediction
            u = flat(update)
            change = 0.5 * u @ F @ u + 0.5 * self.l2 * u @ u - flat({n: g[n] for n in g}) @ u
        part = sol[0] / whole[0]
        mu = sol[1] if c[1] or self.quadratic == "both" else part * self.momentum
        self.solution = (-rescale * sol[0], mu, change)
        return update

    def rated(self, g, eta):
        self.eta = eta
        self.v = {n: self.momentum * self.v[n] + g[n] for n in g}
        self.u = self.precondition(self.v)
        return {n: eta * (self.u[n] + self.decay * self.theta[n]) for n in g}

    def multiple(self, n, g, scale):
        """Adapt the length of a matrix to the agreement of the gradient with the last update."""
        if self.natural is None:
            return 1.0
        slope = (self.last_g[n] * self.natural[n]).sum()
        c = (g[n] * self.natural[n]).sum() / slope if slope > 0 else 0.0
        k = self.multiples[n] ** 0.9 * np.exp(0.4 * min(scale, 1) * np.clip(c, -1, 1))
        return float(np.clip(k, 0.1, 20))

    def equalized(self, p, mean):
        """Polynomials of singular values, one for each ``of_one`` rows of the batch."""
        side = min(p.shape)
        if side < self.smallest:
            return p
        of_one = 2 * side if side >= self.small else self.rows_of_small
        u, s, v = np.linalg.svd(p, full_matrices=False)
        s = s / np.sum(s**4) ** 0.25
        for _ in range(min(5, self.rows // of_one)):
            s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
        equal = (u * s) @ v
        return equal if (equal * mean).sum() > 0 else p

    def kept(self, g):
        """Weights of few rows whose directions are those of the last step, every other in turn."""
        if not self.t:
            return set()
        turns = {w: i % 2 for i, (w, _) in enumerate(LAYERS.values())}
        sides = {w: sum(map(len, self.matrices()[n])) for n, (w, _) in LAYERS.items()}
        wide = max(self.rows, self.narrow)
        change = {w: ((g[w] + self.last_g[w]) * self.natural[w]).sum() for w in sides}
        return {
            w
            for w, side in sides.items()
            if side > wide and change[w] >= 0 and (self.t + turns[w]) % 2
        }

    def follow_span(self, g):
        """Averages of more steps where the squared averages are small beside the gradients'."""
        if not self.follows or self.t % 7 != 6:
            return
        for n, powers in self.powers.items():
            powers += 0.3 * (np.array([(g[n] ** 2).sum(), (self.v[n] ** 2).sum()]) - powers)
        part = np.mean([of_mean / of_gradient for of_gradient, of_mean in self.powers.values()])
        rho = (1 + self.mu) / (1 - self.mu) * part
        span = np.exp(0.2 * np.clip(10 * (self.cancelled - rho), -1, 1)) / (1 - self.mu)
        self.mu = 1 - 1 / np.clip(span, 1 / (1 - self.momentum), 20)

    def weigh(self, g):
        """The gradient, not longer than twice the usual length, averaged over the matrices."""
        squares = np.array([(array**2).sum() for array in g.values() if array.ndim == 2])
        if self.usual is None:
            self.usual = squares
        ratio = np.exp(0.5 * np.mean(np.log(squares / self.usual)))
        weight = min(1, self.longest / ratio)
        decay = min(0.9, self.t / (self.t + 1))
        self.usual = decay * self.usual + (1 - decay) * weight**2 * squares
        self.weights.append(weight)
        return {n: weight * array for n, array in g.items()}

    def adaptive(self, g, scale):
        g = self.weigh(g)
        b, decays = self.momentum, {n: self.mu if g[n].ndim == 2 else self.momentum for n in g}
        self.v = {n: b * self.v[n] + (1 - b) * g[n] for n, b in decays.items()}
        self.squares = {n: 0.999 * self.squares[n] + 0.001 * g[n] ** 2 for n in g}
        mean = {n: v / (1 - b ** (self.t + 1)) for n, v in self.v.items()}
        ahead = {n: b * self.v[n] + (1 - b) * g[n] for n, b in decays.items()}  # Nesterov
        p, update = self.precondition({n: m * (m.ndim == 2) for n, m in ahead.items()}), {}
        kept = self.kept(g)
        p = {
            n: self.natural[n] if n in kept else self.equalized(p[n], ahead[n])
            for n in g
            if g[n].ndim == 2
        }
        scale = scale * self.signal
        for n in g:
            if g[n].ndim == 2:  # weights are (out, in)
                self.multiples[n] = self.multiple(n, g, scale)
                wanted = self.multiples[n] * self.length * np.sqrt(len(g[n])) * scale
                update[n] = p[n] / np.linalg.norm(p[n]) * wanted
                update[n] = update[n] + self.length * scale * self.decay * self.theta[n]
            else:
                root = np.sqrt(self.squares[n] / (1 - 0.999 ** (self.t + 1))) + 1e-8
                update[n] = self.adam_rate * scale * (mean[n] / root + self.decay * self.theta[n])
        self.follow_span(g)
        self.natural = p
        self.last_g = {n: self.last_g[n] if n in kept else g[n] for n in g}
        return update
