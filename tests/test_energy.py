"""The energy of a wavefunction: its gradient, and the covariance that is its Fisher."""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree
from jax.sharding import NamedSharding, PartitionSpec as P

import eqx_kfac as kfac
from eqx_kfac.debug import _plan

from .helpers import arrays, make_mesh, normal


N, D = 12, 3
KEY = jr.key(5)
X = normal(N, D, seed=1)
REAL = jnp.asarray(2 * np.asarray(normal(N, seed=2)) + 1.0)
COMPLEX = jax.device_put(np.asarray(REAL) + 1j * np.asarray(normal(N, seed=3)))
KINDS = pytest.mark.parametrize("is_complex", [False, True], ids=["real", "complex"])


@eqx.filter_jit
def network(block=kfac.Full(), is_complex=False):
    out = 2 if is_complex else "scalar"
    mlp = eqx.nn.MLP(D, out, 4, 1, activation=jnp.tanh, key=KEY)
    return kfac.convert(mlp, block)


def log_psi(model, x):
    y = jax.vmap(model)(x)
    return y if y.ndim == 1 else jax.lax.complex(y[:, 0], y[:, 1])


def energies(is_complex):
    return COMPLEX if is_complex else REAL


def loss_fn(model, x, e, clip=None):
    return kfac.Energy(log_psi(model, x), e, clip=clip)


def jacobian(model):
    """`[walkers, parameters]`: the derivatives of log psi."""
    return np.asarray(compiled_jacobian(kfac.revert(model)))


@eqx.filter_jit
def compiled_jacobian(model):
    params, static = eqx.partition(model, eqx.is_inexact_array)
    flat, back = ravel_pytree(params)
    return jax.jacfwd(lambda p: log_psi(eqx.combine(back(p), static), X))(flat)


def flat(tree):
    return np.concatenate([a.ravel() for a in arrays(kfac.revert(tree))])


@eqx.filter_jit
def value_and_gradient(loss_fn, model, *args, **kwargs):
    value = lambda model: loss_fn(model, *args, **kwargs).value
    return eqx.filter_value_and_grad(value)(model)


def gradient(*args, **kwargs):
    return flat(value_and_gradient(*args, **kwargs)[1])


@eqx.filter_jit
def matrix_of(operator, loss_fn, model, *args):
    return operator(loss_fn, model, *args).as_matrix()


def covariance(jac):
    away = jac - jac.mean(axis=0)
    return 4 * np.real(away.conj().T @ away) / N


#
# Value and gradient
#


@KINDS
def test_value_and_gradient(is_complex):
    e, model = np.asarray(energies(is_complex)), network(is_complex=is_complex)
    value, grads = value_and_gradient(loss_fn, model, X, jnp.asarray(e))
    np.testing.assert_allclose(value, np.asarray(REAL).mean(), rtol=1e-14)
    o = jacobian(model)
    away = e - e.mean()
    want = 2 * np.real(away.conj() @ o) / N
    np.testing.assert_allclose(flat(grads), want, atol=1e-14)
    # The energies are constants, and of another mean the gradient is the same.
    moved = gradient(loss_fn, model, X, jnp.asarray(e + 7.0))
    np.testing.assert_allclose(moved, want, atol=1e-13)
    assert np.linalg.norm(2 * np.real(e.conj() @ o) / N - want) > 0.1


def test_energies_are_constants():
    def with_model(model, x, e):
        return kfac.Energy(log_psi(model, x), e * jnp.sum(model.layers[0].weight))

    model = network()
    factor = np.sum(np.asarray(model.layers[0].weight))
    got = gradient(with_model, model, X, REAL)
    want = factor * gradient(loss_fn, model, X, REAL, clip=5.0)
    np.testing.assert_allclose(got, want, atol=1e-13)


def test_clipped():
    e = np.array(REAL)
    e[3] = 500.0
    model, args = network(), (X, jnp.asarray(e))
    o, away = jacobian(model), e - e.mean()
    most = 2.0 * np.abs(away).mean()
    away = np.clip(away, -most, most)
    away = away - away.mean()
    want = 2 * away @ o / N
    value, grads = value_and_gradient(loss_fn, model, *args, clip=2.0)
    np.testing.assert_allclose(flat(grads), want, atol=1e-12)
    assert np.linalg.norm(gradient(loss_fn, model, *args) - want) > 1
    np.testing.assert_allclose(value, e.mean())


