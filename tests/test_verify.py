"""The tools that look at a model's curvature: they find what is wrong, and only that."""

import dataclasses
import functools as ft
import re
import sys

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
import tqdm

import eqx_kfac as kfac
from eqx_kfac.debug import _fold, _parts, _plan, _spectra, _verify

from .helpers import assert_differs, assert_near, normal
from .plain import plain_kfac


N, D, K = 5, 3, 2
X = normal(N, D, seed=8)
CLASSES = jax.device_put(np.random.default_rng(2).integers(K, size=N))
WEIGHTS = jax.device_put(np.array([1.0, 0.0, 2.0, 0.5, 3.0]))
KEY = jr.key(0)


@eqx.filter_jit
def mlp(block=None):
    plain = eqx.nn.MLP(D, K, 4, 1, jnp.tanh, key=KEY)
    return kfac.convert(plain, blocks=block)


def softmax(model, x, y, w=None):
    return kfac.SoftmaxCrossEntropy(jax.vmap(model)(x), y, w)


def squared(model, x):
    y = jax.vmap(model)(x)
    y = y.reshape(len(x), -1)
    return kfac.SquaredError(y, jnp.ones(y.shape))


#
# Right ones
#


class Blocked(eqx.Module):
    weight: jax.Array
    bias: jax.Array
    tag: kfac.Tag

    def __init__(self):
        self.weight = normal(2, 2, D, seed=1)
        self.bias = normal(2, 2, seed=2)
        self.tag = kfac.Tag(kfac.form.Einsum("hdi,i->hd"), kfac.Kronecker())

    def __call__(self, x):
        y = jnp.einsum("hdi,i->hd", self.weight, x) + self.bias
        return self.tag(y, x)


def layer(cls, *args, **kwargs):
    return cls(*args, key=KEY, **kwargs)


one, one_class = (jax.device_put(np.asarray(a)[:1]) for a in (X, CLASSES))
image = normal(1, 2, 3, 3, seed=4)
ONE_EXAMPLE = {
    "dense": (lambda: layer(kfac.Linear, D, K), one),
    "no-bias": (lambda: layer(kfac.Linear, D, K, use_bias=False), one),
    "diagonal": (lambda: kfac.convert(eqx.nn.LayerNorm(D)), one),
    "conv": (lambda: layer(kfac.Conv2d, 2, 3, 3), image),
    "groups": (lambda: layer(kfac.Conv2d, 2, 4, 3, groups=2), image),
    "embedding": (lambda: layer(kfac.Embedding, 5, K), jnp.array([3])),
    "einsum": (Blocked, one),
    "lstm": (lambda: layer(kfac.LSTMCell, D, 2), one),
}


@pytest.mark.parametrize("name", ONE_EXAMPLE)
def test_one_example_is_exact(name):
    make, x = ONE_EXAMPLE[name]
    model = eqx.filter_jit(make)()
    if name == "lstm":
        cell = lambda model: lambda x: model(x, (jnp.ones(2), jnp.ones(2)))[0]
        loss_fn = lambda model, x: squared(cell(model), x)
    else:
        loss_fn = squared
    report = kfac.verify(loss_fn, model, x)
    if name == "diagonal":  # The diagonal is exact, the rest is missing.
        (check,) = report.layers
        assert (
            not report.exact and check.verdict == "approximate, with the exact diagonal"
        )
        return
    assert report.exact, report
    for check in report.layers:
        np.testing.assert_allclose(check.error, 0, atol=1e-12)
        np.testing.assert_allclose(check.cosine, 1, rtol=1e-12)
        np.testing.assert_allclose(check.ratio, 1, rtol=1e-12)


@eqx.filter_jit
def stack_of_layers():
    make = lambda key: kfac.Linear(D, K, key=key)
    return eqx.filter_vmap(make)(jr.split(KEY, 4))


def test_stacked_layers():
    def loss_fn(layers, x):
        outputs = eqx.filter_vmap(lambda m: jax.vmap(m)(x))(layers)
        return kfac.SquaredError(jnp.concatenate(outputs, axis=-1))

    report = kfac.verify(loss_fn, stack_of_layers(), X)
    assert report.layers[0].error.shape == (4,)
    assert report.exact


