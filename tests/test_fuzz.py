"""Random programs beside a dense oracle: their curvature is right, or they are refused.

A program is a list of stages over a sequence of tokens, each written in one of several
ways (`vmap`, `scan`, `map`, loops, `cond`, `checkpoint`, `jit`, own derivatives),
between a way to go over the batch and a loss, with a block for all layers;
and sometimes a mistake. The oracle is the same mathematics in plain loops over examples
and tokens, with a perturbation at the output of every use of every layer.

    python -m tests.test_fuzz 5000 --seed 1    # more of them, by hand
"""

import collections
import dataclasses
import functools as ft
import importlib
import sys
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqx_kfac as kfac


# Of the first 150, those that bring something that the others have not: every stage,
# written in every way, of every block, loss and way to go over the batch.
SEEDS = (
    *(4, 5, 7, 8, 10, 11, 12, 13, 14, 17, 19, 21, 27, 29, 30, 34, 35, 37, 42, 46, 47, 49),
    *(55, 56, 57, 59, 64, 65, 71, 76, 79, 81, 82, 83, 84, 88, 89, 94, 95, 97, 98, 104),
    *(109, 112, 113, 115, 116, 118, 121, 123, 124, 125, 126, 128, 129, 131, 141, 146),
)
# And of those with arrays of their own.
RAW_SEEDS = (
    *(21, 33, 48, 51, 111, 120, 129, 165, 168, 186, 193, 215, 233, 255, 257, 273, 313),
    *(327, 336, 340, 363, 386),
)
PARTS = 11
TOLERANCE = 1e-9

D = 3  # Of every token.
BLOCKS = {
    "kronecker": kfac.Kronecker(),
    "reduce": kfac.Kronecker(kfac.Reduce()),
    "full": kfac.Full(),
    "diagonal": kfac.Diagonal(),
    "identity": kfac.Identity(),
    "tnt": kfac.TNT(),
    "ekfac": kfac.EKFAC(),
}
STAGES = {  # And the ways to write them.
    "tokenwise": ["vmap", "map", "scan", "loop", "flat scan"],
    "recurrent": ["scan", "loop", "gru"],
    "twice": ["vmap", "loop"],
    "normalised": ["vmap", "loop", "twice"],
    "positions": ["inside", "outside", "parameter"],
    "stacked": ["scan", "index"],
    "condition": ["alike", "each"],
    "mixed": [""],
}
RAW = {
    "raw": [
        *("right", "calls", "vmap", "heads", "slices", "summed", "lookup", "scan"),
        *("stacked", "both ways"),
    ],
}
REDUCIBLE = {
    *(("raw", way) for way in ("right", "vmap", "heads", "slices", "summed", "stacked")),
    *(("tokenwise", "vmap"), ("normalised", "vmap"), ("stacked", "scan")),
    *(("stacked", "index"), ("condition", "alike"), ("condition", "each"), ("mixed", "")),
}
APART = {("condition", "each"), ("positions", "outside")}
WRAPPERS = ["", "jit", "checkpoint", "custom_jvp", "custom_vjp"]
BATCHES = ["vmap", "vmap", "vmap", "map", "loop", "vmap of vmap"]
LOSSES = ["squared", "softmax", "sigmoid", "two"]
MISTAKES = ["raw", "scaled", "derivative", "mean", "noise", "balanced"]


@dataclasses.dataclass(frozen=True)
class Stage:
    kind: str
    way: str
    wrapper: str


@dataclasses.dataclass(frozen=True)
class Program:
    seed: int
    stages: tuple[Stage, ...]
    batch: str
    examples: int
    tokens: int
    loss: str
    weights: str
    block: str
    mistake: str
    jit: bool

    def __str__(self):
        stages = ", ".join(
            "/".join(filter(None, dataclasses.astuple(s))) for s in self.stages
        )
        shape = f"{self.examples}x{self.tokens}"
        parts = [self.batch, shape, self.loss, self.weights, self.block, self.mistake]
        parts.append("" if self.jit else "eager")
        return f"{self.seed}: [{stages}] " + " ".join(filter(None, parts))


