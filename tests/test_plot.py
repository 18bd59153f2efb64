"""Pictures show the numbers that they are given."""

import subprocess
import sys

import equinox as eqx
import jax
import jax.numpy as jnp
import matplotlib
import matplotlib.pyplot as plt
import numpy as np
import pytest

import eqx_kfac as kfac
from eqx_kfac import plot

from .helpers import normal


matplotlib.use("Agg")


@pytest.fixture(autouse=True)
def close_figures():
    yield
    plt.close("all")


def loss_fn(model, x, y):
    return kfac.SoftmaxCrossEntropy(jax.vmap(model)(x), y)


KEY = jax.random.key(0)
X, Y = normal(6, 3), jax.device_put(np.arange(6) % 2)


@eqx.filter_jit
def make():
    keys = jax.random.split(KEY)
    layers = [
        eqx.nn.Linear(3, 4, key=keys[0]),
        eqx.nn.LayerNorm(4),
        eqx.nn.Lambda(jnp.tanh),
        eqx.nn.Linear(4, 2, key=keys[1]),
    ]
    return kfac.convert(eqx.nn.Sequential(layers))


MODEL = make()


@eqx.filter_jit
def collect(model, x, y, fisher=kfac.Exact(), key=None):
    return kfac.curvature(loss_fn, fisher)(model, x, y, key=key)


@pytest.fixture(scope="module")
def curvature():
    return collect(MODEL, X, Y)


@pytest.fixture(scope="module")
def infos():
    """Of six steps; the third batch is bad, and the fifth step is not one downhill."""
    optimizer = kfac.KFAC(
        damping=kfac.LevenbergMarquardt(initial=0.1, interval=1),
        guard=kfac.MaxIncrease(0.0),
    )
    step = eqx.filter_jit(optimizer.step)
    model, state, found = MODEL, eqx.filter_jit(optimizer.init)(MODEL), []
    for i in range(6):
        x = jax.device_put(np.asarray(X) * np.nan) if i == 2 else X
        rate = 1e9 if i == 4 else 0.01
        state = eqx.tree_at(lambda s: s.learning_rate, state, jnp.asarray(rate))
        key = jax.random.key(i)
        model, state, info = step(loss_fn, model, state, x, Y, key=key)
        found.append(info)
    return found


def by_title(axes):
    return {axis.get_title(): axis for axis in axes}


def lines(axis):
    return {line.get_label(): line.get_xydata() for line in axis.get_lines()}


def test_as_dict(infos):
    """Everything that is measured, by name; what is not is left out, as is `aux`."""
    plain = eqx.tree_at(
        lambda i: i.aux, infos[2], jnp.ones(3), is_leaf=lambda a: a is None
    )
    numbers = plain.as_dict()
    assert "aux" not in numbers and "through_rows" not in numbers
    assert np.isnan(numbers["loss"]) and numbers["rejected"]
    assert numbers["faults/loss"] and not numbers["faults/update"]
    assert {name for name in numbers if name.startswith("faults/")} == {
        f"faults/{name}" for name in plain.faults.as_dict()
    }
    assert all(np.ndim(float(number)) == 0 for number in numbers.values())


def test_history(infos):
    axes = by_title(plot.history(infos))
    assert list(axes) == [
        *("loss", "learning rate, momentum", "damping", "norms", "reduction ratio")
    ]
    shown = lines(axes["loss"])
    there = [0, 1, 3, 4, 5]
    losses = [float(infos[i].loss) for i in there]
    assert np.allclose(shown["loss"], np.stack([there, losses], axis=1))
    assert shown["rejected: loss (1)"][:, 0].tolist() == [2]
    assert shown["rejected: increase (1)"][:, 0].tolist() == [4]
    dampings = [float(info.damping) for info in infos]
    assert np.allclose(lines(axes["damping"])["damping"][:, 1], dampings)
    assert axes["damping"].get_yscale() == "log"
    assert axes["reduction ratio"].get_yscale() == "linear"
    # A rejected step has no length, which a logarithm does not show.
    assert 2 not in lines(axes["norms"])["update norm"][:, 0]