@pytest.mark.parametrize("fisher", [kfac.Exact(), kfac.Empirical()])
def test_exact_block_is_that_of_a_dense_computation(fisher):
    """The factor of a rank-one layer in a big batch differs; error and ratio are those of
    matrices computed by hand."""
    model = mlp()
    report = kfac.verify(softmax, model, X, CLASSES, WEIGHTS, fisher=fisher)

    @eqx.filter_jit
    def run(model):
        plain = kfac.revert(model)
        jacobians = []
        for i, layer in enumerate(plain.layers):

            def outputs(matrix, i=i):
                new = matrix[:, :-1], matrix[:, -1]
                where = lambda m: (m.layers[i].weight, m.layers[i].bias)
                return jax.vmap(eqx.tree_at(where, plain, new))(X)

            matrix = kfac.form.Dense().to_matrix(layer)
            jacobians.append(jax.jacobian(outputs)(matrix).reshape(N, K, -1))
        factors = kfac.curvature(softmax, fisher)(model, X, CLASSES, WEIGHTS)
        return jacobians, jax.nn.softmax(jax.vmap(plain)(X)), factors

    jacobians, p, factors = jax.tree.map(np.asarray, run(model))
    H = np.stack([np.diag(row) - np.outer(row, row) for row in p])
    if isinstance(fisher, kfac.Empirical):
        g = p - np.eye(K)[CLASSES]
        H = np.einsum("ni,nj->nij", g, g)
    w = np.asarray(WEIGHTS)
    for check, own, J in zip(report.layers, factors.layers, jacobians, strict=True):
        exact = np.einsum("n,nia,nij,njb->ab", w, J, H, J) / w.sum()
        guess = np.kron(own.output_factor, own.input_factor)
        norms = np.linalg.norm(guess), np.linalg.norm(exact)
        error = np.linalg.norm(guess - exact) / norms[1]
        np.testing.assert_allclose(check.error, error, rtol=1e-10)
        ratio = np.trace(guess) / np.trace(exact)
        np.testing.assert_allclose(check.ratio, ratio, rtol=1e-10)
        cosine = np.vdot(guess, exact) / norms[0] / norms[1]
        np.testing.assert_allclose(check.cosine, cosine, rtol=1e-10)
        assert check.error > 1e-3
        assert check.verdict == "approximate"


def test_several_losses():
    """Exact for the last layer, whatever the number of terms."""

    def loss_fn(model, x):
        z = jax.vmap(model)(x)
        return kfac.SquaredError(z) + 3.0 * kfac.SquaredError(z) + kfac.L2(model, 0.1)

    report = kfac.verify(loss_fn, mlp(), X)
    assert report[".layers[1]"].exact and not report[".layers[0]"].exact


def test_monte_carlo_is_right_up_to_noise():
    fisher = kfac.MonteCarlo(300)
    report = kfac.verify(softmax, mlp(), one, one_class, fisher=fisher, key=jr.key(0))
    assert all(0 < check.error < 0.3 for check in report.layers)


#
# Wrong ones
#


class Twice(kfac.form.Dense):
    """Whoever wrote this divided by something."""

    def outputs(self, z, stack, axes):
        return 2 * super().outputs(z, stack, axes)


class Transposed(kfac.form.Dense):
    """The weight of this layer is `[d_in, d_out]`, and somebody forgot."""

    def to_matrix(self, layer):
        return super().to_matrix(eqx.tree_at(lambda m: m.weight, layer, layer.weight.T))

    def from_matrix(self, matrix, layer):
        like = eqx.tree_at(lambda m: m.weight, layer, layer.weight.T)
        new = super().from_matrix(matrix, like)
        return eqx.tree_at(lambda m: m.weight, new, new.weight.T)


class NotInverse(kfac.form.Dense):
    def from_matrix(self, matrix, layer):
        return super().from_matrix(2 * matrix, layer)


class Own(eqx.Module):
    """A square layer, which can be wrong in many ways."""

    weight: jax.Array
    bias: jax.Array
    tag: kfac.Tag
    input: str = eqx.field(static=True)

    def __init__(self, form=None, input="right"):
        self.weight = normal(D, D, seed=5)
        self.bias = normal(D, seed=6)
        self.tag = kfac.Tag(kfac.form.Dense() if form is None else form, kfac.Kronecker())
        self.input = input

    def __call__(self, x):
        seen = dict(right=x, scaled=3 * x, other=jnp.flip(x))[self.input]
        return self.tag(self.weight @ x + self.bias, seen)


class HalfBlock(kfac.Kronecker):
    def factors(self, statistics, count, l2):
        return super().factors(statistics, 2 * count, l2)


@pytest.mark.parametrize(
    "model, verdict",
    [
        (Own(), "exact"),
        (Own(Twice()), "WRONG: its tag"),
        (Own(Transposed()), "WRONG: its tag sees another gradient"),
        (Own(NotInverse()), "WRONG: `from_matrix` does not undo"),
        (Own(input="scaled"), "WRONG: its tag sees another gradient"),
        (Own(input="other"), "WRONG: its tag did not see 19.27% of its gradient"),
    ],
    ids=["right", "twice", "transposed", "inverse", "scaled", "other"],
)
def test_wrong_layers_are_found(model, verdict):
    report = kfac.verify(squared, model, one)
    assert report.layers[0].verdict.startswith(verdict), report
    assert report.exact == (verdict == "exact")
    assert verdict in str(report)


@pytest.mark.parametrize("weight", [1.0, 0.5, 3.0])
def test_wrong_block_is_found(weight):
    """Whatever the example weighs, it is one, and the layer is not shared."""

    def loss_fn(model, x, classes):
        weights = jnp.full(len(x), weight)
        return kfac.SoftmaxCrossEntropy(jax.vmap(model)(x), classes, weights)

    report = kfac.verify(loss_fn, mlp(HalfBlock()), one, one_class)
    assert not any(check.shared for check in report.layers)
    for check in report.layers:
        assert check.verdict == "WRONG SCALE: exact, but for a factor of 0.5"
        np.testing.assert_allclose(check.ratio, 0.5, rtol=1e-12)


class Forgotten(kfac.form.Dense):
    """Does not know about the bias."""

    @property
    def names(self):
        return ("weight",)

    def sizes(self, layer):
        return kfac.form.Sizes((), *layer.weight.shape, bias=False)

    def to_matrix(self, layer):
        return layer.weight

    def from_matrix(self, matrix, layer):
        return self.replace(layer, (matrix,))