def random_program(seed: int, raw: bool = False) -> Program:
    """One with stages that are written with arrays of their own, or without."""
    ways = {**STAGES, **RAW} if raw else STAGES
    rng = np.random.default_rng(seed)

    def one_of(options):
        return options[rng.integers(len(options))]

    block = one_of(list(BLOCKS))
    weights = one_of(["", "", "mask", "weights"])
    # What tells examples apart, is refused where it is not known which axis they are on.
    apart = block != "kronecker" or weights != ""
    easily = apart and rng.random() < 0.8
    stages = []
    for _ in range(rng.integers(1, 4)):
        kind = one_of([*STAGES, *["raw"] * len(STAGES)] if raw else list(STAGES))
        wrapper = one_of(WRAPPERS) if rng.random() < 0.4 else ""
        stage = Stage(kind, one_of(ways[kind]), wrapper)
        if not (easily and (wrapper == "custom_vjp" or (kind, stage.way) in APART)):
            stages.append(stage)
    if block == "reduce":  # What it averages is told by how a stage is written.
        stages = [s for s in stages if (s.kind, s.way) in REDUCIBLE]
    return Program(
        seed=seed,
        stages=tuple(stages),
        batch="vmap" if easily else one_of(BATCHES),
        examples=one_of([1, 3, 4]),
        tokens=one_of([1, 3]),
        loss=one_of(LOSSES),
        weights=weights,
        block=block,
        mistake=one_of(MISTAKES) if rng.random() < 0.15 else "",
        jit=rng.random() < 0.95,  # Compiled one operation after the other takes longer.
    )


#
# The model, and the program as a user writes it.
#


class Model(eqx.Module):
    stages: list
    head: eqx.nn.Linear


class Raw(eqx.Module):
    """A stage that is written with arrays."""

    w: jax.Array
    v: jax.Array
    b: jax.Array
    way: str = eqx.field(static=True)

    def __init__(self, way: str, key: Any):
        keys = jax.random.split(key, 3)
        several = (2,) if way in ("slices", "stacked") else ()
        shape = (D, D, 1) if way == "heads" else (D, D)
        self.w = 0.5 * jax.random.normal(keys[0], (*several, *shape))
        self.v = 0.5 * jax.random.normal(keys[1], (D, D))
        self.b = 0.5 * jax.random.normal(keys[2], (*several, D))
        self.way = way

    def __call__(self, h):
        w, v, b = self.w, self.v, self.b
        match self.way:
            case "right" | "calls":
                return jnp.tanh(h @ w + b[None])
            case "vmap":
                return jax.vmap(lambda t: jnp.tanh(w @ t + b))(h)
            case "heads":
                z = jnp.einsum("td,dhk->thk", h, w) + b.reshape(D, 1)[None]
                return jnp.tanh(z.reshape(h.shape))
            case "slices":
                for i in range(2):
                    h = jnp.tanh(h @ w[i].T + b[i][None])
                return h
            case "summed":
                return jnp.tanh(h @ (0.5 * (w - 2 * v.T)) + b[None])
            case "lookup":
                return jnp.tanh(h + w[self.words(h)]) @ v
            case "scan":
                step = lambda s, t: (jnp.tanh(w @ t + v @ s + b),) * 2
                return jax.lax.scan(step, b, h)[1]
            case "stacked":
                step = lambda h, own: (jnp.tanh(h @ own[0] + own[1][None]), None)
                return jax.lax.scan(step, h, (w, b))[0]
        return jnp.tanh(jnp.tanh(h @ w) @ w.T + b[None])

    def words(self, h):
        return (h[:, 0].real > 0).astype(int)


def make_model(program: Program, key: Any) -> Model:
    linear = lambda key, bias=True: eqx.nn.Linear(D, D, use_bias=bias, key=key)
    made = []
    for i, stage in enumerate(program.stages):
        a, b = jax.random.split(jax.random.fold_in(key, i))
        match stage.kind, stage.way:
            case "recurrent", "gru":
                made.append(eqx.nn.GRUCell(D, D, key=a))
            case "recurrent", _:
                made.append([linear(a), linear(b, bias=False)])
            case "normalised", _:
                norm = eqx.nn.LayerNorm(D)
                noise = 0.3 * jax.random.normal(a, (2, D))
                made.append(
                    eqx.tree_at(
                        lambda m: (m.weight, m.bias), norm, (1 + noise[0], noise[1])
                    )
                )
            case "positions", "parameter":
                made.append(jax.random.normal(a, (program.tokens, D)))
            case "positions", _:
                made.append(eqx.nn.Embedding(program.tokens, D, key=a))
            case "stacked", _:
                made.append(eqx.filter_vmap(linear)(jax.random.split(a, 2)))
            case "mixed", _:
                made.append(None)
            case "raw", way:
                made.append(Raw(way, a))
            case _:
                made.append(linear(a))
    return Model(made, linear(jax.random.fold_in(key, 99)))


