"""Who races in `speed.py`: each makes its state, and a step that is called as a user
calls it. All have the same hyper-parameters, periods and batch, wherever they apply."""

import functools as ft
import importlib.util
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from problems import copied, Problem

import eqx_kfac as kfac


RATE, MOMENTUM, DAMPING, NORM = 1e-3, 0.9, 0.1, 1e-3
PERIOD = 5  # Of inverses, and of the rule for the damping.
NEVER = 10**9  # (Once, at the first step.)


class Contender(NamedTuple):
    name: str
    init: Callable[[], Any]  # -> carry
    step: Callable[[Any, int], Any]  # (carry, number) -> carry
    # The state's leaves, out of a carry, are what the optimizer remembers.
    state: Callable[[Any], Any] = lambda carry: ()
    lower: Callable[[], Any] | None = None  # The step, freshly traced.
    steps_per_call: int = 1


def revert(problem: Problem) -> Any:
    return copied(kfac.revert(problem.model))


def gradient(problem: Problem) -> Contender:
    def make():
        return eqx.filter_jit(
            eqx.filter_value_and_grad(lambda m, a: problem.loss_fn(m, *a).value)
        )

    run, model = make(), revert(problem)
    return Contender(
        "gradient",
        lambda: None,
        lambda carry, _: run(model, problem.args),
        lower=lambda: make().lower(model, problem.args),
    )


def jitted(step: Callable[[Any, Any], Any], steps: int) -> Callable[[Any, Any], Any]:
    """`step(fixed, carry)` so many times, as one program."""

    def run(fixed, carry):
        if steps == 1:
            return step(fixed, carry)
        arrays, static = eqx.partition(carry, eqx.is_array)

        def body(arrays, _):
            return eqx.filter(
                step(fixed, eqx.combine(arrays, static)), eqx.is_array
            ), None

        arrays, _ = jax.lax.scan(body, arrays, None, steps)
        return eqx.combine(arrays, static)

    return eqx.filter_jit(run, donate="all-except-first")


def from_optax(
    name: str,
    make: Callable[[], optax.GradientTransformation],
    problem: Problem,
    steps: int = 1,
) -> Contender:
    """With so many steps a call."""
    optimizer = make()

    def step(args, carry):
        model, state = carry
        grads = eqx.filter_grad(lambda m: problem.loss_fn(m, *args).value)(model)
        params = eqx.filter(model, eqx.is_inexact_array)
        updates, state = optimizer.update(grads, state, params)
        return eqx.apply_updates(model, updates), state

    def init():
        model = revert(problem)
        return model, optimizer.init(eqx.filter(model, eqx.is_inexact_array))

    run = jitted(step, steps)
    return Contender(
        name,
        init,
        lambda carry, _: run(problem.args, carry),
        state=lambda carry: carry[1],
        steps_per_call=steps,
    )


def from_contrib(problem: Problem) -> list[Contender]:
    """The optimizers of optax that are not diagonal, as far as there are any."""
    found = []
    for name in ("muon", "soap", "shampoo"):
        make = getattr(optax.contrib, name, None)
        if make is not None:
            found.append(from_optax(name.capitalize(), lambda m=make: m(RATE), problem))
    return found


class AsMatrices(kfac.KFAC):
    """An optimizer that preconditions all gradients as matrices, also where rows are less
    work."""

    _by_rows = False


def optimizer(
    adaptive: bool,
    examples: int | None = None,
    in_turn: bool = False,
    by_rows: bool = False,
    **choices: Any,
) -> kfac.KFAC:
    """With all curvature from the first `examples` of a batch."""
    make = kfac.KFAC if by_rows else AsMatrices
    period = kfac.Staggered(PERIOD) if in_turn else PERIOD
    plain = dict(curvature_period=1, inverse_period=period, averaging=None)
    choices = plain | dict(fisher=kfac.MonteCarlo(examples=examples)) | choices
    if adaptive:
        quadratic = kfac.QuadraticModel(examples)
        damping = kfac.LevenbergMarquardt(DAMPING, interval=PERIOD, minimum=1e-5)
        return make(quadratic, quadratic, damping, **choices)
    return make(RATE, MOMENTUM, DAMPING, norm_constraint=NORM, **choices)