def test_missing_bias():
    """Of it there is no block at all, and the summary says so."""
    model = Own(Forgotten())
    assert kfac.verify(squared, model, one).exact
    assert list(kfac.summary(model).untagged) == [".bias"]
    assert kfac.summary(Own()).untagged == {}


def test_zero_curvature():
    """Two blocks that are both zero are not called exact, and it is said why."""
    model = dict(net=mlp(), unused=mlp(), uncalled=mlp())
    where = lambda m: m["net"].layers[1].weight
    model = eqx.tree_at(where, model, jax.device_put(np.zeros((K, 4))))

    def loss_fn(model, x, classes):
        jax.vmap(model["unused"])(x)
        return softmax(model["net"], x, classes)

    report = kfac.verify(loss_fn, model, one, one_class)
    first, last = report["['net'].layers[0]"], report["['net'].layers[1]"]
    assert first.verdict == "no curvature: both blocks are zero"
    assert last.exact and not (first.exact or report.exact)
    dead = report["['unused'].layers[0]"].verdict
    assert dead == "no curvature: what it returns does not reach the losses"
    never = report["['uncalled'].layers[0]"].verdict
    assert never == "no curvature: the loss function never calls it"


def test_not_a_number():
    model = eqx.tree_at(lambda m: m.layers[1].bias, mlp(), jnp.full(K, jnp.nan))
    for check in kfac.verify(softmax, model, X, CLASSES).layers:
        assert check.verdict.startswith("NOT A NUMBER") and not check.exact


def test_report():
    report = kfac.verify(softmax, mlp(kfac.Kronecker(kfac.Reduce())), X, CLASSES)
    lines = str(report).splitlines()
    assert len(lines) == 4
    assert lines[0].split() == (
        "path form block shape unseen error cosine ratio verdict".split()
    )
    assert "Kronecker(Reduce)" in lines[2] and "[4, 3+1]" in lines[2]
    with pytest.raises(KeyError, match="nowhere.*There are"):
        report["nowhere"]


#
# Large ones
#


FIGURES = "error", "cosine", "ratio", "diagonal_error"


@ft.cache
def dense_report(fisher):
    return kfac.verify(softmax, mlp(), X, CLASSES, WEIGHTS, fisher=fisher)


@pytest.mark.parametrize("fisher", [kfac.Exact(), kfac.Empirical()])
def test_along_all_vectors(fisher):
    """The same figures, without a dense matrix."""
    report = kfac.verify(softmax, mlp(), X, CLASSES, WEIGHTS, fisher=fisher, limit=15)
    for check, dense in zip(report.layers, dense_report(fisher).layers, strict=True):
        assert not check.estimated and check.verdict == dense.verdict
        for name in FIGURES:
            got, want = getattr(check, name), getattr(dense, name)
            np.testing.assert_allclose(got, want, rtol=1e-8)


@pytest.mark.parametrize("fisher", [kfac.Exact(), kfac.Empirical()])
@pytest.mark.parametrize("memory", [1e9, 1000])
def test_estimates(monkeypatch, fisher, memory):
    """Estimates agree with the dense figures, up to their standard errors, which are
    small; those of another block do not. With little memory, fewer vectors are held at
    a time."""
    monkeypatch.setattr(_plan, "ALL", 0.0)
    few = _parts.random_vectors
    many = lambda *args: few(*args)._replace(number=1000)
    monkeypatch.setattr(_parts, "random_vectors", many)
    report = kfac.verify(
        softmax, mlp(), X, CLASSES, WEIGHTS, fisher=fisher, memory=memory
    )
    assert "±" in str(report) and not report.exact
    other = kfac.Exact() if isinstance(fisher, kfac.Empirical) else kfac.Empirical()
    distances = []
    for i, check in enumerate(report.layers):
        assert check.estimated and check.verdict == "approximate"
        for name in FIGURES[:3]:
            noise = float(getattr(check, f"{name}_noise"))
            assert 0 < noise < (0.1 if memory == 1e9 else 0.5)
            got = float(getattr(check, name))
            want, differs = (
                float(getattr(dense_report(f).layers[i], name)) for f in (fisher, other)
            )
            assert abs(got - want) < 4 * noise + 0.003, name
            distances.append(abs(got - differs) / noise)
    assert max(distances) > 4 or memory < 1e9


def test_one_example_of_any_size(monkeypatch):
    """Too many outputs for all columns: a few cotangents, the same ones on both sides."""
    monkeypatch.setattr(_plan, "ALL", 0.0)
    for limit in (1, 4096):
        report = kfac.verify(softmax, mlp(), one, one_class, limit=limit)
        assert report.exact and not any(check.estimated for check in report.layers)
        wrong = kfac.verify(softmax, mlp(HalfBlock()), one, one_class, limit=limit)
        for check in wrong.layers:
            assert check.verdict == "WRONG SCALE: exact, but for a factor of 0.5"


class Wide(eqx.Module):
    embedding: kfac.Embedding
    hidden: kfac.Linear
    head: kfac.Linear

    def __call__(self, token):
        return self.head(jnp.tanh(self.hidden(self.embedding(token))))


def wide(classes):
    make = lambda: Wide(
        kfac.Embedding(classes, 3, key=KEY),
        kfac.Linear(3, 4, key=KEY),
        kfac.Linear(4, classes, key=KEY),
    )
    return eqx.filter_jit(make)()