def converted(program: Program, model: Model) -> Model:
    model = kfac.convert(model, blocks=BLOCKS[program.block])

    def tag(m):
        if isinstance(m, Raw):
            example = jax.ShapeDtypeStruct((program.tokens, D), float)
            return kfac.convert(m, BLOCKS[program.block], example=example)
        return kfac.Parameter(m) if isinstance(m, jax.Array) else m

    return eqx.tree_at(lambda m: m.stages, model, list(map(tag, model.stages)))


def identity_jvp(fn):
    @jax.custom_jvp
    def wrapped(*args):
        return fn(*args)

    wrapped.defjvp(lambda primals, tangents: jax.jvp(fn, primals, tangents))
    return wrapped


def wrap(wrapper: str, layer: Any, fn: Any) -> Any:
    """`fn(layer, tokens)`, wrapped in something that does not change it."""
    arrays, static = eqx.partition(layer, eqx.is_array)
    pure = lambda arrays, h: fn(eqx.combine(arrays, static), h)
    match wrapper:
        case "jit":
            return ft.partial(jax.jit(pure), arrays)
        case "checkpoint":
            return ft.partial(jax.checkpoint(pure), arrays)
        case "custom_jvp":
            return ft.partial(identity_jvp(pure), arrays)
        case "custom_vjp":
            wrapped = jax.custom_vjp(pure)
            wrapped.defvjp(lambda *args: jax.vjp(pure, *args), lambda back, g: back(g))
            return ft.partial(wrapped, arrays)
    return ft.partial(fn, layer)


def written(stage: Stage, layer: Any, h: Any, outside: Any) -> Any:
    """One stage, as it is written."""
    match stage.kind, stage.way:
        case "tokenwise", "vmap":
            return jnp.tanh(jax.vmap(layer)(h))
        case "tokenwise", "map":
            return jnp.tanh(jax.lax.map(layer, h))
        case "tokenwise", "scan":
            return jax.lax.scan(lambda c, t: (c, jnp.tanh(layer(t))), None, h)[1]
        case "tokenwise", "flat scan":
            step = lambda i, h: h.at[i].set(jnp.tanh(layer(h[i])))
            return jax.lax.fori_loop(0, len(h), step, h)
        case "tokenwise", "loop":
            return jnp.stack([jnp.tanh(layer(t)) for t in h])
        case "recurrent", way:
            if way == "gru":
                step = lambda s, t: (layer(t, s),) * 2
            else:
                step = lambda s, t: (jnp.tanh(layer[0](s) + layer[1](t)),) * 2
            state = jnp.zeros(D)
            if way == "scan":
                return jax.lax.scan(step, state, h)[1]
            states = []
            for t in h:
                state, _ = step(state, t)
                states.append(state)
            return jnp.stack(states)
        case "twice", "vmap":
            return jax.vmap(lambda t: layer(jnp.tanh(layer(t))))(h)
        case "twice", "loop":
            return jnp.stack([layer(jnp.tanh(layer(t))) for t in h])
        case "normalised", "vmap":
            return jax.vmap(layer)(h)
        case "normalised", "loop":
            return jnp.stack([layer(t) for t in h])
        case "normalised", "twice":
            return jax.vmap(lambda t: layer(jnp.tanh(layer(t))))(h)
        case "positions", "inside":
            return jnp.tanh(h + jax.vmap(layer)(jnp.arange(len(h))))
        case "positions", "outside":
            return jnp.tanh(h + outside)
        case "positions", "parameter":
            return jnp.tanh(h + (layer if isinstance(layer, jax.Array) else layer(h)))
        case "stacked", "scan":
            params, static = eqx.partition(layer, eqx.is_array)
            step = lambda h, p: (jnp.tanh(jax.vmap(eqx.combine(p, static))(h)), None)
            return jax.lax.scan(step, h, params)[0]
        case "stacked", "index":
            for i in range(2):
                own = jax.tree.map(lambda a, i=i: a[i], eqx.filter(layer, eqx.is_array))
                own = eqx.combine(own, layer)
                h = jnp.tanh(jax.vmap(own)(h))
            return h
        case "condition", way:
            pick = jnp.sum(h) > 0 if way == "each" else jnp.array(True)
            yes = lambda h: jnp.tanh(jax.vmap(layer)(h))
            return jax.lax.cond(pick, yes, lambda h: 0.5 * h, h)
        case "raw", "calls":
            return jnp.concatenate([layer(t[None]) for t in h])
        case "raw", _:
            return layer(h)
        case _:
            return h + jnp.mean(h, axis=0, keepdims=True)