def ours(
    name: str, problem: Problem, chosen: kfac.KFAC, packed: bool = False, steps: int = 1
) -> Contender:
    """With so many steps a call, all with the same key."""

    def make():
        def step(fixed, carry):
            args, key = fixed
            model, state, _ = chosen.step(problem.loss_fn, *carry, *args, key=key)
            return model, state

        return jitted(step, steps)

    def init():
        model = copied(problem.model)
        state = chosen.init(model)
        return model, kfac.packed(state) if packed else state

    run, keys = make(), list(jax.random.split(jax.random.key(0), PERIOD))
    return Contender(
        name,
        init,
        lambda carry, number: run((problem.args, keys[number % PERIOD]), carry),
        state=lambda carry: carry[1],
        lower=lambda: make().lower((problem.args, keys[0]), init()),
        steps_per_call=steps,
    )


def ours_flattened(problem: Problem, adaptive: bool) -> Contender:
    """Only leaves go in and out: no Module is taken apart and put together at a step."""
    chosen = optimizer(adaptive)
    arrays, static = eqx.partition(
        (problem.model, chosen.init(problem.model)), eqx.is_array
    )
    treedef = jax.tree.structure(arrays)

    def joined(leaves):
        return eqx.combine(jax.tree.unflatten(treedef, leaves), static)

    @ft.partial(jax.jit, donate_argnums=0)
    def run(leaves, args, key):
        model, state = joined(leaves)
        model, state, _ = chosen.step(problem.loss_fn, model, state, *args, key=key)
        return jax.tree.leaves(eqx.filter((model, state), eqx.is_array))

    keys = list(jax.random.split(jax.random.key(0), PERIOD))
    return Contender(
        f"K-FAC, {kind(adaptive)}, flattened",
        lambda: copied(jax.tree.leaves(arrays)),
        lambda carry, number: run(carry, problem.args, keys[number % PERIOD]),
        state=lambda carry: joined(carry)[1],
    )


def kind(adaptive: bool) -> str:
    return "adaptive" if adaptive else "fixed"


def without_inversion(problem: Problem) -> Contender:
    return ours("part: no inversion", problem, optimizer(False, inverse_period=NEVER))


def parts(problem: Problem) -> list[Contender]:
    """Steps that leave something out, or do it more often, and what only collects
    statistics: the components are differences between them."""
    collect = eqx.filter_jit(kfac.value_grad_and_curvature(problem.loss_fn))
    key, model = jax.random.key(0), copied(problem.model)
    statistics = Contender(
        "part: statistics",
        lambda: None,
        lambda carry, _: collect(model, *problem.args, key=key),
    )
    choices = {
        "part: no curvature": optimizer(
            False, inverse_period=NEVER, curvature_period=NEVER
        ),
        "part: inversion at every step": optimizer(False, inverse_period=1),
        "part: adaptive, no inversion": optimizer(True, inverse_period=NEVER),
    }
    changed = [ours(name, problem, chosen) for name, chosen in choices.items()]
    return [statistics, without_inversion(problem), *changed]


def has_peer() -> bool:
    return importlib.util.find_spec("kfac_jax") is not None


def peer(problem: Problem, adaptive: bool) -> Contender | None:
    """kfac-jax, if it is there and the network is there in plain JAX."""
    if problem.plain is None or not has_peer():
        return None
    import kfac_jax  # pyright: ignore

    loss, shared = problem.plain.loss, dict(inverse_update_period=PERIOD)
    if adaptive:
        choices = dict(
            use_adaptive_learning_rate=True,
            use_adaptive_momentum=True,
            use_adaptive_damping=True,
            initial_damping=DAMPING,
            min_damping=1e-5,
            damping_adaptation_interval=PERIOD,
            damping_adaptation_decay=0.95,
        )
        numbers = {}
    else:
        choices = dict(norm_constraint=NORM)
        values = dict(learning_rate=RATE, momentum=MOMENTUM, damping=DAMPING)
        numbers = {name: jnp.asarray(value) for name, value in values.items()}
    chosen = kfac_jax.Optimizer(
        jax.value_and_grad(lambda p, batch: loss(p, batch, kfac_jax)),
        l2_reg=problem.l2,
        num_burnin_steps=0,
        curvature_ema=0.95,
        # The layers of a network that registers none are found by matching patterns.
        use_automatic_registration=True,
        batch_size_extractor=lambda batch: len(batch[0]),
        **shared,
        **choices,
    )
    keys = [jax.random.PRNGKey(i) for i in range(PERIOD)]

    def init():
        params = copied(problem.plain.params)  # pyright: ignore
        return params, chosen.init(params, keys[0], problem.args)

    def step(carry, number):
        params, state, _ = chosen.step(
            *carry,
            keys[number % PERIOD],
            batch=problem.args,
            global_step_int=number,
            **numbers,
        )
        return params, state

    return Contender(f"kfac-jax, {kind(adaptive)}", init, step, lambda c: c[1])
