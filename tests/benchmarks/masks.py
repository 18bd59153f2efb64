"""Which inputs count under a mask: Kronecker blocks beside exact ones, written without
the library, at random weights.

    python -m tests.benchmarks.masks

For every case and three ways to count rows (by their weights alone, all alike, and as the
library does): the mean over layers of the cosine with the exact block, the least one, and
the geometric mean of the ratio of traces.
"""

import jax
import jax.numpy as jnp
import numpy as np


D, V, K, B, T = 6, 9, 5, 5, 12
LENGTHS = np.array([12, 3, 6, 4, 8])
PADDED = np.arange(T) < LENGTHS[:, None]
CAUSAL = np.broadcast_to(np.tril(np.ones((T, T), bool)), (B, T, T))


class Tap:
    """Applies layers; keeps their inputs, and shifts their outputs."""

    def __init__(self, layers, shifts=None):
        self.layers, self.shifts, self.inputs = layers, shifts, {}

    def __call__(self, name, x):
        x = jnp.concatenate([x, jnp.ones(x.shape[:-1] + (1,))], axis=-1)
        self.inputs[name] = x
        z = x @ self.layers[name].T
        return z if self.shifts is None else z + self.shifts[name]


def normed(x):
    x = x - jnp.mean(x, axis=-1, keepdims=True)
    return x / jnp.sqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-5)


def transformer(tap, h, sees):
    for i in range(2):
        u = normed(h)
        q, k, v = (tap(f"{i}.{name}", u) for name in "qkv")
        scores = jnp.einsum("bqd,bkd->bqk", q, k) * 1.5 / np.sqrt(D)
        mixed = jax.nn.softmax(jnp.where(sees, scores, -1e30)) @ v
        h = h + tap(f"{i}.o", mixed)
        h = h + tap(f"{i}.down", jax.nn.gelu(tap(f"{i}.up", normed(h))))
    return tap("head", normed(h))


def transformer_layers(rng):
    sizes = {f"{i}.{name}": (D, D) for i in range(2) for name in "qkvo"}
    for i in range(2):
        sizes |= {f"{i}.up": (D, 10), f"{i}.down": (10, D)}
    return dense(rng, sizes | {"head": (D, K)})


def dense(rng, sizes):
    return {
        name: rng.normal(size=(d_out, d_in + 1)) / np.sqrt(d_in)
        for name, (d_in, d_out) in sizes.items()
    }


#
# Cases: layers, a function of a tap, and the weights
#


def perceptron(rng):
    """Whole examples are padding."""
    weights = (np.arange(20) < 12).astype(float)
    x = np.where(weights[:, None] > 0, rng.normal(size=(20, D)), 3.0)
    layers = dense(rng, {"0": (D, 8), "1": (8, 8), "2": (8, K)})

    def run(tap):
        return tap("2", jnp.tanh(tap("1", jnp.tanh(tap("0", x)))))

    return layers, run, weights


def sequences(rng, sees, weights, filler, scale=0.5):
    """Where `filler` is true, the token is a special one."""
    tokens = np.where(filler, 0, rng.integers(1, V, (B, T)))
    embedding = rng.normal(size=(V, D))
    if scale < 0.5:
        embedding[0] = 0.0
    h = embedding[tokens] + scale * rng.normal(size=(T, D))
    run = lambda tap: transformer(tap, h, sees)
    return transformer_layers(rng), run, weights.astype(float)


def bidirectional(rng):
    return sequences(rng, PADDED[:, None, :], PADDED, ~PADDED)


def causal(rng):
    return sequences(rng, CAUSAL, PADDED, ~PADDED)


