"""Dense references for the curvature of one layer, written without the library.

Models are plain Equinox models. A layer's parameters are a canonical matrix whose last
column is the bias; its block acts on the row-major `vec` of that matrix. `where(model)`
is the list of the layers that are asked about.
"""

import functools as ft

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np


#
# The loss of one term, as a function of its output vector and its target
#


def softmax(z, t):
    return jax.nn.logsumexp(z) - z[t]


def softmax_probabilities(z, t):
    return jnp.sum(t) * jax.nn.logsumexp(z) - jnp.dot(t, z)


def sigmoid(z, t):
    t = t.astype(z.dtype)
    return -jnp.sum(t * jax.nn.log_sigmoid(z) + (1 - t) * jax.nn.log_sigmoid(-z))


def squared(z, t):
    return 0.5 * jnp.dot(z - t, z - t)


def poisson(z, t):
    return jnp.sum(jnp.exp(z) - t.astype(z.dtype) * z)


def normal(z, t):
    """Of means and log-variances, one after the other."""
    mean, s = jnp.split(z, 2)
    return 0.5 * jnp.sum((t - mean) ** 2 / jnp.exp(s) + s)


def student(z, t):
    """Of three degrees of freedom and the scale 0.7."""
    return jnp.sum(2 * jnp.log(1 + ((t - z) / 0.7) ** 2 / 3) + np.log(0.7))


def huber(z, t):
    """Up to a residual of 0.8, quadratic."""
    size = jnp.abs(t - z)
    return jnp.sum(jnp.where(size <= 0.8, size**2 / 2, 0.8 * (size - 0.4)))


@ft.partial(jax.jit, static_argnums=0)
def slopes(term_loss, z, targets):
    """The gradient of every term, `[terms, k]`."""
    return jax.vmap(jax.grad(term_loss))(z, targets)


@ft.partial(jax.jit, static_argnums=0)
def hessians(term_loss, z, targets):
    """The Hessian of every term, `[terms, k, k]`."""
    return jax.vmap(jax.hessian(term_loss))(z, targets)


#
# Dense blocks
#


def error(a, b):
    """Relative Frobenius error of `a`, as an approximation of `b`."""
    a, b = np.asarray(a), np.asarray(b)
    assert a.shape == b.shape
    return np.linalg.norm(a - b) / np.linalg.norm(b)


def kron(factors):
    """The block that two Kronecker factors denote."""
    return np.kron(np.asarray(factors.output_factor), np.asarray(factors.input_factor))


def parameters(layer, train=("weight", "bias")):
    """The names of the parameters that a layer has, among `train`."""
    return [name for name in train if getattr(layer, name) is not None]


def to_matrix(leaves):
    """Weight `[..., d_out, d_in]` and bias `[..., d_out]` side by side."""
    weight, bias = leaves.get("weight"), leaves.get("bias")
    columns = [] if weight is None else [weight]
    columns += [] if bias is None else [bias[..., None]]
    return jnp.concatenate(columns, axis=-1)


def jacobians(run, model, where, train=("weight", "bias")):
    """For every layer `[terms, k, size]`: how the outputs `run(model)`, of shape
    `[*leading, k]`, change with the canonical matrix."""
    layers = where(model)
    names = [parameters(layer, train) for layer in layers]

    def leaves(model):
        pairs = zip(where(model), names, strict=True)
        return [getattr(layer, name) for layer, row in pairs for name in row]

    def outputs(values):
        z = run(eqx.tree_at(leaves, model, values))
        return z.reshape(-1, z.shape[-1])

    flat = iter(jax.jit(jax.jacobian(outputs))(leaves(model)))
    matrices = [to_matrix({name: next(flat) for name in row}) for row in names]
    return [np.asarray(m.reshape(m.shape[:2] + (-1,))) for m in matrices]


def _per_term(targets, number):
    """Targets of any leading axes, one row per term; integers are classes."""
    rows = targets.reshape(number, -1)
    return rows[:, 0] if jnp.issubdtype(targets.dtype, jnp.integer) else rows


def _terms(run, model, targets, weights):
    z = run(model)
    leading = z.shape[:-1]
    z = z.reshape(-1, z.shape[-1])
    weights = np.ones(leading) if weights is None else np.asarray(weights, float)
    weights = weights.reshape(weights.shape + (1,) * (len(leading) - weights.ndim))
    weights = np.broadcast_to(weights, leading).ravel()
    return z, _per_term(targets, len(z)), weights


def ggn(run, model, where, term_loss, targets, weights=None, train=("weight", "bias")):
    """The Gauss-Newton block of every layer, for the weighted mean of the terms."""
    z, targets, w = _terms(run, model, targets, weights)
    H = np.asarray(hessians(term_loss, z, targets))
    return [
        sum(w[n] * J[n].T @ H[n] @ J[n] for n in range(len(w))) / w.sum()
        for J in jacobians(run, model, where, train)
    ]


