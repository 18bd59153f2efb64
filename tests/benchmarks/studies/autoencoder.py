# %% [markdown]
# # The deep autoencoder, with nothing to tune
#
# The problem on which K-FAC was first shown (J. Martens and R. Grosse, *Optimizing Neural
# Networks with Kronecker-factored Approximate Curvature*, ICML 2015, section 13): an
# autoencoder 784-1000-500-250-30-250-500-1000-784 with tanh units and a linear code,
# trained on binary cross-entropy and a little L2. Five optimizers from one
# initialisation:
#
# - K-FAC as `KFAC()`, with nothing to choose,
# - K-FAC that chooses learning rate, momentum and damping by itself: for large batches,
# - K-FAC with numbers for this problem,
# - Adam,
# - stochastic gradient descent with Nesterov's momentum.
#
# With `--data` it reads a folder of MNIST files (`*-images-idx3-ubyte`, or `.gz`);
# without, it takes the 1,797 digits that come with scikit-learn, resized to 28 x 28.
#
#     python tests/benchmarks/studies/autoencoder.py  # a few minutes on two CPU cores
#     python tests/benchmarks/studies/autoencoder.py --data path/to/mnist
#     python tests/benchmarks/studies/autoencoder.py --seeds 3  # as many runs of each
#     python tests/benchmarks/studies/autoencoder.py --resume  # go on
#     python tests/benchmarks/studies/autoencoder.py --methods kfac adam
#     python tests/benchmarks/studies/autoencoder.py --toy  # does everything run?

# %%
import argparse
import gzip
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from harness import make_parser, parsed, save_picture
from jaxtyping import Float, PRNGKeyArray
from matplotlib.figure import Figure
from sklearn.datasets import load_digits
from tqdm import tqdm

import eqx_kfac as kfac


# %% [markdown]
# ## Data, network and loss


# %%
def load(folder: Path | None) -> Float[np.ndarray, "images 784"]:
    """Images with pixels in [0, 1]: of the training files in `folder` if it has any, else
    of the test files."""
    if folder is None:
        small = load_digits(return_X_y=True)[0].reshape(-1, 8, 8).astype(np.float32) / 16
        large = jax.image.resize(small, (len(small), 28, 28), "linear")
        return np.asarray(large).reshape(-1, 784)
    found = sorted(folder.rglob("*images-idx3-ubyte*"))
    found = [p for p in found if p.name.startswith("train")] or found
    if not found:
        raise SystemExit(f"No `*images-idx3-ubyte` or `.gz` file in {folder}.")
    raw = found[0].read_bytes()
    raw = gzip.decompress(raw) if found[0].suffix == ".gz" else raw
    pixels = np.frombuffer(raw, np.uint8, offset=16)
    return (pixels.reshape(-1, 784) / 255).astype(np.float32)


def network(widths: tuple[int, ...], key: PRNGKeyArray) -> eqx.nn.Sequential:
    """The encoder through `widths`, and its mirror image. Weights have variance 1 over
    fan-in, biases are zero."""
    sizes = [784, *widths, *widths[-2::-1], 784]
    linear = (len(widths) - 1, len(sizes) - 2)  # The code and the output.
    lecun = jax.nn.initializers.lecun_normal(in_axis=1, out_axis=0)
    layers = []
    for i, key in enumerate(jax.random.split(key, len(sizes) - 1)):
        layer = eqx.nn.Linear(sizes[i], sizes[i + 1], key=key)
        new = lecun(key, layer.weight.shape), jnp.zeros(sizes[i + 1])
        layers.append(eqx.tree_at(lambda m: (m.weight, m.bias), layer, new))
        if i not in linear:
            layers.append(eqx.nn.Lambda(jnp.tanh))
    return eqx.nn.Sequential(layers)


def loss_fn(model, x):
    logits = jax.vmap(model)(x)
    return kfac.SigmoidCrossEntropy(logits, x) + kfac.L2(model, 1e-5)


@eqx.filter_jit
def cross_entropy(model, x):
    return kfac.SigmoidCrossEntropy(jax.vmap(model)(x), x).value


# %% [markdown]
# ## The optimizers
#
# What each one needs to be told. The adaptive K-FAC is given a first damping, which it
# corrects as it goes, and a least one; its other numbers are about how much work to do.
# The others' numbers were found by trying.


# %%
class Trainer(NamedTuple):
    name: str
    batch: int
    init: Callable[[Any], Any]
    # (model, state, x, key) -> (model, state, learning rate, damping)
    step: Callable[..., tuple[Any, Any, Any, Any]]
    # (model, state) -> the model to look at
    final: Callable[[Any, Any], Any] = lambda model, state: model


