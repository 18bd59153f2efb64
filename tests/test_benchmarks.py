"""What the benchmarks compare is the same, each network tagged and in plain JAX; and what
they would show if it were lost, but programs show, too."""

import sys
from pathlib import Path

import equinox as eqx
import jax
import numpy as np
import pytest

import eqx_kfac as kfac


sys.path.insert(0, str(Path(__file__).parent / "benchmarks"))
import gpu  # noqa: E402  # pyright: ignore
import problems  # noqa: E402  # pyright: ignore


PROBLEMS = {
    "autoencoder": lambda: problems.autoencoder(5, toy=True),
    "mlp": lambda: problems.mlp(8, 8, 1),
    "stacked": lambda: problems.stacked(3, 8, 8),
    "convnet": lambda: problems.convnet(5, toy=True),
    "transformer": lambda: problems.transformer(3, toy=True),
}


@pytest.fixture(autouse=True)
def as_a_user_has_it():
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        yield


@pytest.mark.parametrize("name", PROBLEMS)
def test_same_loss_and_gradient(name):
    problem = PROBLEMS[name]()
    ours = eqx.filter_value_and_grad(lambda m: problem.loss_fn(m, *problem.args).value)
    want, want_grads = eqx.filter_jit(ours)(problem.model)
    theirs = jax.jit(jax.value_and_grad(lambda p: problem.plain.loss(p, problem.args)))
    value, grads = theirs(problem.plain.params)
    np.testing.assert_allclose(value, want, rtol=1e-10)
    np.testing.assert_allclose(norm(grads), norm(want_grads), rtol=1e-8)
    step = lambda p, g: jax.numpy.asarray(np.asarray(p) - np.asarray(g))
    moved = jax.tree.map(step, problem.plain.params, grads)
    assert abs(float(theirs(moved)[0]) - float(want)) > 1e-4


def norm(tree):
    return np.sqrt(sum(np.sum(np.square(np.asarray(x))) for x in jax.tree.leaves(tree)))


def tokens_curvature(model, x):
    loss = lambda model, x: kfac.SquaredError(jax.vmap(jax.vmap(model))(x))
    return kfac.curvature(loss, kfac.Exact())(model, x)


def test_rows_are_merged_on_cpu_only():
    """There, XLA would transpose copies of them. Elsewhere, axes of rows that are split
    over devices stay apart."""
    model = kfac.convert(eqx.nn.Linear(3, 4, key=jax.random.key(0)))
    params, static = eqx.partition(model, eqx.is_array)
    fn = jax.jit(lambda params, x: tokens_curvature(eqx.combine(params, static), x))
    traced = fn.trace(params, jax.numpy.ones((5, 7, 3)))
    over_both = "contracting_dims = [0, 1] x [0, 1]"
    for platform, merged in (("cpu", True), ("cuda", False), ("tpu", False)):
        text = traced.lower(lowering_platforms=(platform,)).as_text()
        assert (over_both not in text) == merged


def programs_compiled(fn):
    """How many there are that `fn()` compiles."""
    number = 0

    def listen(event, *_, **__):
        nonlocal number
        number += event == "/jax/core/compile/backend_compile_duration"

    jax.clear_caches()
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        fn()
    finally:
        jax.monitoring.clear_event_listeners()
    return number


@pytest.mark.parametrize("packed", [False, True])
def test_init_is_few_programs(packed):
    """Not one for every shape of a factor, or of what it is made of."""
    sizes = range(3, 12)

    @eqx.filter_jit
    def make(key):
        layers = [eqx.nn.Linear(i, i + 1, key=key) for i in sizes]
        return kfac.convert(eqx.nn.Sequential(layers))

    model = make(jax.random.key(0))
    init = kfac.KFAC(0.1).init
    if packed:
        init = eqx.filter_jit(lambda model: kfac.packed(kfac.KFAC(0.1).init(model)))
    velocities = 0 if packed else 2 * len(sizes)
    assert velocities < programs_compiled(lambda: init(model)) < velocities + 13


def test_one_command_for_a_gpu():
    """What a contender says, and a row of the table; one that is not there is named."""
    found = gpu.measure("dense 8x1", "KFAC()", seconds=0.0, toy=True)
    assert found["mean"] > 0 and found["idle"] > 0 and found["compiling"] > 0
    assert found["parameters"] == 8 * 8 + 8 + 8 * 10 + 10
    row = gpu.row("dense 8x1", "KFAC()", found, adam=found | dict(mean=found["mean"] / 2))
    assert "(2.00)" in row and row.count("|") == 9
    missing = gpu.row("dense 8x1", "kfac-jax", dict(error="not there"), adam=found)
    assert "not there" in missing and missing.count("|") == 9
    code, text = gpu.started(["-c", "import time; time.sleep(60)"], seconds=1.0)
    assert code == 1 and text == "out of time"