def test_weights_are_repetitions():
    weights, few = jnp.array([1, 0, 2] * 4), [0, 2, 2, 3, 5, 5, 6, 8, 8, 9, 11, 11]
    repeated = [jax.device_put(np.asarray(a)[few]) for a in (X, REAL)]

    def weighted(model, x, e):
        return kfac.Energy(log_psi(model, x), e, weights=weights)

    model = network()
    got = value_and_gradient(weighted, model, X, REAL)
    want = value_and_gradient(loss_fn, model, *repeated)
    np.testing.assert_allclose(got[0], want[0], rtol=1e-13)
    np.testing.assert_allclose(flat(got[1]), flat(want[1]), atol=1e-13)
    matrix = matrix_of(kfac.analysis.FisherOperator, weighted, model, X, REAL)
    other = matrix_of(kfac.analysis.FisherOperator, loss_fn, model, *repeated)
    np.testing.assert_allclose(matrix, other, atol=1e-12)


#
# Curvature
#


@KINDS
@pytest.mark.parametrize(
    "operator", [kfac.analysis.FisherOperator, kfac.analysis.GaussNewtonOperator]
)
def test_exact_operators_are_the_covariance(operator, is_complex):
    model = network(is_complex=is_complex)
    got = np.asarray(matrix_of(operator, loss_fn, model, X, energies(is_complex)))
    o = jacobian(model)
    np.testing.assert_allclose(got, covariance(o), atol=1e-12)
    around_zero = 4 * np.real(o.conj().T @ o) / N
    assert np.linalg.norm(got - around_zero) > 0.1


def layers_of(matrix, model):
    """The diagonal blocks of a matrix of all parameters, as canonical matrices."""
    found, start = [], 0
    for layer in model.layers:
        rows, columns = layer.weight.shape[0], layer.weight.shape[1]
        size = rows * columns
        own = np.arange(start, start + size).reshape(rows, columns)
        bias = np.arange(start + size, start + size + rows)[:, None]
        index = np.concatenate([own, bias], axis=1).reshape(-1)
        found.append(matrix[np.ix_(index, index)])
        start += size + rows
    return found


@eqx.filter_jit
def collect(fisher, model, e, key=None):
    return kfac.curvature(loss_fn, fisher)(model, X, e, key=key)


@eqx.filter_jit
def collect_matrices(model, e):
    """By the covariance, as dense matrices."""
    curvature = kfac.curvature(loss_fn, kfac.Centred())(model, X, e)
    pairs = zip(model.layers, curvature.layers, strict=True)
    return [layer.tag.block.operator(f).as_matrix() for layer, f in pairs]


@KINDS
def test_centred_blocks_are_the_covariance(is_complex):
    model, e = network(is_complex=is_complex), energies(is_complex)
    got = collect(kfac.Centred(), model, e)
    want = layers_of(covariance(jacobian(model)), model)
    for factors, block in zip(got.layers, want, strict=True):
        np.testing.assert_allclose(factors.matrix, block, atol=1e-12)
    diagonal = collect(kfac.Centred(), network(kfac.Diagonal(), is_complex), e)
    for factors, block in zip(diagonal.layers, want, strict=True):
        found = np.asarray(factors.diagonal).reshape(-1)
        np.testing.assert_allclose(found, np.diag(block), atol=1e-12)
    for block in (kfac.TNT(), kfac.Identity()):
        matrices = collect_matrices(network(block, is_complex), e)
        for matrix, dense in zip(map(np.asarray, matrices), want, strict=True):
            np.testing.assert_allclose(np.trace(matrix), np.trace(dense), rtol=1e-12)
            assert np.linalg.eigvalsh(matrix).min() > -1e-12
    plain = np.asarray(collect(kfac.Exact(), model, e).layers[0].matrix)
    assert np.linalg.norm(plain - want[0]) > 1e-2


@eqx.filter_jit
def summed_over_positions(model, x, e):
    """A wavefunction of particles that share a network, which has a row for each."""
    one = lambda row: jnp.sum(jax.vmap(model)(jnp.stack([row, row[::-1], row**2])))
    return kfac.Energy(jax.vmap(one)(x), e)