def test_history_marks_only_steps_that_were_not_taken(infos):
    """What cannot be factorised keeps its last inverse, and the step is taken."""
    numbers = [info.as_dict() for info in infos]
    numbers[1]["faults/factorisation"] = numbers[2]["faults/factorisation"] = True
    shown = lines(plot.history(numbers)[0])
    assert shown["rejected: factorisation (1)"][:, 0].tolist() == [2]


def test_history_of_what_a_scan_stacks(infos):
    """One `info` of all steps, a part of them each, or dictionaries."""
    arrays = [eqx.filter(info, eqx.is_array) for info in infos]
    stack = lambda parts: jax.tree.map(lambda *a: jax.device_put(np.stack(a)), *parts)
    whole = lines(plot.history(infos)[0])["loss"]
    for given in (
        stack(arrays),
        [stack(arrays[:4]), stack(arrays[4:])],
        [info.as_dict() for info in infos],
        stack(arrays).as_dict(),
    ):
        assert np.array_equal(lines(plot.history(given)[0])["loss"], whole)
    tenth = lines(plot.history(infos, every=10)[0])["loss"]
    assert np.array_equal(tenth, whole * [10, 1])


def test_history_of_nothing_or_too_much(infos):
    with pytest.raises(ValueError, match="is empty"):
        plot.history([])
    several = jax.tree.map(lambda a: np.stack([a, a])[None], infos[0].as_dict())
    with pytest.raises(ValueError, match=r"several runs, of shape \(1, 2\)"):
        plot.history(several)


def test_factors(curvature):
    axes = plot.factors(MODEL, curvature)
    assert axes.shape == (3, 2)
    factor = np.asarray(curvature.layers[0].input_factor)
    image = axes[0, 0].get_images()[0].get_array()
    scale = np.sqrt(np.diag(factor))
    assert np.allclose(image, factor / np.outer(scale, scale))
    assert np.allclose(np.diag(image), 1) and not np.allclose(image, factor)
    # A block without factors: its diagonal.
    shown = axes[1, 0].get_lines()[0].get_ydata()
    assert np.allclose(shown, np.ravel(curvature.layers[1].diagonal))
    assert not axes[1, 1].axison


def test_factors_of_some_layers(curvature):
    axes = plot.factors(MODEL, curvature, [".layers[3]"])
    assert axes.shape == (1, 2) and axes[0, 0].get_title().startswith(".layers[3]\n")
    for wrong in ([".layers[2]"], ".layers[3]"):
        with pytest.raises(ValueError, match=r"`\.layers\[0\]`.*`\.layers\[3\]`"):
            plot.factors(MODEL, curvature, wrong)


def test_factors_of_an_embedding_and_of_a_stack():
    """A diagonal factor is a line; of a stack, the first layer is drawn."""

    class Model(eqx.Module):
        embedding: eqx.nn.Embedding
        stack: eqx.nn.Linear

        def __call__(self, i):
            x = self.embedding(i)
            return jax.lax.scan(lambda x, f: (jnp.tanh(f(x)), None), x, self.stack)[0]

    @eqx.filter_jit
    def make():
        linear = eqx.filter_vmap(lambda key: eqx.nn.Linear(3, 3, key=key))
        stack = linear(jax.random.split(KEY, 4))
        return kfac.convert(Model(eqx.nn.Embedding(5, 3, key=KEY), stack))

    model = make()
    found = collect(model, jax.device_put(np.arange(5)), jax.device_put(np.arange(5) % 3))
    axes = plot.factors(model, found)
    (line,) = axes[0, 0].get_lines()
    assert np.allclose(line.get_ydata(), found.embedding.input_factor)
    first = np.asarray(found.stack.output_factor)[0]
    scale = np.sqrt(np.diag(first))
    image = axes[1, 1].get_images()[0].get_array()
    assert np.allclose(image, first / np.outer(scale, scale))

    spectrum = lines(plot.spectra(model, found))[".stack"]
    assert len(spectrum) == 4 * 3 * 4