def loss_of(program: Program, outputs: Any, y: Any, weights: Any) -> Any:
    match program.loss:
        case "softmax":
            return kfac.SoftmaxCrossEntropy(outputs, jnp.argmax(y, -1), weights)
        case "sigmoid":
            return kfac.SigmoidCrossEntropy(outputs, (y > 0).astype(float), weights)
        case "two":
            first = kfac.SquaredError(outputs, y, weights)
            return first + 0.5 * kfac.SoftmaxCrossEntropy(
                outputs, jnp.argmax(y, -1), weights
            )
    return kfac.SquaredError(outputs, y, weights)


def loss_fn(model: Model, program: Program, x: Any, y: Any, weights: Any) -> Any:
    if program.mistake == "scaled":
        model = eqx.tree_at(lambda m: m.head.weight, model, replace_fn=lambda w: 2 * w)
    if program.mistake == "noise":
        leaves, treedef = jax.tree.flatten(eqx.filter(model, eqx.is_inexact_array))
        keys = jax.random.split(jax.random.key(0), len(leaves))
        noisy = [a + 0.1 * jax.random.normal(k, a.shape) for a, k in zip(leaves, keys)]
        model = eqx.combine(jax.tree.unflatten(treedef, noisy), model)
    outside = [
        jax.vmap(layer)(jnp.arange(program.tokens))
        if (stage.kind, stage.way) == ("positions", "outside")
        else None
        for stage, layer in zip(program.stages, model.stages, strict=True)
    ]

    def one(h):
        for stage, layer, own in zip(program.stages, model.stages, outside, strict=True):
            fn = lambda layer, h, stage=stage, own=own: written(stage, layer, h, own)
            h = wrap(stage.wrapper, layer, fn)(h)
        out = model.head(jnp.mean(h, axis=0))
        if program.mistake == "raw":
            out = out + model.head.weight @ h[0]
        return out

    if program.mistake == "derivative":
        plain = one
        slope = jax.grad(lambda h: jnp.sum(plain(h)))
        one = lambda h: plain(h) + jnp.sum(slope(h))
    match program.batch:
        case "vmap":
            outputs = jax.vmap(one)(x)
        case "vmap of vmap":
            outputs = jax.vmap(lambda h: jax.vmap(one)(h[None])[0])(x)
        case "map":
            outputs = jax.lax.map(one, x)
        case _:
            outputs = jnp.stack([one(h) for h in x])
    loss = loss_of(program, outputs, y, weights)
    arrays = jax.tree.leaves(eqx.filter(model, eqx.is_inexact_array))
    if program.mistake == "mean":
        loss = loss + sum(jnp.mean(a) for a in arrays) / len(arrays)
    if program.mistake == "balanced":
        inner = lambda m: loss_fn(
            m, dataclasses.replace(program, mistake=""), x, y, weights
        )
        grads = eqx.filter_grad(lambda m: inner(m).value)(model)
        norm = sum(jnp.sum(a**2) for a in jax.tree.leaves(grads))
        loss = loss * jax.lax.stop_gradient(1 / (1 + norm))
    return loss


#
# The oracle: plain loops in NumPy, with complex steps for exact derivatives.
#


STEP = 1e-30


class Taps:
    """Uses of layers, one after the other: what went in, and a perturbation of what comes
    out of one of them."""

    def __init__(self, use: int | None = None, perturbation: Any = 0.0):
        self.use, self.perturbation = use, perturbation
        self.inputs = []  # (path, input)

    def __call__(self, path: str, x: Any, y: Any) -> Any:
        self.inputs.append((path, x))
        return y + self.perturbation if len(self.inputs) - 1 == self.use else y