def partial_traces(matrix, d_out):
    """The trace over the inputs of a layer's block, `[d_out, d_out]`."""
    blocks = matrix.reshape(d_out, matrix.shape[0] // d_out, d_out, -1)
    return np.einsum("aibi->ab", blocks)


@KINDS
def test_kronecker_less_the_mean_has_the_traces_over_inputs(is_complex):
    model, e = network(kfac.Kronecker(), is_complex), energies(is_complex)
    plain, centred = (collect(f, model, e) for f in (kfac.Exact(), kfac.Centred()))
    o = 2 * jacobian(model).mean(axis=0)
    means = [layers_of(np.outer(part, part), model) for part in (o.real, o.imag)]
    for i, (layer, old, new) in enumerate(
        zip(model.layers, plain.layers, centred.layers, strict=True)
    ):
        block, width = layer.tag.block, layer.weight.shape[0]
        old, new = (np.asarray(block.operator(f).as_matrix()) for f in (old, new))
        of_means = sum(part[i] for part in means)
        found, want = (partial_traces(m, width) for m in (new, old - of_means))
        np.testing.assert_allclose(found, want, atol=1e-12)
        assert np.linalg.eigvalsh(new).min() > -1e-12
        assert np.linalg.norm(partial_traces(old, width) - want) > 1e-2


def test_kronecker_less_the_mean_where_examples_have_rows():
    model = network(kfac.Kronecker(kfac.Expand()))

    @eqx.filter_jit
    def factors(fisher, loss_fn, x, e):
        return kfac.curvature(loss_fn, fisher)(model, x, e)

    both = (kfac.Exact(), kfac.Centred())
    plain, centred = (factors(f, summed_over_positions, X, REAL) for f in both)

    @eqx.filter_jit
    def gradients(x):
        psi = lambda m, row: summed_over_positions(m, row[None], REAL[:1]).outputs[0, 0]
        one = lambda row: eqx.filter_grad(psi)(kfac.revert(model), row)
        return jax.vmap(one)(x)

    for old, new, layer in zip(
        plain.layers, centred.layers, gradients(X).layers, strict=True
    ):
        bias = np.asarray(layer.bias)[..., None]
        each = 2 * np.concatenate([np.asarray(layer.weight), bias], axis=-1)
        mean = each.mean(axis=0)
        size = 3 * np.trace(np.asarray(old.input_factor))
        want = np.asarray(old.output_factor) - mean @ mean.T / size
        np.testing.assert_allclose(new.output_factor, want, atol=1e-12)
        np.testing.assert_array_equal(new.input_factor, old.input_factor)
        assert np.linalg.eigvalsh(np.asarray(new.output_factor)).min() > -1e-12
    # One example is its own mean.
    alone = factors(kfac.Centred(), loss_fn, X[:1], REAL[:1])
    assert max(np.abs(f.output_factor).max() for f in alone.layers) < 1e-12


def test_kronecker_less_the_mean_with_diagonal_sides():
    whole = collect(kfac.Centred(), network(kfac.Kronecker()), REAL)
    narrow = kfac.Kronecker(diagonal_input=True, diagonal_output=True)
    diagonal = collect(kfac.Centred(), network(narrow), REAL)
    for a, b in zip(whole.layers, diagonal.layers, strict=True):
        np.testing.assert_allclose(np.diag(a.output_factor), b.output_factor, atol=1e-12)


@KINDS
def test_verify_compares_with_the_covariance(is_complex):
    model, e = network(is_complex=is_complex), energies(is_complex)
    report = kfac.verify(loss_fn, model, X, e, fisher=kfac.Centred())
    assert report.exact
    assert max(float(np.max(c.error)) for c in report.layers) < 1e-10
    # The trace of a diagonal block is right; that of the second moment is another one.
    diagonal = network(kfac.Diagonal(), is_complex)
    report = kfac.verify(loss_fn, diagonal, X, e, fisher=kfac.Centred())
    for check in report.layers:
        np.testing.assert_allclose(check.ratio, 1, rtol=1e-10)
        assert np.all(check.error > 1e-3)
    kron = network(kfac.Kronecker(), is_complex)
    report = kfac.verify(loss_fn, kron, X, e, fisher=kfac.Centred())
    wanted = layers_of(covariance(jacobian(model)), model)
    found = collect_matrices(kron, e)
    for check, block, exact in zip(report.layers, found, wanted, strict=True):
        np.testing.assert_allclose(check.ratio, np.trace(block) / np.trace(exact))
        error = np.linalg.norm(np.asarray(block) - exact) / np.linalg.norm(exact)
        np.testing.assert_allclose(check.error, error, rtol=1e-6)
    second = kfac.verify(loss_fn, model, X, e).layers[0]
    assert second.ratio == pytest.approx(1)
    moments = [np.trace(f.matrix) for f in collect(kfac.Exact(), model, e).layers]
    centred = [np.trace(f.matrix) for f in collect(kfac.Centred(), model, e).layers]
    assert abs(moments[0] - centred[0]) > 1e-2


def test_verify_estimates_the_covariance(monkeypatch):
    """Where all columns of a root would be too many."""
    monkeypatch.setattr(_plan, "ALL", 0.0)
    report = kfac.verify(loss_fn, network(), X, REAL, fisher=kfac.Centred(), limit=1)
    ratios = [float(check.ratio) for check in report.layers]
    noise = [float(check.ratio_noise) for check in report.layers]
    assert all(check.estimated for check in report.layers)
    for ratio, own in zip(ratios, noise, strict=True):
        assert 0 < own < 0.2 and abs(ratio - 1) < 4 * own
    plain = [np.trace(f.matrix) for f in collect(kfac.Exact(), network(), REAL).layers]
    centred = [
        np.trace(f.matrix) for f in collect(kfac.Centred(), network(), REAL).layers
    ]
    assert max(a / b - 4 * own for a, b, own in zip(plain, centred, noise)) > 1


@KINDS
def test_samples_are_around_zero(is_complex):
    """The estimate by random targets is of the second moment."""
    model, e = network(is_complex=is_complex), energies(is_complex)
    o = jacobian(model)
    want = layers_of(4 * np.real(o.conj().T @ o) / N, model)
    exact = collect(kfac.Exact(), model, e)
    sampled = collect(kfac.MonteCarlo(4000, batch_size=500), model, e, KEY)
    for a, b, block in zip(exact.layers, sampled.layers, want, strict=True):
        np.testing.assert_allclose(a.matrix, block, atol=1e-12)
        away = np.asarray(b.matrix) - block
        assert np.linalg.norm(away) < 0.1 * np.linalg.norm(block)


@KINDS
def test_the_quadratic_model_is_of_the_covariance(is_complex):
    """A step of the length that it chooses is the best along the direction."""
    model, e = network(kfac.TNT(), is_complex), energies(is_complex)
    optimizer = kfac.KFAC(
        kfac.QuadraticModel(), 0.0, 0.1, norm_constraint=None, fisher=kfac.Centred()
    )

    @eqx.filter_jit
    def run(model, e):
        return optimizer.step(loss_fn, model, optimizer.init(model), X, e)

    new, _, info = run(model, e)
    step = flat(new) - flat(model)
    slope = gradient(loss_fn, model, X, e)
    curved = covariance(jacobian(model)) + 0.1 * np.eye(len(step))
    best = -(slope @ step) / (step @ curved @ step)
    np.testing.assert_allclose(best, 1.0, rtol=1e-9)
    assert float(info.learning_rate) > 0


@pytest.mark.parametrize("inside", [False, True])
def test_devices(inside):
    """The means are over the walkers of all devices."""
    mesh = make_mesh((4,))
    params, static = eqx.partition(network(), eqx.is_array)
    take = kfac.value_grad_and_curvature(loss_fn, kfac.Centred())

    def collected(params, x, e):
        found = take(eqx.combine(params, static), x, e, clip=2.0)
        return eqx.filter(found, eqx.is_array)

    run, specs = collected, (P(), P("batch"), P("batch"))
    if inside:
        run = jax.shard_map(run, mesh=mesh, in_specs=specs, out_specs=P())
    args = jax.device_put((X, REAL), NamedSharding(mesh, P("batch")))
    got, want = jax.jit(run)(params, *args), jax.jit(collected)(params, X, REAL)
    for a, b in zip(jtu.tree_leaves(got), jtu.tree_leaves(want), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-12)


#
# What is refused
#


@pytest.mark.parametrize("shape", [(N, 1), (N - 1,)])
def test_other_shapes(shape):
    with pytest.raises(ValueError, match=r"must both have the shape \[walkers\]"):
        kfac.Energy(jnp.zeros(shape), REAL)
    with pytest.raises(ValueError, match="`clip` must be"):
        kfac.Energy(jnp.zeros(N), REAL, clip=0.0)


def test_where_centring_makes_no_sense():
    unable = (kfac.Reduce(), kfac.TensorNormal())
    for block in (kfac.EKFAC(), *map(kfac.Kronecker, unable)):
        with pytest.raises(ValueError, match=r"\.layers\[0\].*`kfac.TNT\(\)`"):
            collect(kfac.Centred(), network(block), REAL)
    small = kfac.cast(network(), jnp.bfloat16)
    with pytest.raises(ValueError, match=r"\.layers\[0\].*round to 16 bits"):
        kfac.Centred().check(small)
    weighted = lambda m, x, e: kfac.Energy(log_psi(m, x), e, weights=jnp.ones(N))
    with pytest.raises(ValueError, match="one loss without weights"):
        eqx.filter_jit(kfac.curvature(weighted, kfac.Centred()))(network(), X, REAL)
    squared = lambda m, x: kfac.SquaredError(jax.vmap(m)(x)[:, None], x[:, :1])
    model = network()
    for loss, args, fisher, what in (
        (loss_fn, (X, REAL), kfac.Exact(), "The terms of `kfac.Energy`"),
        (squared, (X,), kfac.Centred(), "takes the mean over the whole batch"),
    ):
        optimizer = kfac.KFAC(0.1, fisher=fisher)
        state = eqx.filter_jit(optimizer.init)(model)
        step = eqx.filter_jit(optimizer.step)
        with pytest.raises(ValueError, match=f"{what}.*`micro_batches=1`"):
            step(loss, model, state, *args, micro_batches=2)
    with pytest.raises(ValueError, match="no root for every term by itself"):
        kfac.analysis.FisherOperator(loss_fn, model, X, REAL).factor()
    for take in (kfac.analysis.capture, kfac.analysis.Accumulator):
        with pytest.raises(ValueError, match="not one of single examples"):
            take(loss_fn, kfac.Centred())


#
# Variational Monte Carlo
#


class Oscillator(eqx.Module):
    r"""$\log \psi$ of a particle in the potential $x^2 / 2$, whose energy is 1/2."""

    mlp: eqx.nn.MLP

    def __call__(self, x):
        return -(x**2) + self.mlp(x[None])[0]


def oscillating(block):
    plain = eqx.nn.MLP(1, 1, 8, 1, jnp.tanh, key=jr.key(0))
    return kfac.convert(Oscillator(plain), block)


def local_energy(psi, x):
    slope, curved = jax.jvp(jax.grad(psi), (x,), (jnp.ones_like(x),))
    return -0.5 * (curved + slope**2) + 0.5 * x**2


@eqx.filter_jit
def ground_state(optimizer, model, steps):
    """The mean energies along the way, of walkers that move by Metropolis' rule."""
    static = eqx.filter(model, eqx.is_array, inverse=True)

    def move(carry, key):
        x, log_density = carry
        noise, chance = jr.split(key)
        new = x + jr.normal(noise, x.shape)
        ratio = log_density(new) - log_density(x)
        return jnp.where(jnp.log(jr.uniform(chance, x.shape)) < ratio, new, x)

    def step(carry, key):
        arrays, state, x = carry
        model = eqx.combine(arrays, static)
        psi = kfac.revert(model)
        log_density = lambda x: 2 * jax.vmap(psi)(x)
        for i in range(5):
            x = move((x, log_density), jr.fold_in(key, i))
        energies = jax.vmap(lambda x: local_energy(psi, x))(x)
        loss_fn = lambda model: kfac.Energy(jax.vmap(model)(x), energies)
        model, state, info = optimizer.step(loss_fn, model, state, key=key)
        return (eqx.filter(model, eqx.is_array), state, x), (info.loss, info.rejected)

    start = eqx.filter(model, eqx.is_array), optimizer.init(model), jr.normal(KEY, (256,))
    return jax.lax.scan(step, start, jr.split(KEY, steps))[1]


@pytest.mark.parametrize("block", [kfac.TNT(), kfac.Full()])
def test_a_ground_state_is_found(block):
    energies, rejected = ground_state(kfac.KFAC.vmc(), oscillating(block), 100)
    assert np.mean(energies[1:3]) > 0.55 and not np.any(rejected)
    assert abs(np.mean(energies[-50:]) - 0.5) < 0.015


def test_vmc_takes_other_choices():
    optimizer = kfac.KFAC.vmc(damping=1e-2)
    assert isinstance(optimizer.fisher, kfac.Centred) and optimizer.damping == 1e-2
    assert optimizer.curvature_period == optimizer.inverse_period == 10
    assert kfac.KFAC.vmc() == kfac.KFAC.vmc()  # Compiled once.
    lines = str(optimizer).splitlines()
    assert sum("every 10 steps, at first at 0, 1, 2, 3, 4, 6" in e for e in lines) == 2
    lines = str(kfac.KFAC.vmc(curvature_period=10, inverse_period=1)).splitlines()
    assert not any("at first" in line for line in lines)
    lines = str(kfac.KFAC.vmc(inverse_period="auto")).splitlines()
    assert sum("steps, at first at 0, 1, 2, 3, 4, 6" in line for line in lines) == 2
    with pytest.raises(TypeError, match="unknown"):
        kfac.KFAC.vmc(unknown=1)
    with pytest.raises(ValueError, match=r"Use `kfac.TNT\(\)`"):
        ground_state(optimizer, oscillating(kfac.EKFAC()), 1)