def test_spectra(curvature):
    axis = plot.spectra(MODEL, curvature, damping=0.1)
    shown = lines(axis)
    assert list(shown) == [".layers[0]", ".layers[1]", ".layers[3]", "damping"]
    operator = kfac.operators.KroneckerOperator(
        curvature.layers[3].output_factor, curvature.layers[3].input_factor
    )
    eigenvalues = eqx.filter_jit(lambda operator: operator.eigenvalues())(operator)
    values = np.sort(np.ravel(eigenvalues))[::-1]
    there = values > 0  # On a logarithmic scale.
    ranks = 1 + np.arange(10)
    assert np.allclose(shown[".layers[3]"], np.stack([ranks, values], 1)[there])
    assert np.all(shown["damping"][:, 1] == 0.1)


def test_spectra_with_a_damping_for_every_layer(curvature):
    """Dashed, over the ranks of that layer; into axes that one has."""
    operator = kfac.analysis.BlockDiagonalOperator(curvature, MODEL)
    damping = operator.per_layer(0.1)
    damping = eqx.tree_at(lambda m: m.layers[3], damping, jnp.asarray(0.5))
    _, mine = plt.subplots()
    axis = plot.spectra(MODEL, curvature, damping=damping, ax=mine)
    assert axis is mine
    segments = [c.get_segments() for c in axis.collections]
    assert [float(s[0][0, 1]) for s in segments] == [0.1, 0.1, 0.5]
    with pytest.raises(ValueError, match="`damping` must be a number, or a tree"):
        plot.spectra(MODEL, curvature, damping={"a": 1.0})


def test_spectra_of_many_layers_and_of_large_ones():
    """The legend names the first, the middle and the last; of many values, some."""
    layers = [eqx.nn.Linear(2, 2, key=KEY) for _ in range(15)]
    layers.append(eqx.nn.Linear(2, 400, key=KEY))
    model = kfac.convert(eqx.nn.Sequential(layers))
    x = jax.device_put(np.asarray(X)[:, :2])
    found = collect(model, x, Y, kfac.MonteCarlo(), KEY)
    axis = plot.spectra(model, found, damping=1.0)
    named = [text.get_text() for text in axis.get_legend().get_texts()]
    assert named == [".layers[0]", ".layers[8]", ".layers[15]", "damping"]
    ranks = lines(plot.spectra(model, found))[".layers[15]"][:, 0]
    assert len(ranks) <= 500 < 1200


@pytest.mark.parametrize("fisher", [kfac.Exact(), kfac.Empirical()])
def test_blocks(fisher):
    """The matrices of which `verify` tells how far they are apart."""
    path = ".layers[3]"
    axes = plot.blocks(loss_fn, MODEL, X, Y, layer=path, fisher=fisher)
    exact, guess, difference = [axis.get_images()[0].get_array() for axis in axes]
    assert exact.shape == (10, 10)
    check = kfac.verify(loss_fn, MODEL, X, Y, fisher=fisher)[path]
    error = np.linalg.norm(guess - exact) / np.linalg.norm(exact)
    assert np.allclose(error, check.error) and error > 0.01
    assert np.allclose(np.trace(guess) / np.trace(exact), check.ratio)
    assert np.allclose(difference, guess - exact)
    if isinstance(fisher, kfac.Empirical):

        def gradient(x, y):
            of_one = lambda model: loss_fn(model, x[None], y[None]).value
            return MODEL.layers[3].tag.to_matrix(eqx.filter_grad(of_one)(MODEL).layers[3])

        rows = np.asarray(jax.jit(jax.vmap(gradient))(X, Y)).reshape(6, -1)
        assert np.allclose(exact, rows.T @ rows / 6)


def test_blocks_of_no_layer():
    with pytest.raises(ValueError, match=r"no tagged layer at '\.layers\[2\]', but at"):
        plot.blocks(loss_fn, MODEL, X, Y, layer=".layers[2]")


def test_matplotlib_is_imported_with_the_first_picture():
    """The library does not need it; without it, the error says what to do."""
    code = """
import sys
import eqx_kfac as kfac
assert "matplotlib" not in sys.modules
sys.modules["matplotlib"] = None
try:
    kfac.plot.history([{"loss": 1.0, "rejected": False}])
except ImportError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "`pip install matplotlib`" in done.stdout, done.stderr