def numbers_at_once(fn, *args):
    """How many there are in the largest array of a program."""

    def arrays(value):
        if isinstance(value, (tuple, list)):
            for item in value:
                yield from arrays(item)
        for eqn in getattr(getattr(value, "jaxpr", value), "eqns", ()):
            yield from (v.aval.size for v in eqn.outvars)
            yield from arrays(list(eqn.params.values()))

    return max(arrays(jax.make_jaxpr(fn)(*args)))


def test_memory_is_bounded(monkeypatch):
    """A factor that does not fit is never made: only the gradient is looked at."""
    seen, compiled = [], _verify.compiled

    def spy(fn, *args, optimise=False):
        params, static = eqx.partition(args, eqx.is_array)
        of = lambda params, *more: fn(*eqx.combine(params, static), *more)
        run = compiled(fn, *args, optimise=optimise)

        def call(*more):
            seen.append(numbers_at_once(of, params, *more))
            return run(*more)

        return call

    monkeypatch.setattr(_verify, "compiled", spy)
    model, tokens = wide(300), jnp.arange(2)
    loss_fn = lambda model, x: softmax(model, x, x)
    report = kfac.verify(loss_fn, model, tokens, memory=4e5)
    assert 8 * max(seen) <= 4e5 < 8 * 300**2
    embedding, hidden, head = report.layers
    assert head.too_large and head.unseen < 1e-12 and np.isnan(head.error)
    assert "too large to compare: 0.00072 GB" in head.verdict
    assert "kfac.Kronecker(widest=...)" in str(report).splitlines()[-1]
    assert np.isfinite(hidden.error) and np.isfinite(embedding.error)
    seen.clear()
    whole = kfac.verify(loss_fn, model, tokens)
    assert 8 * max(seen) >= 8 * 300**2 and np.isfinite(whole[".head"].error)
    assert "widest" not in str(whole)


#
# No false alarms
#


class Attention(eqx.Module):
    norm: kfac.LayerNorm
    attention: eqx.Module
    head: kfac.Linear
    causal: bool = eqx.field(static=True)

    def __call__(self, x):
        h = jax.vmap(self.norm)(x)
        mask = jnp.tril(jnp.ones((len(x), len(x)), bool)) if self.causal else None
        return jax.vmap(self.head)(x + self.attention(h, h, h, mask=mask))


@pytest.mark.parametrize("causal", [True, False])
def test_transformers_are_not_suspicious(causal):
    """Tokens that look at each other, with a loss term each (and a mask), are no uses
    of a layer that are independent."""

    @eqx.filter_jit
    def make():
        attention = eqx.nn.MultiheadAttention(2, 4, key=KEY)
        model = Attention(
            kfac.LayerNorm(4), attention, kfac.Linear(4, 3, key=KEY), causal
        )
        return kfac.convert(model, blocks={eqx.nn.Linear: kfac.Kronecker(kfac.Expand())})

    def loss_fn(model, x, y, w):
        return kfac.SoftmaxCrossEntropy(jax.vmap(model)(x), y, w)

    x = 0.1 * normal(2, 8, 4, seed=9) + 3 * normal(2, 1, 4, seed=10)
    y = jax.device_put(np.random.default_rng(1).integers(3, size=(2, 8)))
    w = jnp.ones((2, 8)) if causal else jnp.ones((2, 8)).at[:, 1:].set(0.0)
    report = kfac.verify(loss_fn, make(), x, y, w)
    assert all(check.shared for check in report.layers)
    assert not re.search("SUSPICIOUS|WRONG", str(report)), report
    assert min(np.min(check.cosine) for check in report.layers) < 0.5


@pytest.mark.parametrize(
    "block, weight",
    [(None, 1e-5), (None, 1.0), (kfac.Identity(), 1.0), (kfac.TNT(), 1.0)],
)
def test_unlike_examples_are_not_suspicious(block, weight):
    """Large inputs with small gradients: by itself, every example has the right trace."""
    model = mlp(block)
    x = jax.device_put(np.diag([1e-2, 1e-2, 1e3]))
    w = jax.device_put(np.array([1.0, 1.0, weight]))
    report = kfac.verify(softmax, model, x, CLASSES[:3], w)
    assert not re.search("SUSPICIOUS|WRONG", str(report)), report
    if block is None:
        first = report.layers[0]
        assert first.ratio > 3 and abs(first.alone - 1) < 1e-10


class TenthBlock(kfac.Kronecker):
    def factors(self, statistics, count, l2):
        return super().factors(statistics, 10 * count, l2)


def test_numbers_that_are_drawn_are_no_wrong_scale():
    """Where the outputs are one number, twice, an estimate is exact but for a factor."""
    layer = eqx.nn.Linear(D, K, use_bias=False, key=KEY)

    def loss_fn(model, x):
        outputs = jax.vmap(model)(x)[:, :1] * jnp.ones((1, 2))
        return kfac.SquaredError(outputs, jnp.zeros_like(outputs))

    drawn = dict(fisher=kfac.MonteCarlo(), key=KEY)
    (check,) = kfac.verify(loss_fn, kfac.convert(layer), one, **drawn).layers
    assert check.cosine > 1 - 1e-9 and abs(check.ratio - 1) > 1e-2
    assert check.verdict == "approximate"
    (check,) = kfac.verify(loss_fn, kfac.convert(layer, HalfBlock()), one).layers
    assert check.verdict == "WRONG SCALE: exact, but for a factor of 0.5"