def kfac_trainer(name: str, optimizer: kfac.KFAC, batch: int) -> Trainer:
    @eqx.filter_jit
    def step(model, state, x, key):
        model, state, info = optimizer.step(loss_fn, model, state, x, key=key)
        return model, state, info.learning_rate, info.damping

    trainer = Trainer(name, batch, optimizer.init, step)
    averages = optimizer.averaging is not None
    return trainer._replace(final=kfac.averaged) if averages else trainer


def untuned(batch: int = 500) -> Trainer:
    return kfac_trainer("K-FAC", kfac.KFAC(), batch)


def full_batch(batch: int = 1000) -> Trainer:
    optimizer = kfac.KFAC.full_batch()
    return kfac_trainer("KFAC.full_batch()", optimizer, batch)


def adaptive(batch: int = 1000) -> Trainer:
    part = min(125, batch)  # Of a batch, for curvature.
    quadratic = kfac.QuadraticModel(examples=part)
    optimizer = kfac.KFAC(
        quadratic,
        quadratic,
        kfac.LevenbergMarquardt(initial=0.1, minimum=1e-3),
        fisher=kfac.MonteCarlo(examples=part),
        inverse_period=10,
        ema=0.9,
    )
    return kfac_trainer("K-FAC, adaptive", optimizer, batch)


def fixed(batch: int = 1000) -> Trainer:
    optimizer = kfac.KFAC(
        learning_rate=0.05,
        momentum=0.7,
        damping=optax.exponential_decay(0.1, 50, 0.1, end_value=1e-3),
        norm_constraint=0.1,
        averaging=None,
        curvature_period=1,
        fisher=kfac.MonteCarlo(examples=min(125, batch)),
        inverse_period=10,
        ema=0.9,
    )
    return kfac_trainer("K-FAC, fixed", optimizer, batch)


def optax_trainer(
    name: str, transformation: optax.GradientTransformation, rate: float, batch: int
) -> Trainer:
    @eqx.filter_jit
    def step(model, state, x, key):
        del key
        grads = eqx.filter_grad(lambda m: loss_fn(m, x).value)(model)
        updates, state = transformation.update(grads, state)
        return eqx.apply_updates(model, updates), state, rate, 0.0

    def init(model):
        return transformation.init(eqx.filter(model, eqx.is_inexact_array))

    return Trainer(name, batch, init, step)


def adam(rate: float = 1e-3, batch: int = 500) -> Trainer:
    return optax_trainer("Adam", optax.adam(rate), rate, batch)


def sgd(rate: float = 3e-3, batch: int = 500) -> Trainer:
    momentum = optax.sgd(rate, momentum=0.9, nesterov=True)
    return optax_trainer("SGD with momentum", momentum, rate, batch)


# %% [markdown]
# ## Training, and going on where it stopped
#
# Model and state are PyTrees: `eqx.tree_serialise_leaves` writes all there is to know.
# Batches and keys are functions of the step, so that a run that is resumed is the run
# that was interrupted.


# %%
class Curve(NamedTuple):
    """Cross-entropy over all images; seconds of steps only."""

    steps: list[int]
    seconds: list[float]
    losses: list[float]
    compile_seconds: float

    def reached(self, target: float) -> tuple[int, float] | None:
        """Steps and seconds at the first look at or below `target`."""
        for step, seconds, loss in zip(self.steps, self.seconds, self.losses):
            if loss <= target:
                return step, seconds
        return None


class Stop(NamedTuple):
    target: float  # Cross-entropy.
    seconds: float
    steps: int

    def __call__(self, curve: Curve) -> bool:
        loss = curve.losses[-1]
        done = loss <= self.target or not np.isfinite(loss)
        return done or curve.seconds[-1] >= self.seconds or curve.steps[-1] >= self.steps


def batch_at(step: int, x: np.ndarray, size: int, seed: int) -> np.ndarray:
    """Every image once an epoch, in an order of its own."""
    size = min(size, len(x))
    per_epoch = len(x) // size
    epoch, index = divmod(step, per_epoch)
    order = np.random.default_rng([seed, epoch]).permutation(len(x))
    return x[order[index * size : (index + 1) * size]]


def copy(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf.copy() if eqx.is_array(leaf) else leaf, tree)