def plain(model: Model, program: Program, h: Any, taps: Taps) -> Any:
    """The outputs of one example; the model's arrays are NumPy's."""

    def linear(path, layer, t):
        y = layer.weight @ t + (0 if layer.bias is None else layer.bias)
        return taps(path, t, y)

    def norm(layer, t):
        centred = t - np.mean(t)
        scaled = centred / np.sqrt(np.mean(centred**2) + layer.eps)
        return layer.weight * scaled + layer.bias

    def gru(cell, t, state):
        sigmoid = lambda a: 1 / (1 + np.exp(-a))
        a, b, c = np.split(cell.weight_ih @ t + cell.bias, 3)
        d, e, f = np.split(cell.weight_hh @ state, 3)
        new = np.tanh(c + sigmoid(a + d) * (f + cell.bias_n))
        return new + sigmoid(b + e) * (state - new)

    def raw(at, m, h):
        w, v, b = m.w, m.v, m.b
        name = lambda leaf: f"{at}['{leaf}']"
        match m.way:
            case "right" | "calls":
                return [np.tanh(taps(name("w"), t, t @ w + b)) for t in h]
            case "vmap":
                return [np.tanh(taps(name("w"), t, w @ t + b)) for t in h]
            case "heads":
                return [np.tanh(taps(name("w"), t, t @ w[..., 0] + b)) for t in h]
            case "slices":
                for j in range(2):
                    own = name(f"w[{j}:{j + 1}, :, :]")
                    h = [np.tanh(taps(own, t, w[j] @ t + b[j])) for t in h]
                return h
            case "summed":
                h = [(t, taps(name("w"), 0.5 * t, 0.5 * t @ w + b)) for t in h]
                return [np.tanh(taps(name("v"), -t, z - v @ t)) for t, z in h]
            case "lookup":
                words = m.words(np.stack(list(h)))
                rows = [taps(name("w"), np.eye(D)[i], w[i]) for i in words]
                h = [np.tanh(t + row) for t, row in zip(h, rows, strict=True)]
                return [taps(name("v"), t, t @ v) for t in h]
            case "scan":
                state, states = b, []
                for t in h:
                    z = taps(name("w"), t, w @ t) + taps(name("v"), state, v @ state)
                    state = np.tanh(z + b)
                    states.append(state)
                return states
            case "stacked":
                for j in range(2):
                    own = name("w") + f"/{j}"
                    h = [np.tanh(taps(own, t, t @ w[j] + b[j])) for t in h]
                return h
        h = [np.tanh(taps("(both ways)", t, t @ w)) for t in h]
        return [np.tanh(t @ w.T + b) for t in h]

    for i, (stage, layer) in enumerate(zip(program.stages, model.stages, strict=True)):
        at = f".stages[{i}]"
        match stage.kind:
            case "tokenwise":
                h = np.stack([np.tanh(linear(at, layer, t)) for t in h])
            case "recurrent":
                state, states = np.zeros(D), []
                for t in h:
                    if stage.way == "gru":
                        state = gru(layer, t, state)
                    else:
                        a = linear(at + "[0]", layer[0], state)
                        state = np.tanh(a + linear(at + "[1]", layer[1], t))
                    states.append(state)
                h = np.stack(states)
            case "twice":
                h = [linear(at, layer, t) for t in h]
                h = np.stack([linear(at, layer, np.tanh(t)) for t in h])
            case "normalised":
                if stage.way == "twice":
                    h = [np.tanh(norm(layer, t)) for t in h]
                h = np.stack([norm(layer, t) for t in h])
            case "positions":
                if stage.way == "parameter":
                    table = layer.value
                else:
                    unit = np.eye(len(h))
                    table = [taps(at, unit[j], layer.weight[j]) for j in range(len(h))]
                h = np.tanh(h + np.stack(list(table)))
            case "stacked":
                for j in range(2):
                    own = jax.tree.map(
                        lambda a, j=j: a[j], eqx.filter(layer, eqx.is_array_like)
                    )
                    h = np.stack([np.tanh(linear(f"{at}/{j}", own, t)) for t in h])
            case "condition":
                if stage.way == "alike" or np.sum(h).real > 0:
                    h = np.stack([np.tanh(linear(at, layer, t)) for t in h])
                else:
                    h = 0.5 * h
            case "raw":
                h = np.stack(list(raw(at, layer, h)))
            case _:
                h = h + np.mean(h, axis=0)
    return linear(".head", model.head, np.mean(h, axis=0))


