"""A picture of one run of `KFAC()`: the loss, the damping of every layer, and the length
of the velocity in its trust region.

    python tests/benchmarks/anatomy.py --data folder/of/mnist --out anatomy.png
    python tests/benchmarks/anatomy.py --steps 20        # does it run?
"""

import argparse
from pathlib import Path

import equinox as eqx
import jax
import matplotlib
import numpy as np
import race_problems
from races import batches

import eqx_kfac as kfac


matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402


def run(race: race_problems.Race, steps: int) -> dict[str, np.ndarray]:
    """What there is to see at every step."""
    optimizer = kfac.KFAC()
    region = optimizer.norm_constraint

    def loss_fn(model, *batch):
        return race.loss_fn(model, None, *batch)[0]

    @eqx.filter_jit
    def step(model, state, batch, key):
        model, state, info = optimizer.step(loss_fn, model, state, *batch, key=key)
        _, most = region(state.norm_constraint, info.loss, None)
        dampings = jax.tree.leaves(state.layer_damping)
        return model, state, (info.loss, dampings, state.extent.squared_length, most)

    @eqx.filter_jit
    def averaged_loss(model, state, *batch):
        return loss_fn(kfac.averaged(model, state), *batch).value

    model, state = race.model, optimizer.init(race.model)
    some = tuple(a[:1000] for a in race.train)
    seen, averaged = [], []
    for i, batch in zip(range(steps), batches(race, 0), strict=False):
        key = jax.random.fold_in(jax.random.key(0), i)
        model, state, now = step(model, state, batch, key)
        seen.append(jax.device_get(now))
        if i % 10 == 9:
            averaged.append((i + 1, float(averaged_loss(model, state, *some))))
    losses, dampings, extents, most = zip(*seen, strict=True)
    return dict(
        losses=np.array(losses),
        dampings=np.array(dampings),
        extents=np.array(extents),
        most=np.array(most),
        averaged=np.array(averaged).reshape(-1, 2),
    )


def draw(seen: dict[str, np.ndarray], layers: list[str], path: Path) -> None:
    figure, axes = plt.subplots(1, 3, figsize=(13, 3.6))
    axes[0].plot(seen["losses"], color="0.7", linewidth=0.8, label="of each batch")
    axes[0].plot(*seen["averaged"].T, color="#d1495b", label="averaged model, all data")
    axes[0].set(title="loss", yscale="log")
    for name, of_layer in zip(layers, seen["dampings"].T, strict=True):
        axes[1].plot(of_layer, label=name)
    axes[1].set(title="damping", yscale="log")
    axes[2].plot(seen["most"], color="0.6", linestyle="--", label="at most")
    axes[2].plot(seen["extents"], color="#30638e", linewidth=0.8, label="velocity")
    axes[2].set(title="squared length of the velocity", yscale="log")
    for axis in axes:
        axis.set_xlabel("steps")
        axis.legend(frameon=False, fontsize=8)
        axis.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--data", type=Path, help="a folder with MNIST's test set")
    parser.add_argument("--out", type=Path, default=Path("runs/anatomy.png"))
    options = parser.parse_args()
    race = race_problems.race(race_problems.gru, 0, options.data)
    layers = ["recurrent, gates", "recurrent, candidate", "inputs", "output"]
    options.out.parent.mkdir(parents=True, exist_ok=True)
    draw(run(race, options.steps), layers, options.out)


if __name__ == "__main__":
    main()