def prompts(rng):
    """No loss in the first half."""
    answers = PADDED & (np.arange(T) >= LENGTHS[:, None] // 2)
    return sequences(rng, CAUSAL, answers, ~PADDED)


def masked(rng, scale=0.5):
    labelled = np.argsort(rng.uniform(size=(B, T)), axis=1) < 2
    return sequences(rng, np.ones((B, T, T), bool), labelled, labelled, scale)


def masked_zero(rng):
    """What is labelled has an input near zero, as in ESM2."""
    return masked(rng, scale=0.05)


def graph(rng, n=60):
    classes = rng.integers(3, size=n)
    likely = np.where(classes[:, None] == classes, 0.15, 0.01)
    edges = np.triu(rng.uniform(size=(n, n)) < likely, 1)
    A = edges + edges.T + np.eye(n)
    A = A / np.sqrt(np.sum(A, axis=1)[:, None] * np.sum(A, axis=1))
    x = rng.normal(size=(n, D)) + 2 * np.eye(D)[classes]
    layers = dense(rng, {"0": (D, 8), "1": (8, 8), "2": (8, K)})
    weights = np.zeros(n)
    weights[rng.choice(n, 6, replace=False)] = 1.0

    def run(tap):
        h = jax.nn.relu(A @ tap("0", x))
        return A @ tap("2", jax.nn.relu(A @ tap("1", h)))

    return layers, run, weights


#
# Exact blocks, and Kronecker factors
#


def cotangents(run, layers, weights):
    """For every layer, its inputs `[rows, d_in]` and the gradients `[c, rows, d_out]`, of
    every column of a root of the Fisher."""
    tap = Tap(layers)
    z = np.asarray(run(tap)).reshape(-1, K)
    inputs = {name: np.asarray(x) for name, x in tap.inputs.items()}
    zeros = {
        name: jnp.zeros(x.shape[:-1] + (len(layers[name]),)) for name, x in inputs.items()
    }
    jacobian = jax.jacrev(lambda shifts: run(Tap(layers, shifts)).reshape(-1, K))
    p = np.asarray(jax.nn.softmax(z))
    roots = (np.eye(K) - p[:, :, None]) * np.sqrt(p)[:, None, :]
    roots = roots * np.sqrt(weights.reshape(-1))[:, None, None]
    for name, J in jax.jit(jacobian)(zeros).items():
        x = inputs[name].reshape(-1, inputs[name].shape[-1])
        J = np.asarray(J).reshape(len(z), K, len(x), -1)
        g = np.einsum("tkc,tkrd->tcrd", roots, J)
        yield x, g.reshape(-1, *g.shape[2:])


def influence(weights, sizes):
    """How much rows count, given the sizes of their gradients."""
    shape = (len(weights), -1) if weights.ndim > 1 else (1, -1)
    w, sizes = weights.reshape(shape), sizes.reshape(shape)
    own = w > 0
    total, there = (np.sum(a * own, axis=1, keepdims=True) for a in (w, sizes))
    mean = total / np.maximum(np.sum(own, axis=1, keepdims=True), 1)
    relative = np.where(there > 0, sizes * total / np.where(there > 0, there, 1), np.inf)
    relative = np.where(sizes > 0, np.minimum(relative, mean), 0)
    return np.where(own, w, relative).reshape(-1)


def compare(x, g, weights):
    """Cosine and ratio of traces, for three ways to count rows."""
    gradients = np.einsum("crd,ri->cdi", g, x)
    G = np.einsum("crd,cre->de", g, g)
    F = np.einsum("cai,cbj->abij", gradients, gradients)
    sizes = np.sum(g**2, axis=(0, 2))
    for w in (weights.reshape(-1), np.ones(len(x)), influence(weights, sizes)):
        A = np.einsum("r,ri,rj->ij", w, x, x) / np.sum(w)
        dot = np.einsum("abij,ab,ij->", F, G, A)
        norms = np.linalg.norm(F) * np.linalg.norm(G) * np.linalg.norm(A)
        yield dot / norms, np.trace(G) * np.trace(A) / np.einsum("aaii->", F)


def main():
    cases = perceptron, bidirectional, causal, prompts, masked, masked_zero, graph
    print("| case | by the weights alone | all alike | by gradients, too |")
    print("|---|---|---|---|")
    for case in cases:
        results = []
        for seed in range(5):
            layers, run, weights = case(np.random.default_rng(seed))
            rows = cotangents(run, layers, weights)
            results += [list(compare(x, g, weights)) for x, g in rows]
        cosine, trace = np.moveaxis(np.array(results), -1, 0)
        cells = [
            f"{np.mean(c):.2f} ({np.min(c):.2f}); {np.exp(np.mean(np.log(t))):.2f}"
            for c, t in zip(cosine.T, trace.T, strict=True)
        ]
        print(f"| {case.__name__} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    jax.config.update("jax_enable_x64", True)
    main()