def test_wrong_scale_of_several_examples():
    report = kfac.verify(softmax, mlp(TenthBlock()), X, CLASSES)
    for check in report.layers:
        assert check.verdict.startswith(
            "SUSPICIOUS: of the first example, its trace is 0.1"
        )
    several = lambda model, x: squared(model, jnp.concatenate([x, X[1:]]))
    report = kfac.verify(several, mlp(TenthBlock()), one)  # Not to be taken apart.
    assert report.layers[0].verdict == "approximate"


#
# Progress
#


def test_a_bar_says_what_compiles(monkeypatch, capsys):
    """Without a terminal, or without tqdm, nothing is said, and all is the same."""
    verify = lambda: kfac.verify(squared, mlp(), X)
    quiet = verify()
    assert capsys.readouterr() == ("", "")
    said, bar = [], tqdm.tqdm

    class Seen(bar):
        def __init__(self, *args, disable, **kwargs):
            assert disable is None
            super().__init__(*args, disable=False, **kwargs)

        def set_description(self, text, refresh=True):
            said.append((self.n, self.total, text))
            super().set_description(text, refresh)

    monkeypatch.setattr(tqdm, "tqdm", Seen)
    seen = verify()
    assert [text for _, _, text in said] == [
        "verify: compiling the gradients of 2 layers",
        "verify: compiling and comparing the blocks of 2",
    ]
    assert [part for *part, _ in said] == [[0, 2], [1, 2]]
    assert "verify" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "tqdm", None)
    without = verify()
    assert capsys.readouterr() == ("", "")
    assert str(quiet) == str(seen) == str(without)


#
# Summary
#


def test_summary():
    model = dict(
        mlp=mlp(),
        stack=stack_of_layers(),
        gru=eqx.filter_jit(layer)(kfac.GRUCell, D, 2),
        extra=jnp.ones((2, 3)),
        frozen=jax.tree.map(lambda _: None, layer(kfac.Linear, D, K)),
    )
    summary = kfac.summary(model)
    found = [s.path for s in summary.layers]
    gru = [f"['gru']['{name}']" for name in ("gates", "hidden", "input")]
    assert sorted(found) == sorted(
        ["['mlp'].layers[0]", "['mlp'].layers[1]", "['stack']", *gru]
    )
    line = summary["['stack']"]
    assert (line.stack, line.d_out, line.d_in, line.bias) == ((4,), K, D, True)
    assert line.parameters == 4 * K * (D + 1)
    assert line.factors == 4 * (K**2 + (D + 1) ** 2 + 1)
    covered = sum(s.parameters for s in summary.layers)
    arrays = jax.tree.leaves(eqx.filter(model, eqx.is_inexact_array))
    assert covered == sum(a.size for a in arrays) - 6
    assert summary.untagged == {"['extra']": (2, 3)}
    text = str(summary)
    assert "['extra']  [2, 3]" in text and "4 x [2, 3+1]" in text


class Deep(eqx.Module):
    blocks: list
    head: eqx.Module

    def __init__(self, number, width=6):
        made = [eqx.nn.MLP(4, 4, width, 2, key=k) for k in jr.split(KEY, number)]
        made[2] = eqx.nn.MLP(4, 4, width + 1, 2, key=KEY)
        self.blocks, self.head = made, eqx.nn.Linear(4, 40, key=KEY)


def test_a_path_that_is_not_there():
    model = kfac.convert(eqx.nn.MLP(2, 1, 3, 2, key=jr.key(0)))
    lines = kfac.summary(model)
    assert lines[".layers[1]"] == lines[".layers.1"] != lines[".layers[0]"]
    for wrong in (".layers[3]", ".layers", "layers.1"):
        with pytest.raises(KeyError, match=r"There are: `.layers\[0\]`, `.layers\[1\]`"):
            lines[wrong]


def test_summary_folds_equal_layers():
    """Their numbers are those of all; one that differs has rows of its own."""
    model = eqx.filter_jit(lambda: kfac.convert(Deep(5)))()
    summary = kfac.summary(model)
    assert len(summary.layers) == 16
    rows = {r.split()[0]: re.split(r" {2,}", r) for r in str(summary).splitlines()[2:]}
    firsts = [f".blocks[{i}].layers[{j}]" for i in ("0,1,3,4", "2") for j in range(3)]
    assert list(rows) == [*firsts, ".head", "total"]
    four = [summary[f".blocks[{i}].layers[1]"] for i in (0, 1, 3, 4)]
    row = rows[firsts[1]]
    assert row[4] == "4 x [6, 6+1]"
    assert row[5] == str(sum(s.parameters for s in four)) == str(4 * 42)
    assert row[6] == str(sum(s.factors for s in four)) == str(4 * four[0].factors)
    total = sum(s.megabytes for s in summary.layers)
    head = rows[".head"]
    assert head[9] == f"{100 * summary['.head'].megabytes / total:.0f}% <"
    assert [path for path, row in rows.items() if "<" in row[-1]] == [".head"]