@dataclasses.dataclass
class Oracle:
    """For every example: what goes into the uses of layers; for every column of a root of
    the output Fisher, the gradients at what comes out of them, and of the model."""

    paths: list[str]
    inputs: list[Any]  # Of every row.
    gradients: list[Any]  # [columns, rows, D]
    models: list[Any]  # With an axis of columns first.
    weights: Any
    count: float


def fisher_root(program: Program, out: Any) -> Any:
    softmax = np.exp(out) / np.sum(np.exp(out))
    p = 1 / (1 + np.exp(-out))
    categorical = (np.eye(D) - softmax[:, None]) * np.sqrt(softmax)
    match program.loss:
        case "softmax":
            return categorical
        case "sigmoid":
            return np.diag(np.sqrt(p * (1 - p)))
        case "two":
            return np.concatenate([np.eye(D), 0.5**0.5 * categorical], axis=1)
    return np.eye(D)


def derivatives(fn: Any, shape: tuple[int, ...]) -> Any:
    """The derivatives of `fn` in every entry of an argument of that shape, at zero, along
    the last axis: [outputs, *shape]."""
    units = np.eye(int(np.prod(shape))).reshape(-1, *shape)
    columns = [fn(1j * STEP * unit).imag / STEP for unit in units]
    return np.stack(columns, axis=-1).reshape(-1, *shape)


def oracle(program: Program, model: Model, x: Any, weights: Any) -> Oracle:
    w = np.ones(len(x)) if weights is None else np.asarray(weights, dtype=float)
    params, static = eqx.partition(model, eqx.is_inexact_array)
    leaves, treedef = jax.tree.flatten(jax.tree.map(np.asarray, params))
    rebuilt = lambda leaves: eqx.combine(treedef.unflatten(leaves), static)
    model = rebuilt(leaves)
    found = Oracle([], [], [], [], w, float(np.sum(w)))
    for h, w_n in zip(np.asarray(x), w, strict=True):
        taps = Taps()
        out = plain(model, program, h, taps)
        paths, inputs = zip(*taps.inputs, strict=True)
        root = np.sqrt(w_n) * fisher_root(program, out)

        def through(use, v, h=h):
            return plain(model, program, h, Taps(use, v))

        def moved(i, v, h=h):
            new = [*leaves[:i], leaves[i] + v, *leaves[i + 1 :]]
            return plain(rebuilt(new), program, h, Taps())

        at_taps = [derivatives(ft.partial(through, k), (D,)) for k in range(len(inputs))]
        of_model = [
            derivatives(ft.partial(moved, i), leaf.shape) for i, leaf in enumerate(leaves)
        ]
        found.paths.append(paths)
        found.inputs.append(inputs)
        found.gradients.append(np.einsum("kc,rko->cro", root, np.stack(at_taps)))
        rows = [np.tensordot(root.T, d, axes=1) for d in of_model]
        found.models.append(treedef.unflatten(rows))
    return found


def moments(
    found: Oracle, path: str, bias: bool, average: bool
) -> tuple[Any, Any] | None:
    """The two Kronecker factors of the layer at `path`."""
    a, g, weight = 0.0, 0.0, 0.0
    quads = zip(found.paths, found.inputs, found.gradients, found.weights, strict=True)
    for paths, inputs, gradients, w in quads:
        own = np.array([p == path for p in paths])
        if not own.any():
            continue
        x = np.stack([a for a, o in zip(inputs, own) if o])
        g_n = np.asarray(gradients)[:, own]
        if bias:
            x = np.concatenate([x, np.ones((len(x), 1))], axis=1)
        if average:
            x, g_n = x.mean(0, keepdims=True), g_n.sum(1, keepdims=True)
        a, weight = a + w * x.T @ x, weight + w * len(x)
        g = g + np.einsum("cro,crp->op", g_n, g_n)
    if np.ndim(a) == 0:
        return None  # No example uses it.
    return a / weight if weight > 0 else 0 * a, g / found.count


def close(a: Any, b: Any) -> bool:
    a, b = np.asarray(a), np.asarray(b)
    return np.linalg.norm(a - b) <= TOLERANCE * max(np.linalg.norm(b), 1e-3)