def compile_step(trainer: Trainer, model: Any, state: Any, x: np.ndarray) -> float:
    """The seconds of the very first step, whose result is thrown away."""
    start = time.perf_counter()
    out = trainer.step(copy(model), copy(state), x, jax.random.key(0))
    jax.block_until_ready(out)
    return time.perf_counter() - start


def save(checkpoint: Path, model: Any, state: Any, curve: Curve) -> None:
    """Two files, one for the arrays and one for the curve so far."""
    checkpoint.parent.mkdir(parents=True, exist_ok=True)
    eqx.tree_serialise_leaves(checkpoint.with_suffix(".eqx"), (model, state))
    checkpoint.with_suffix(".json").write_text(json.dumps(curve._asdict()))


def restore(checkpoint: Path, model: Any, state: Any) -> tuple[Any, Any, Curve]:
    like = (model, state)
    model, state = eqx.tree_deserialise_leaves(checkpoint.with_suffix(".eqx"), like)
    curve = Curve(**json.loads(checkpoint.with_suffix(".json").read_text()))
    return model, state, curve


def train(
    trainer: Trainer,
    model: Any,
    x: np.ndarray,
    stop: Stop,
    seed: int = 0,
    look_every: int = 10,
    checkpoint: Path | None = None,
    resume: bool = False,
) -> Curve:
    """Trains until `stop`, looking at all images every so many steps."""
    state = trainer.init(model)
    compile_seconds = compile_step(
        trainer, model, state, batch_at(0, x, trainer.batch, seed)
    )
    images = jnp.asarray(x[:10_000])
    final = eqx.filter_jit(trainer.final)
    curve = Curve([0], [0.0], [float(cross_entropy(model, images))], compile_seconds)
    if resume and checkpoint is not None and checkpoint.with_suffix(".json").exists():
        model, state, curve = restore(checkpoint, model, state)
    begun, name = curve.steps[-1], f"{trainer.name}, seed {seed}"
    with tqdm(desc=name, unit=" steps", initial=begun, disable=None) as bar:
        while not stop(curve):
            first, seconds = curve.steps[-1], curve.seconds[-1]
            rate = damping = 0.0
            last = min(first + look_every, stop.steps)
            for step in range(first, last):
                batch = batch_at(step, x, trainer.batch, seed)
                key = jax.random.fold_in(jax.random.key(seed), step)
                began = time.perf_counter()
                model, state, rate, damping = trainer.step(model, state, batch, key)
                jax.block_until_ready(model)
                seconds += time.perf_counter() - began
            curve.steps.append(last)
            curve.seconds.append(seconds)
            curve.losses.append(float(cross_entropy(final(model, state), images)))
            bar.update(last - first)
            shown = dict(loss=curve.losses[-1], rate=float(rate), damping=float(damping))
            bar.set_postfix({name: f"{value:.4g}" for name, value in shown.items()})
            if checkpoint is not None:
                save(checkpoint, model, state, curve)
    return curve


# %% [markdown]
# ## What came out


# %%
def first(run: Curve, target: float) -> tuple[float, float]:
    """What a run is compared by: the seconds until the target, and then the loss."""
    reached, loss = run.reached(target), run.losses[-1]
    return reached[1] if reached else np.inf, loss if np.isfinite(loss) else np.inf