@pytest.mark.parametrize(
    "indices, shown",
    [([0, 1], "0,1"), ([0, 1, 2], "0…2"), ([0, 2, 4], "0,2,4"), ([0, 2, 4, 6], "0,2…6")]
    + [([0, 1, 2, 4, 7, 8], "0…2,4,7,8"), ([3], "3"), ([0, 1, 3], "0,1,3")],
)
def test_indices_shown(indices, shown):
    assert _fold.indices_shown(indices) == shown


def test_summary_folds_lists_of_lists():
    """Of several indices, too; layers without an index are alone."""
    grid = [[eqx.nn.Linear(3, 3, key=KEY) for _ in range(n)] for n in (4, 4, 3)]
    model = kfac.convert(dict(grid=grid, one=eqx.nn.Linear(3, 3, key=KEY)))
    rows = [line.split("  ")[0] for line in str(kfac.summary(model)).splitlines()[2:]]
    inner = ["['grid'][0…2][0…2]", "['grid'][0,1][3]", "['one']", "total"]
    assert rows == inner
    single = kfac.convert(eqx.nn.Linear(3, 3, key=KEY))
    assert "(the model)" in str(kfac.summary(single))


def test_summary_folds_raw_arrays():
    """Their paths have indices of another kind."""

    class Raw(eqx.Module):
        layers: list

        def __call__(self, x):
            for w in self.layers:
                x = jnp.tanh(w @ x)
            return x

    raw = Raw([normal(D, D, seed=i) for i in range(3)])
    model = kfac.convert(raw, example=X[0])
    assert len(kfac.summary(model).layers) == 3
    assert str(kfac.summary(model)).splitlines()[2].startswith("['layers.0…2']")


def test_summary_of_equal_layers_with_curvature():
    """Of the trace and the condition, the least and the greatest."""
    model = kfac.convert(eqx.nn.MLP(D, K, 4, 4, jnp.tanh, key=KEY))
    curvature = eqx.filter_jit(kfac.curvature(squared, kfac.Exact()))(model, X)
    summary = kfac.summary(model, curvature, damping=0.01)
    row = next(r for r in str(summary).splitlines() if r.startswith(".layers[1…3]"))
    for name, cell in zip(("trace", "condition"), row.split()[-2:], strict=True):
        each = [getattr(line, name) for line in summary.layers[1:4]]
        assert cell == f"{min(each):.3g}…{max(each):.3g}"


def test_summary_counts_what_a_state_holds():
    model = mlp()
    size = lambda tree: sum(a.size for a in jax.tree.leaves(tree))
    for solver in (kfac.Cholesky(), kfac.Eigh()):
        state = eqx.filter_jit(plain_kfac(0.1, solver=solver).init)(model)
        lines = kfac.summary(model, solver=solver).layers
        assert sum(s.factors for s in lines) == size(state.curvature)
        assert sum(s.inverse for s in lines) == size(state.inverse)
        held = [state.curvature, state.inverse]
        bytes_held = sum(a.nbytes for a in jax.tree.leaves(held))
        np.testing.assert_allclose(sum(s.megabytes for s in lines), bytes_held / 1e6)


@pytest.mark.parametrize("block", [kfac.Kronecker(), kfac.Diagonal()])
def test_health(block):
    model = mlp({eqx.nn.Linear: block})
    curvature = eqx.filter_jit(kfac.curvature(squared, kfac.Exact()))(model, X)
    as_matrix = eqx.filter_jit(lambda factors: block.operator(factors).as_matrix())
    for i, line in enumerate(kfac.summary(model, curvature).layers):
        matrix = np.asarray(as_matrix(curvature.layers[i]))
        np.testing.assert_allclose(line.trace, np.trace(matrix), rtol=1e-10)
        values = np.linalg.eigvalsh(matrix)
        if values[0] > 1e-12 * values[-1]:
            np.testing.assert_allclose(line.condition, values[-1] / values[0], rtol=1e-6)
        else:
            assert line.condition > 1e12
    dead = jax.tree.map(lambda a: jax.device_put(np.zeros_like(a)), curvature)
    assert kfac.summary(model, dead).layers[0].condition == np.inf


def test_wide_factors_are_not_decomposed(monkeypatch):
    model = kfac.convert(kfac.revert(mlp()), blocks={".layers[1]": kfac.Diagonal()})
    curvature = eqx.filter_jit(kfac.curvature(squared, kfac.Exact()))(model, X)
    before = kfac.summary(model, curvature)
    monkeypatch.setattr(_spectra, "WIDEST", 3)
    after = kfac.summary(model, curvature)
    first, last = after.layers
    assert first.condition is None and before.layers[0].condition is not None
    np.testing.assert_allclose(first.trace, before.layers[0].trace)
    assert last == before.layers[1]  # A diagonal takes no decomposition.
    assert len(str(after).splitlines()) == len(str(before).splitlines())


def test_wide_diagonal_factors_need_no_decomposition(monkeypatch):
    """An embedding's input factor is a diagonal, however many tokens there are."""
    model = kfac.convert(eqx.nn.Embedding(20, 2, key=jax.random.key(0)))
    loss_fn = lambda m, x: kfac.SquaredError(jax.vmap(m)(x), jnp.zeros((len(x), 2)))
    curvature = kfac.curvature(loss_fn, kfac.Exact())(model, jnp.arange(20) % 7)
    (before,) = kfac.summary(model, curvature).layers
    monkeypatch.setattr(_spectra, "WIDEST", 3)
    (after,) = kfac.summary(model, curvature).layers
    assert after.condition is not None and after == before