def wrong(program: Program, found: Oracle, model: Any, curvature: Any) -> list[str]:
    """The layers whose curvature is not what it should be."""
    bad = []
    layers = zip(
        kfac._tag.trained_layers(model),
        kfac._tag.flatten_tags(lambda tag, layer, f: f, model, curvature)[0],
        strict=True,
    )
    for (path, tag, layer), (_, factors) in layers:
        gradients = [
            dict(
                kfac._tag.flatten_tags(lambda t, m: jax.vmap(t.form.to_matrix)(m), own)[0]
            )
            for own in (eqx.combine(m, model_like(model)) for m in found.models)
        ]
        matrices = np.concatenate([np.asarray(g[path]) for g in gradients])
        if matrices.ndim == 3:
            matrices = matrices[:, None]
            factors = jax.tree.map(lambda a: np.asarray(a)[None], factors)
        for j in range(matrices.shape[1]):
            at = f"{path}/{j}" if matrices.shape[1] > 1 else path
            own = jax.tree.map(lambda a, j=j: np.asarray(a)[j], factors)
            if not is_right(program, found, at, tag, layer, own, matrices[:, j]):
                bad.append(at)
    return bad


def model_like(model: Any) -> Any:
    return eqx.filter(model, eqx.is_inexact_array, inverse=True)


def is_right(program, found, path, tag, layer, factors, matrices) -> bool:
    flat = matrices.reshape(len(matrices), -1)
    exact = flat.T @ flat / found.count
    match type(tag.block).__name__:
        case "Full":
            return close(factors.matrix, exact)
        case "Diagonal":
            return close(factors.diagonal.reshape(-1), np.diag(exact))
        case "Identity":
            return close(factors.scale, np.trace(exact) / len(exact))
        case "TNT":
            left = np.einsum("cij,ckj->ik", matrices, matrices) / found.count
            right = np.einsum("cji,cjk->ik", matrices, matrices) / found.count
            trace = np.trace(left)
            right = right / (trace if trace > 0 else 1)
            return close(factors.output_factor, left) and close(
                factors.input_factor, right
            )
        case "Kronecker" if tag.block.sharing.joint and factors.input_factor.ndim == 2:
            left = np.einsum("cij,ckj->ik", matrices, matrices) / found.count
            right = np.einsum("cji,cjk->ik", matrices, matrices) / found.count
            trace = max(np.trace(left), 1e-300)
            product = np.kron(factors.output_factor, factors.input_factor)
            if close(product, np.kron(left, right / trace)):
                return True
        case "EKFAC":
            if not close(np.sum(factors.eigenvalues), np.trace(exact)):
                return False
    if isinstance(tag.form, kfac.form.Gates):  # Its maps are inside of the cell.
        return True
    if getattr(tag.block, "tied", False):  # Its uses are of two kinds.
        return True
    average = program.block == "reduce"
    bias = getattr(layer, "bias", None) is not None
    if isinstance(tag.form, kfac.form.View):
        bias = tag.form.bias is not None
    expected = moments(found, path, bias, average)
    if expected is None:
        return close(factors.output_factor, 0 * factors.output_factor)
    a, g = expected
    input_factor = factors.input_factor
    if input_factor.ndim == 1:
        input_factor = np.diag(input_factor)
    return close(input_factor, a) and close(factors.output_factor, g)


#
# A program is right, or refused.
#


def both(tagged: Model, model: Model, args: Any) -> tuple[Any, Any]:
    """What the library says of a program, and what JAX says of it without tags."""
    estimate = kfac.value_grad_and_curvature(loss_fn, kfac.Exact())
    ours = estimate(tagged, *args)
    plain = eqx.filter_value_and_grad(lambda m: loss_fn(m, *args).value)
    return ours, plain(model)


def is_differentiable(model: Any, args: Any) -> bool:
    """Whether JAX accepts a program, without tags."""
    try:
        eqx.filter_grad(lambda m: loss_fn(m, *args).value)(model)
    except Exception:
        return False
    return True