def median(runs: list[Curve], target: float) -> Curve:
    return sorted(runs, key=lambda run: first(run, target))[len(runs) // 2]


def table(
    trainers: list[Trainer], curves: list[list[Curve]], seeds: range, target: float
) -> str:
    lines = [
        f"{'method':<18} {'batch':>5} {'seed':>4} {'loss':>8} {'steps':>6} "
        f"{'seconds':>8} {'s/step':>7} {'compile s':>9}   to {target:g}"
    ]
    for trainer, runs in zip(trainers, curves):
        for seed, run in zip(seeds, runs):
            steps, seconds, reached = run.steps[-1], run.seconds[-1], run.reached(target)
            text = f"{reached[0]} steps, {reached[1]:.1f} s" if reached else "not reached"
            lines.append(
                f"{trainer.name:<18} {trainer.batch:>5} {seed:>4} {run.losses[-1]:>8.2f} "
                f"{steps:>6} {seconds:>8.1f} {seconds / max(steps, 1):>7.3f} "
                f"{run.compile_seconds:>9.1f}   {text}"
            )
    return "\n".join(lines)


def verdict(names: list[str], curves: list[list[Curve]], target: float) -> str:
    medians = {name: median(runs, target) for name, runs in zip(names, curves)}
    best = min(medians, key=lambda name: first(medians[name], target))
    reached, loss = medians[best].reached(target), medians[best].losses[-1]
    winners = [min(runs, key=lambda run: first(run, target)) for runs in zip(*curves)]
    wins = sum(any(w is run for run in curves[names.index(best)]) for w in winners)
    several = f"medians of {len(winners)} seeds, with {wins} of them"
    seeds = "one seed" if len(winners) == 1 else several
    if reached is None:
        return f"No method reached {target:g}; lowest is {best}, {loss:.2f} ({seeds})."
    return (
        f"{best} is the first to reach {target:g}, after {reached[0]} steps and "
        f"{reached[1]:.1f} s ({seeds})."
    )


COLOURS = {
    "K-FAC": "#d1495b",
    "K-FAC, adaptive": "#edae49",
    "K-FAC, fixed": "#5f4b66",
    "Adam": "#30638e",
    "SGD with momentum": "#66a182",
}


def plot(
    runs: dict[str, list[Curve]], colours: list[str], target: float, path: Path
) -> None:
    """The median run of every name is thick."""
    figure = Figure(figsize=(10, 4.6), layout="constrained")
    axes: Any = figure.subplots(1, 2, sharey=True)
    for axis, against in zip(axes, ("steps", "seconds")):
        for (name, curves), colour in zip(runs.items(), colours, strict=True):
            thick, style = median(curves, target), dict(linewidth=2.2, label=name)
            axis.plot(getattr(thick, against), thick.losses, color=colour, **style)
            for curve in curves:
                thin = dict(color=colour, linewidth=0.8, alpha=0.6)
                axis.plot(getattr(curve, against), curve.losses, **thin)
        axis.axhline(target, color="0.6", linewidth=0.8, linestyle=":")
        axis.set_yscale("log")
        axis.set_xlabel("steps" if against == "steps" else "seconds (without compiling)")
        axis.grid(True, which="both", color="0.92")
        axis.spines[["top", "right"]].set_visible(False)
        axis.yaxis.set_major_formatter("{x:g}")
        axis.yaxis.set_minor_formatter("{x:g}")
        axis.set_xlim(left=0)
    if axes[0].get_xlim()[1] > 200:
        axes[0].set_xscale("symlog", linthresh=100)
    axes[0].set_ylabel("cross-entropy, nats per image")
    axes[0].set_title("deep autoencoder", loc="left", fontweight="bold")
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False)
    save_picture(figure, path)


METHODS = {
    "kfac": untuned,
    "adaptive": adaptive,
    "fixed": fixed,
    "adam": adam,
    "sgd": sgd,
}


# %%
def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = make_parser("A deep autoencoder, five optimizers.", "autoencoder")
    add = parser.add_argument
    folder = Path("runs/autoencoder")
    add("--data", type=Path, help="folder of MNIST's files; none: scikit-learn's digits")
    add("--seconds", type=float, default=60, help="of steps, per optimizer")
    add("--steps", type=int, default=100_000, help="per optimizer, at most")
    add("--batch", type=int, help="images in a batch; none: what each optimizer likes")
    add("--target", type=float, default=54.0, help="stop at this loss")
    add("--methods", nargs="+", choices=METHODS, default=[*METHODS], help="which")
    add("--checkpoints", type=Path, default=folder, help="folder of checkpoints")
    add("--resume", action="store_true", help="go on from checkpoints")
    toy = dict(steps=20, batch=64)
    options = parsed(parser, argv, ["steps", "batch", "seeds"], toy)
    return options


def main(argv: list[str] | None = None) -> None:
    options = parse(argv)
    x, target = load(options.data), options.target
    widths = (32, 8) if options.toy else (1000, 500, 250, 30)
    given = {} if options.batch is None else {"batch": options.batch}
    trainers = [METHODS[method](**given) for method in options.methods]
    stop = Stop(target, options.seconds, options.steps)
    seeds = range(options.seed, options.seed + options.seeds)
    curves: list[list[Curve]] = [[] for _ in trainers]
    for seed in seeds:
        model = kfac.convert(network(widths, jax.random.key(seed)))
        for method, trainer, runs in zip(options.methods, trainers, curves):
            kept = options.checkpoints / f"seed-{seed}-{method}"
            run = train(trainer, model, x, stop, seed, 10, kept, options.resume)
            runs.append(run)
    names = [trainer.name for trainer in trainers]
    print(table(trainers, curves, seeds, target))
    print(verdict(names, curves, target))
    plot(dict(zip(names, curves)), [COLOURS[n] for n in names], target, options.out)
    print(f"Picture: {options.out}")


if __name__ == "__main__":
    main()