def test_health_with_damping():
    """One number, or one for every layer; with an `L2` term, as the optimizer has it."""
    model = mlp()

    def loss_fn(model, x):
        return squared(model, x) + kfac.L2(model, 0.01)

    curvature = eqx.filter_jit(kfac.curvature(loss_fn, kfac.Exact()))(model, X)
    each = kfac.analysis.BlockDiagonalOperator(curvature, model).per_layer(0.1)
    each = eqx.tree_at(lambda m: m.layers[1], each, jnp.asarray(0.5))
    for given, numbers in ((0.1, (0.1, 0.1)), (each, (0.1, 0.5))):
        lines = kfac.summary(model, curvature, damping=given).layers
        for line, factors, number in zip(lines, curvature.layers, numbers, strict=True):
            own = np.kron(factors.output_factor, factors.input_factor)
            values = np.linalg.eigvalsh(own) + 0.01
            np.testing.assert_allclose(line.trace, np.sum(values), rtol=1e-9)
            condition = (values[-1] + number) / (values[0] + number)
            np.testing.assert_allclose(line.condition, condition, rtol=1e-6)


def test_reports_in_a_notebook():
    """The same numbers in HTML, with what could be taken for HTML escaped."""
    model = dict(mlp=mlp(), extra=jnp.ones((2, 3)))
    html = kfac.summary(model)._repr_html_()
    assert html.count("<tr>") == 4 and "['extra'] [2, 3]" not in html
    assert "[&#x27;extra&#x27;] [2, 3]</p>" in html
    assert f'<td style="text-align: right">{4 * (D + 1)}</td>' in html
    report = kfac.verify(squared, mlp(), X)
    shown = re.findall(r"<td [^>]*>([^<]*)</td>", report._repr_html_())
    assert shown[0] == ".layers[0]" and shown[-1] == report.layers[-1].verdict


#
# Accumulation
#


def l2(model, x, y, w):
    return softmax(model, x, y, w) + kfac.L2(model, 0.1)


def two_losses(model, x, y, w):
    z = jax.vmap(model)(x)
    first = 2.0 * kfac.SoftmaxCrossEntropy(z, y, w)
    return first + kfac.SquaredError(z, jnp.ones(z.shape), w**2 + 0.1)


def three_losses(model, x, y, w):
    z = jax.vmap(model)(x)
    return two_losses(model, x, y, w) + kfac.SigmoidCrossEntropy(z, z > 0, jnp.sqrt(w))


ACCUMULATED = [
    (l2, kfac.Exact(), kfac.Kronecker()),
    (two_losses, kfac.Exact(), kfac.Kronecker(kfac.Reduce())),
    (two_losses, kfac.Empirical(), kfac.Kronecker()),
    (three_losses, kfac.Empirical(), kfac.Diagonal()),
]


def test_several_positions_at_once_are_accumulated_one_by_one():
    """Where `Joint` would add up their gradients; and the report says what is done."""
    model, fisher = mlp(), kfac.Exact(example_axes=2)
    x = normal(5, 2, 3, seed=7)

    def loss_fn(m, x):
        z = jax.vmap(jax.vmap(m))(x)
        return kfac.SquaredError(z, jnp.zeros_like(z))

    accumulator = kfac.analysis.Accumulator(loss_fn, fisher)
    total = accumulator.add(accumulator.init(model, x), model, x)
    want = eqx.filter_jit(kfac.curvature(loss_fn, fisher))(model, x)
    assert_near(accumulator.finish(total, model), want, 1e-12)
    for estimate, name in ((fisher, "Expand"), (None, "Joint")):
        report = kfac.verify(loss_fn, model, x, fisher=estimate)
        assert f"Kronecker({name})" in repr(report)


@pytest.mark.parametrize("loss_fn, fisher, block", ACCUMULATED)
def test_accumulated_is_whole(loss_fn, fisher, block):
    model = mlp({eqx.nn.Linear: block})
    accumulator = kfac.analysis.Accumulator(loss_fn, fisher)
    pieces = [slice(0, 1), slice(1, 4), slice(4, 5)]

    @eqx.filter_jit
    def run(model, *data):
        total, add = accumulator.init(model, *data), eqx.filter_jit(accumulator.add)
        for piece in pieces:
            total = add(total, model, *(a[piece] for a in data))
        curvature = eqx.filter_jit(kfac.curvature(loss_fn, fisher))
        found = accumulator.finish(total, model), curvature(model, *data)
        if loss_fn is not l2:
            return found
        return *found, *(curvature(model, *(a[p] for a in data)) for p in pieces)

    got, want, *each = run(model, X, CLASSES, WEIGHTS)
    assert_near(got, want, 1e-12)
    if loss_fn is l2:
        mean = jax.tree.map(lambda *a: sum(map(np.asarray, a)) / len(a), *each)
        assert_differs(jax.tree.map(jnp.asarray, mean), want, 0.1)