def from_partial_traces(F, d_out):
    """The Kronecker product that has the partial traces of a matrix, and its trace."""
    F = F.reshape(d_out, len(F) // d_out, d_out, -1)
    G, A = np.einsum("iaja->ij", F), np.einsum("iaib->ab", F)
    return np.kron(G, A) / np.trace(G)


def empirical(
    run, model, where, term_loss, targets, weights=None, train=("weight", "bias")
):
    """The mean over the terms of the outer products of their gradients."""
    z, targets, w = _terms(run, model, targets, weights)
    g = np.asarray(slopes(term_loss, z, targets))
    blocks = []
    for J in jacobians(run, model, where, train):
        gradients = [J[n].T @ g[n] for n in range(len(w))]
        outer = [w[n] * np.outer(v, v) for n, v in enumerate(gradients)]
        blocks.append(sum(outer) / w.sum())
    return blocks


#
# K-FAC factors by explicit loops
#


class _Probe:
    """In the place of a layer: adds `deltas[use]` to its output, and keeps its input."""

    def __init__(self, layer, deltas):
        self.layer, self.deltas, self.inputs = layer, deltas, []

    def __call__(self, x, *, key=None):
        delta = self.deltas[len(self.inputs)]
        self.inputs.append(jnp.atleast_1d(x))
        z = self.layer(x)
        return z + delta.reshape(z.shape)


def read(one, model, where, examples, uses):
    """For every example `(inputs, z, jacobians)`: per layer what went in, `[uses, d_in]`;
    the outputs of its terms, `[terms, k]`; and per layer how those change with what came
    out of it, `[terms, k, uses, d_out]`. `one(model, example)` computes the outputs of
    one example with Python loops, calling layer `i` of `where` `uses[i]` times."""

    def perturbed(deltas, example):
        probes = [_Probe(m, d) for m, d in zip(where(model), deltas, strict=True)]
        z = one(eqx.tree_at(where, model, probes), example)
        z = z.reshape(-1, z.shape[-1])
        return z, ([jnp.stack(probe.inputs) for probe in probes], z)

    widths = [layer.weight.shape[0] for layer in where(model)]
    zeros = [jnp.zeros((u, d)) for u, d in zip(uses, widths, strict=True)]
    jacobian = jax.jit(jax.jacrev(perturbed, has_aux=True))
    readings = []
    for example in examples:
        J, (inputs, z) = jacobian(zeros, example)
        readings.append((list(map(np.asarray, inputs)), z, list(map(np.asarray, J))))
    return readings


def _homogeneous(x, names):
    columns = [x] if "weight" in names else []
    columns += [np.ones(1)] if "bias" in names else []
    return np.concatenate(columns)


def _exact_cotangents(term_loss, z, targets):
    """One column of a root of one term's Hessian each: the terms are independent."""
    for t, hessian in enumerate(np.asarray(hessians(term_loss, z, targets))):
        values, vectors = np.linalg.eigh(hessian)
        for value, vector in zip(values, vectors.T, strict=True):
            cotangent = np.zeros(z.shape)
            cotangent[t] = np.sqrt(max(value, 0.0)) * vector
            yield cotangent


def _empirical_cotangents(term_loss, z, targets):
    """One for all: the gradient of the sum of the terms of an example."""
    yield np.asarray(slopes(term_loss, z, targets))


def _outer_sum(rows, weight):
    return weight * sum(np.outer(row, row) for row in rows)


def _moments(x, gs, weight, sharing):
    """What one example adds to `Σ x xᵀ`, to its number of rows, and to `Σ g gᵀ`."""
    if sharing == "reduce":
        x = [sum(x) / len(x)]
        gs = [[sum(g)] for g in gs]
    second = _outer_sum(x, weight)
    return second, weight * len(x), sum(_outer_sum(g, weight) for g in gs)


def factors(
    readings,
    term_loss,
    targets,
    *,
    fisher="exact",
    sharing="expand",
    weights=None,
    train=("weight", "bias"),
):
    """`(output_factor, input_factor)` of every layer, one row at a time, from what `read`
    has read. `weights` are one number per example; `train` are the parameters that the
    layers have."""
    cotangents = {"exact": _exact_cotangents, "empirical": _empirical_cotangents}[fisher]
    number, sums = 0.0, [(0.0, 0.0, 0.0) for _ in readings[0][0]]
    for n, (inputs, z, J) in enumerate(readings):
        weight = 1.0 if weights is None else float(weights[n])
        number += weight * len(z)
        pulled = list(cotangents(term_loss, z, _per_term(targets[n], len(z))))
        for i, total in enumerate(sums):
            x = [_homogeneous(v, train) for v in inputs[i]]
            gs = [np.einsum("tk,tkud->ud", c, J[i]) for c in pulled]
            new = _moments(x, gs, weight, sharing)
            sums[i] = tuple(a + b for a, b in zip(total, new, strict=True))
    return [(G / number, A / rows) for A, rows, G in sums]


#
# Damped inverses
#


def pi(output_factor, input_factor):
    """The ratio of the mean eigenvalues of the factors, under a square root."""
    G, A = np.asarray(output_factor), np.asarray(input_factor)
    return np.sqrt((np.trace(A) / len(A)) / (np.trace(G) / len(G)))


def exact_solve(output_factor, input_factor, damping, v):
    """`(G ⊗ A + λ I)⁻¹ vec(v)` by a dense solve."""
    F = np.kron(np.asarray(output_factor), np.asarray(input_factor))
    v = np.asarray(v)
    solution = np.linalg.solve(F + damping * np.eye(len(F)), v.ravel())
    return solution.reshape(v.shape)


def factored_solve(output_factor, input_factor, damping, v, scaled_bias=False):
    """The inverse of `(G + √λ/π I) ⊗ (A + π√λ D)`, by a dense solve. `scaled_bias`: the
    bias is damped as if its input were 3 times as large as the others."""
    G, A = np.asarray(output_factor), np.asarray(input_factor)
    D, data = np.ones(len(A)), A
    if scaled_bias:
        m = np.mean(np.diag(A)[:-1])
        D[-1] = 1 / (3 * m) if 0 < 3 * m < 1 else 1
        data = A[:-1, :-1] if 0 < m < 0.03 * np.mean(np.diag(A)) else A
    ratio, root = pi(G, data), np.sqrt(damping)
    G = G + root / ratio * np.eye(len(G))
    A = A + root * ratio * np.diag(D)
    return exact_solve(G, A, 0.0, v)
