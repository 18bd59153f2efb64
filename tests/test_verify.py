"""The tools that look at a model's curvature: they find what is wrong, and only that."""

import re

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

import eqx_kfac as kfac

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


def test_zero_curvature_is_exact():
    dead = eqx.tree_at(
        lambda m: m.layers[1].weight, mlp(), jax.device_put(np.zeros((K, 4)))
    )
    report = kfac.verify(softmax, dead, one, one_class)
    assert report[".layers[0]"].exact


def test_report():
    report = kfac.verify(softmax, mlp(kfac.Kronecker(kfac.Reduce())), X, CLASSES)
    lines = str(report).splitlines()
    assert len(lines) == 4
    assert lines[0].split() == (
        "path form block shape unseen error cosine ratio verdict".split()
    )
    assert "Kronecker(Reduce)" in lines[2] and "[4, 3+1]" in lines[2]
    with pytest.raises(StopIteration):
        report["nowhere"]


def test_too_big():
    report = kfac.verify(softmax, mlp(), X, CLASSES, limit=15)
    first, last = report.layers
    assert first.too_large and np.isnan(first.error) and first.unseen < 1e-12
    assert "too large" in first.verdict and not first.exact and not report.exact
    whole = kfac.verify(softmax, mlp(), X, CLASSES).layers
    np.testing.assert_allclose(last.error, whole[1].error, rtol=1e-10)
    assert not whole[0].too_large and np.isfinite(whole[0].error)


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


def test_health_with_damping():
    """One number, or one for every layer; with an `L2` term, as the optimizer has it."""
    model = mlp()

    def loss_fn(model, x):
        return squared(model, x) + kfac.L2(model, 0.01)

    curvature = eqx.filter_jit(kfac.curvature(loss_fn, kfac.Exact()))(model, X)
    each = kfac.BlockDiagonalOperator(curvature, model).per_layer(0.1)
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


@pytest.mark.parametrize("loss_fn, fisher, block", ACCUMULATED)
def test_accumulated_is_whole(loss_fn, fisher, block):
    model = mlp({eqx.nn.Linear: block})
    accumulator = kfac.Accumulator(loss_fn, fisher)
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
    model, accumulator = mlp(), kfac.Accumulator(softmax, kfac.MonteCarlo(20))
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