def test_accumulated_in_a_scan():
    model, accumulator = mlp(), kfac.analysis.Accumulator(softmax, kfac.MonteCarlo(20))
    x, y = np.tile(X, (40, 1, 1)), np.tile(CLASSES, (40, 1))

    @eqx.filter_jit
    def run(model):
        def step(total, batch):
            x, y, key = batch
            return accumulator.add(total, model, x, y, key=key), None

        total = accumulator.init(model, x[0], y[0], key=jr.key(0))
        total, _ = jax.lax.scan(step, total, (x, y, jr.split(jr.key(0), 40)))
        return accumulator.finish(total, model)

    want = eqx.filter_jit(kfac.curvature(softmax, kfac.Exact()))(model, X, CLASSES)
    assert_near(run(model), want, 0.15)


@pytest.mark.parametrize("weight", [1.0, 0.5, 3.0])
def test_what_is_shared_is_known_whatever_examples_weigh(weight):
    def loss_fn(model, x):
        outputs = jnp.mean(jax.vmap(jax.vmap(model))(jnp.stack([x, -x], axis=1)), axis=1)
        return kfac.SquaredError(outputs, None, jnp.full(len(x), weight))

    assert all(check.shared for check in kfac.verify(loss_fn, mlp(), one).layers)


def test_a_block_that_is_far_too_small_is_suspicious():
    """The gradients at both positions are opposite: `Reduce` adds them up to nothing."""

    def loss_fn(model, x):
        one, other = jnp.moveaxis(jax.vmap(jax.vmap(model))(x), 1, 0)
        return kfac.SquaredError(one - other, None)

    x = jax.device_put(np.stack([X, 2 * np.asarray(X)], axis=1))
    verdicts = {}
    for sharing in (kfac.Expand(), kfac.Reduce()):
        layer = kfac.convert(eqx.nn.Linear(X.shape[1], 2, key=jr.key(0)))
        layer = kfac.convert(kfac.revert(layer), blocks=kfac.Kronecker(sharing))
        (check,) = kfac.verify(loss_fn, layer, x).layers
        verdicts[type(sharing).__name__] = check.verdict
    assert verdicts["Expand"] == "approximate"
    assert verdicts["Reduce"].startswith("SUSPICIOUS: its trace is 0 times"), verdicts


@pytest.mark.parametrize("block", [kfac.Kronecker(), kfac.EKFAC()])
def test_layers_that_are_passed_by(block):
    """A layer whose weight is used without calling it is in the report, which is not
    refused, also where statistics are taken twice, to find a basis."""
    mlp = eqx.nn.MLP(3, 2, 3, depth=1, activation=jnp.tanh, key=jax.random.key(0))
    model = kfac.convert(mlp, block)

    def loss_fn(model, x):
        first, last = model.layers
        outputs = jax.vmap(lambda x: last.weight @ jnp.tanh(first(x)))(x)
        return kfac.SquaredError(outputs, jnp.zeros_like(outputs))

    first, last = kfac.verify(loss_fn, model, jnp.ones((2, 3))).layers
    assert first.unseen == 0 and "WRONG" not in first.verdict
    assert last.unseen == 1 and "did not see 100.00%" in last.verdict


class Cancelled(eqx.Module):
    """One gradient has two rows, $g x^\top$ and $-g x^\top$, or only the first."""

    layer: kfac.Linear
    cancels: bool

    def __call__(self, x):
        y = jax.vmap(self.layer)(jnp.stack([x, x]))
        return y[0] - y[1] if self.cancels else y[0]


@pytest.mark.parametrize("cancels", [True, False])
def test_rows_that_cancel(cancels):
    """Factors have curvature where the exact block is zero: this is no mistake."""
    block = kfac.Kronecker(kfac.Expand())
    linear = layer(kfac.Linear, D, K, use_bias=False, block=block)
    model = Cancelled(linear, cancels)
    (check,) = kfac.verify(squared, model, X).layers
    assert not check.verdict[:1].isupper()
    assert ("where the exact block is zero" in check.verdict) == cancels


def test_a_stack_of_which_one_exact_block_is_zero():
    """The table has the numbers of the others, and says of how many they are not."""
    model = kfac.convert(eqx.nn.Linear(D, K, key=KEY))
    (check,) = kfac.verify(squared, model, X).layers
    numbers = dict(error=[0.25, np.inf], ratio=[0.5, np.inf], cosine=[0.75, 0.0])
    numbers = {name: np.array(values) for name, values in numbers.items()}
    flags = np.zeros(2, bool)
    mixed = dataclasses.replace(check, **numbers, zero=flags, single=False)
    assert mixed.verdict == "approximate where the exact block is zero: 1 of 2"
    shown = repr(kfac.debug.Verification((mixed,)))
    assert "0.25" in shown and "0.75" in shown and "inf" not in shown
    both = {name: a[[1, 1]] for name, a in numbers.items()}
    shown = repr(kfac.debug.Verification((dataclasses.replace(mixed, **both),)))
    assert "inf" in shown and "2 of 2" in shown


def test_curvature_where_there_is_none():
    """Of one row, curvature without an exact block is a mistake; and so is infinity."""
    model = kfac.convert(eqx.nn.Linear(D, K, key=KEY))
    (check,) = kfac.verify(squared, model, one).layers
    assert check.verdict == "exact" and check.single
    infinite = np.array(np.inf)
    off = dataclasses.replace(check, error=infinite, ratio=infinite, cosine=np.array(0.0))
    assert off.verdict == "WRONG: not zero where the exact block is zero"
    assert (
        dataclasses.replace(off, cosine=np.array(np.nan)).verdict == "WRONG: not finite"
    )
