"""The pictures of "My loss stalls": runs in which something is wrong, and the same run
without.

    python tests/benchmarks/trouble.py --out docs/images
"""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
from sklearn.datasets import load_digits

import eqx_kfac as kfac


matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402


class Run(NamedTuple):
    model: Any
    state: Any
    infos: list
    averaged: list  # The loss of the averaged model over all data.


def digits() -> tuple[np.ndarray, np.ndarray]:
    pixels, labels = load_digits(return_X_y=True)
    return (pixels / 16).astype(np.float32), labels.astype(np.int32)


def loss_fn(model, x, y):
    return kfac.SoftmaxCrossEntropy(jax.vmap(model)(x), y)


def train(
    optimizer: kfac.KFAC,
    steps: int,
    batch: int = 100,
    spoil: Callable = lambda i, x: x,
    depth: int = 2,
) -> Run:
    x, y = digits()
    mlp = eqx.nn.MLP(64, 10, 64, depth, activation=jnp.tanh, key=jax.random.key(0))
    model = kfac.convert(mlp)
    step, state = eqx.filter_jit(optimizer.step), optimizer.init(model)
    look = eqx.filter_jit(lambda m, s: loss_fn(kfac.averaged(m, s), x, y).value)
    rng, infos, averaged = np.random.default_rng(0), [], []
    for i in range(steps):
        index = rng.integers(len(x), size=batch)
        key = jax.random.fold_in(jax.random.key(1), i)
        bad = spoil(i, x[index])
        model, state, info = step(loss_fn, model, state, bad, y[index], key=key)
        infos.append(info.as_dict())
        if state.averaged_parameters is not None and i % 10 == 9:
            averaged.append((i, float(look(model, state))))
    return Run(model, state, infos, averaged)


def plain(**arguments) -> kfac.KFAC:
    """Numbers, and no guard of any kind."""
    given = dict(learning_rate=0.1, damping=0.03, norm_constraint=None, averaging=None)
    return kfac.KFAC(**{**given, **arguments})


def losses(run: Run) -> np.ndarray:
    return np.array([float(info["loss"]) for info in run.infos])


def draw_losses(axis: Any, runs: dict[str, Run]) -> None:
    for (name, run), colour in zip(runs.items(), ("#d1495b", "#30638e"), strict=False):
        axis.plot(losses(run), label=name, color=colour, linewidth=1.2)
    axis.set(yscale="log", xlabel="steps", title="loss")
    axis.legend(frameon=False, fontsize=8)


def row(columns: int) -> Any:
    figure, axes = plt.subplots(
        1, columns, figsize=(4 * columns, 3.2), layout="constrained"
    )
    return figure, axes


def stalls(steps: int) -> Any:
    """Damping above all curvature."""
    runs = {
        "damping=30": train(plain(damping=30.0), steps),
        "KFAC()": train(kfac.KFAC(), steps),
    }
    figure, axes = row(3)
    draw_losses(axes[0], runs)
    for axis, (name, run) in zip(axes[1:], runs.items(), strict=True):
        damping = run.state.damping if run.state.layer_damping is None else None
        damping = run.state.layer_damping if damping is None else damping
        kfac.plot.spectra(run.model, run.state.curvature, damping=damping, ax=axis)
        axis.set_title(name)
    return figure


def explodes(steps: int) -> Any:
    """Long steps, little damping, and nothing that bounds them."""
    runs = {
        "learning rate 0.5, no bound": train(
            plain(learning_rate=0.5, damping=1e-4, inverse_period=1), steps
        ),
        "KFAC()": train(kfac.KFAC(), steps),
    }
    figure, axes = row(2)
    draw_losses(axes[0], runs)
    for (name, run), colour in zip(runs.items(), ("#d1495b", "#30638e"), strict=True):
        lengths = [float(info["update_norm"]) for info in run.infos]
        axes[1].plot(lengths, color=colour, label=name, linewidth=1.2)
    axes[1].set(yscale="log", xlabel="steps", title="update norm")
    return figure


def rejected(steps: int) -> Any:
    """Some batches have a value that is no number."""

    def spoil(i, x):
        return (
            np.where(np.arange(x.size).reshape(x.shape) == 0, np.nan, x)
            if i % 17 == 9
            else x
        )

    run = train(kfac.KFAC(), steps, spoil=spoil)
    return kfac.plot.history(run.infos)[0].figure


def noisy(steps: int) -> Any:
    """Batches of eight: what they say of the last model, and the averaged one."""
    run = train(kfac.KFAC(), steps, batch=8)
    figure, axis = plt.subplots(figsize=(5, 3.2), layout="constrained")
    axis.plot(losses(run), color="0.7", linewidth=0.8, label="of each batch")
    axis.plot(
        *np.array(run.averaged).T, color="#d1495b", label="averaged model, all data"
    )
    axis.set(yscale="log", xlabel="steps", title="loss")
    axis.legend(frameon=False, fontsize=8)
    return figure


def distrusted(steps: int) -> Any:
    """Rules on small batches: the quadratic model foretells nothing."""
    quadratic = kfac.QuadraticModel()
    rules = kfac.KFAC(quadratic, quadratic, kfac.LevenbergMarquardt(1e-3, interval=1))
    run = train(rules, steps, batch=16)
    return kfac.plot.history(run.infos)[0].figure


FIGURES = (stalls, explodes, rejected, noisy, distrusted)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200, help="of every run")
    parser.add_argument("--out", type=Path, default=Path("runs"), help="a folder")
    parser.add_argument("--only", help="one picture")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    for figure in FIGURES:
        if options.only in (None, figure.__name__):
            path = options.out / f"trouble-{figure.__name__}.png"
            figure(options.steps).savefig(path, dpi=100)
            print(path)


if __name__ == "__main__":
    main()