def check(program: Program) -> str:
    """What came of a program: `right`, `named`, `refused`; or that it is `of no use`."""
    rng = np.random.default_rng(program.seed)
    model = make_model(program, jax.random.key(program.seed))
    x = jax.device_put(rng.normal(size=(program.examples, program.tokens, D)))
    y = jax.device_put(rng.normal(size=(program.examples, D)))
    index = np.arange(program.examples) % 3
    weights = {
        "": None,
        "mask": jnp.asarray(index != 1),
        "weights": jnp.asarray(1.0 + index),
    }[program.weights]
    tagged = converted(program, model)
    args = program, x, y, weights
    run = eqx.filter_jit(both) if program.jit else both
    try:
        ours, of_plain = run(tagged, model, args)
    except (ValueError, TypeError) as error:
        said = str(error) + "".join(getattr(error, "__notes__", ()))
        named = "`.head" in said or "`.stages[" in said or "The loss function" in said
        if not (named or is_differentiable(model, args)):
            return "of no use"
        assert named, f"{program} is refused, but no layer is named: {said}"
        return "refused"
    value, grads, curvature = ours
    plain_value, plain_grads = of_plain
    assert close(value, plain_value), f"{program}: another value"
    pairs = zip(jax.tree.leaves(grads), jax.tree.leaves(plain_grads), strict=True)
    assert all(close(a, b) for a, b in pairs), f"{program}: another gradient"
    if program.mistake == "scaled":
        report = kfac.verify(loss_fn, tagged, *args)
        assert np.all(report[".head"].unseen > 0.1), f"{program}: not named"
        return "named"
    if program.mistake == "derivative":  # None at all; but the oracle knows no such rows.
        report = kfac.verify(loss_fn, tagged, *args)
        unseen = [layer.path for layer in report.layers if np.any(layer.unseen > 1e-8)]
        assert not unseen, f"{program}: gradients of {unseen} are not seen"
        exact = program.block != "full" or report[".head"].error < 1e-8
        assert exact, f"{program} is silently wrong"
        return "right"
    found = oracle(program, tagged, x, weights)
    bad = wrong(program, found, tagged, curvature)
    assert not bad, f"{program} is silently wrong at {bad}"
    return "right"


@pytest.mark.parametrize("part", range(PARTS))
def test_random_programs(part):
    outcomes = collections.Counter()
    for seed in SEEDS[part::PARTS]:
        outcomes[check(random_program(seed))] += 1
    for seed in RAW_SEEDS[part::PARTS]:
        outcomes[check(random_program(seed, raw=True))] += 1
    assert outcomes["right"] > sum(outcomes.values()) / 5  # Not all is refused.


def test_programs_have_everything():
    programs = [random_program(seed) for seed in SEEDS]
    stages = [stage for program in programs for stage in program.stages]
    found = {(stage.kind, stage.way) for stage in stages}
    assert found == {(kind, way) for kind, ways in STAGES.items() for way in ways}
    assert {stage.wrapper for stage in stages} == set(WRAPPERS)
    options = dict(
        batch=BATCHES,
        examples=[1, 3, 4],
        tokens=[1, 3],
        loss=LOSSES,
        weights=["", "mask", "weights"],
        block=BLOCKS,
        mistake=["", *MISTAKES],
        jit=[True, False],
    )
    for name, every in options.items():
        assert {getattr(program, name) for program in programs} == set(every)
    stages = [
        (program.block, stage.way)
        for program in (random_program(seed, raw=True) for seed in RAW_SEEDS)
        for stage in program.stages
        if stage.kind == "raw"
    ]
    assert {block for block, _ in stages} == set(BLOCKS)
    assert {way for _, way in stages} == set(RAW["raw"])
    # And of every block with every loss and weights.
    for other in ("loss", "weights"):
        pairs = {(program.block, getattr(program, other)) for program in programs}
        assert len(pairs) == len(BLOCKS) * len(set(options[other]))


def main(number: int, start: int) -> None:
    """Goes through many programs, every second one with arrays of its own, and tells what
    came of them."""
    outcomes, failures = collections.Counter(), []
    for i, seed in enumerate(range(start, start + number)):
        program = random_program(seed, raw=i % 2 == 1)
        try:
            outcomes[check(program)] += 1
        except Exception as error:
            failures.append(f"{program}\n    {type(error).__name__}: {error}")
            print(failures[-1][:600], flush=True)
        if i % 50 == 49:
            print(f"{i + 1}: {dict(outcomes)}, {len(failures)} failures", flush=True)
            jax.clear_caches()  # A process may hold only so many compiled functions.
    print(f"{number} programs: {dict(outcomes)}, {len(failures)} failures")


if __name__ == "__main__":
    importlib.import_module("tests.conftest")  # The settings of the tests.
    arguments = dict(zip(sys.argv[2::2], sys.argv[3::2]))
    main(int(sys.argv[1]), int(arguments.get("--seed", 0)))
