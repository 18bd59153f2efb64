# %% [markdown]
# # A small language model: K-FAC and AdamW
#
# A causal transformer reads sums and differences, character by character:
#
#     ;37+48=085;12-90=-78;05+05=010;
#
# The two numbers are random, what follows them is not: a model that can calculate has a
# loss of exactly the logarithm of the number of expressions there are, over ten
# characters. That is subtracted below, so that what is left can be learned.
#
# Embedding, positions, normalisations, attention and linear layers all have curvature of
# their own, with weights shared over the characters of a line. Three optimizers: K-FAC
# with `Expand` (every character is a row: right for a loss at every character), K-FAC
# with `Reduce` (as if the characters were pooled: cheaper) and AdamW. They start from the
# same initialisation and see the same batches. K-FAC has nothing to choose; AdamW chooses
# its learning rate, which decays to zero by a cosine, from a grid.
#
#     python examples/transformer.py        # a few minutes on two CPU cores
#     python examples/transformer.py --toy  # seconds: does everything run?

# %%
import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import optax
from jaxtyping import Array, Float, Int, PRNGKeyArray
from tqdm import tqdm

import eqx_kfac as kfac


matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402


# %% [markdown]
# ## Text
#
# All 20,000 expressions, a tenth of which are kept for testing. A line is a few random
# ones.


# %%
CHARACTERS = "0123456789+-=;"
LENGTH = 10  # Characters of an expression.
ANSWER = slice(6, 9)  # Those of its result.


def expressions() -> Int[np.ndarray, "expressions 10"]:
    """Each as the numbers of its characters."""
    texts = []
    for a in range(100):
        for b in range(100):
            texts += [f"{a:02}+{b:02}={a + b:03};", f"{a:02}-{b:02}={a - b:03};"]
    return np.array([[CHARACTERS.index(c) for c in text] for text in texts], np.int32)


def lines(
    known: Int[np.ndarray, "expressions 10"],
    shape: tuple[int, ...],
    expressions_per_line: int,
    rng: np.random.Generator,
) -> Int[np.ndarray, "*shape characters"]:
    """Random lines. They begin with the end of the expression before."""
    chosen = known[rng.integers(len(known), size=(*shape, expressions_per_line))]
    text = chosen.reshape(*shape, -1)
    start = np.full((*shape, 1), CHARACTERS.index(";"), np.int32)
    return np.concatenate([start, text], axis=-1)


# %% [markdown]
# ## The transformer
#
# Written with the layers of Equinox, and tagged by `kfac.convert` afterwards. Only the
# positions belong to no layer: they are a `kfac.Parameter`, whose value is asked for with
# the example that it is for.


# %%
class Block(eqx.Module):
    attention_norm: eqx.nn.LayerNorm
    attention: eqx.nn.MultiheadAttention
    mlp_norm: eqx.nn.LayerNorm
    mlp: eqx.nn.MLP

    def __init__(self, width: int, heads: int, key: PRNGKeyArray):
        keys = jax.random.split(key)
        self.attention_norm = eqx.nn.LayerNorm(width)
        self.attention = eqx.nn.MultiheadAttention(heads, width, key=keys[0])
        self.mlp_norm = eqx.nn.LayerNorm(width)
        self.mlp = eqx.nn.MLP(width, width, 4 * width, 1, jax.nn.gelu, key=keys[1])

    def __call__(
        self, x: Float[Array, "length width"], causal: Array
    ) -> Float[Array, "length width"]:
        h = jax.vmap(self.attention_norm)(x)
        x = x + self.attention(h, h, h, mask=causal)
        return x + jax.vmap(self.mlp)(jax.vmap(self.mlp_norm)(x))


class Transformer(eqx.Module):
    embedding: eqx.nn.Embedding
    positions: kfac.Parameter
    blocks: list[Block]
    norm: eqx.nn.LayerNorm
    output: eqx.nn.Linear

    def __init__(self, length: int, width: int, depth: int, key: PRNGKeyArray):
        keys = jax.random.split(key, depth + 3)
        size = len(CHARACTERS)
        self.embedding = eqx.nn.Embedding(size, width, key=keys[0])
        self.positions = kfac.Parameter(jax.random.normal(keys[1], (length, width)))
        self.blocks = [Block(width, 4, key) for key in keys[3:]]
        self.norm = eqx.nn.LayerNorm(width)
        self.output = eqx.nn.Linear(width, size, key=keys[2])

    def __call__(self, tokens: Int[Array, " length"]) -> Float[Array, "length size"]:
        causal = jnp.tril(jnp.ones((len(tokens), len(tokens)), bool))
        x = jax.vmap(self.embedding)(tokens)
        x = x + self.positions(tokens)
        for block in self.blocks:
            x = block(x, causal)
        return jax.vmap(self.output)(jax.vmap(self.norm)(x))


def loss_fn(model, text):
    logits = jax.vmap(model)(text[:, :-1])
    return kfac.SoftmaxCrossEntropy(logits, text[:, 1:])  # The mean over characters.


@eqx.filter_jit
def mean_loss(model, text):
    return loss_fn(model, text).value


@eqx.filter_jit
def right_answers(model, text):
    """The fraction of expressions whose result is right in all characters, given all
    that is before each."""
    guessed = jnp.argmax(jax.vmap(model)(text[:, :-1]), axis=-1)
    right = (guessed == text[:, 1:]).reshape(len(text), -1, LENGTH)
    return jnp.mean(jnp.all(right[:, :, ANSWER], axis=-1))


# %% [markdown]
# ## The optimizers
#
# K-FAC is `KFAC()`, with nothing to choose, and its averaged model is the one to look at.
# AdamW's learning rate is an argument of every step: it multiplies the update.


# %%
class Trainer(NamedTuple):
    name: str
    model: Any
    rates: tuple[float | None, ...]  # `None`: nothing to choose.
    init: Callable[[Any], Any]
    # (model, state, learning rate, text, key) -> (model, state)
    step: Callable[..., tuple[Any, Any]]
    final: Callable[[Any, Any], Any]  # (model, state) -> the model to look at


def kfac_trainer(
    name: str, sharing: kfac.Expand | kfac.Reduce, model: Transformer
) -> Trainer:
    model = kfac.convert(model, kfac.Kronecker(sharing))
    optimizer = kfac.KFAC()

    def step(model, state, rate, text, key):
        model, state, _ = optimizer.step(loss_fn, model, state, text, key=key)
        return model, state

    return Trainer(name, model, (None,), optimizer.init, step, kfac.averaged)


def adamw(model: Transformer, rates: tuple[float, ...]) -> Trainer:
    decay = optax.add_decayed_weights(1e-4)
    direction = optax.chain(optax.scale_by_adam(), decay)

    def init(model):
        return direction.init(eqx.filter(model, eqx.is_inexact_array))

    def step(model, state, rate, text, key):
        del key
        grads = eqx.filter_grad(lambda m: loss_fn(m, text).value)(model)
        params = eqx.filter(model, eqx.is_inexact_array)
        updates, state = direction.update(grads, state, params)
        updates = jax.tree.map(lambda u: -rate * u, updates)
        return eqx.apply_updates(model, updates), state

    return Trainer("AdamW", model, rates, init, step, lambda model, state: model)


# %% [markdown]
# ## Training
#
# Many steps are one compiled function: a `lax.scan` over the step, from one look at the
# loss on a few hundred lines to the next. The clock counts these steps only: neither
# compiling them, nor looking.


# %%
class Run(NamedTuple):
    trainer: str
    rate: float | None
    model: Any
    steps: list[int]
    losses: list[float]  # Above the entropy of the text.
    seconds: list[float]

    @property
    def final_loss(self) -> float:
        return self.losses[-1] if np.isfinite(self.losses[-1]) else np.inf


class Result(NamedTuple):
    """All runs of one optimizer."""

    runs: list[Run]
    compile_seconds: float

    @property
    def best(self) -> Run:
        return min(self.runs, key=lambda run: run.final_loss)


class Corpus(NamedTuple):
    batches: Int[np.ndarray, "looks steps batch characters"]
    seen: Int[np.ndarray, "lines characters"]  # Of the training expressions.
    test: Int[np.ndarray, "lines characters"]
    entropy: float  # Of a character of a line of training expressions.


def write(steps: int, batch: int, expressions_per_line: int, seed: int) -> Corpus:
    rng = np.random.default_rng(seed)
    known = rng.permutation(expressions())
    test, known = known[: len(known) // 10], known[len(known) // 10 :]
    each = max(1, steps // 50)
    return Corpus(
        lines(known, (steps // each, each, batch), expressions_per_line, rng),
        lines(known, (256,), expressions_per_line, rng),
        lines(test, (256,), expressions_per_line, rng),
        float(np.log(len(known))) / LENGTH,
    )


@eqx.filter_jit
def many_steps(step, model, state, rates, batches, keys):
    """A step for every one of `batches`, compiled as one."""
    arrays, static = eqx.partition((model, state), eqx.is_array)

    def body(arrays, now):
        model, state = eqx.combine(arrays, static)
        return eqx.filter(step(model, state, *now), eqx.is_array), None

    arrays, _ = jax.lax.scan(body, arrays, (rates, batches, keys))
    return eqx.combine(arrays, static)


def named(trainer: str, rate: float | None) -> str:
    return trainer if rate is None else f"{trainer}, learning rate {rate:g}"


def train(trainer: Trainer, corpus: Corpus, bar: tqdm) -> Result:
    looks, each = corpus.batches.shape[:2]
    keys = jax.random.split(jax.random.key(1), (looks, each))
    decay = optax.cosine_decay_schedule(1.0, looks * each)(np.arange(looks * each))
    decay = np.asarray(decay).reshape(looks, each)

    def look(model):
        return float(mean_loss(model, corpus.seen)) - corpus.entropy

    final = eqx.filter_jit(trainer.final)
    model, runs, first = trainer.model, [], look(trainer.model)
    began = time.perf_counter()
    inputs = decay[0], corpus.batches[0], keys[0]
    jax.block_until_ready(many_steps(trainer.step, model, trainer.init(model), *inputs))
    compile_seconds = time.perf_counter() - began
    for rate in trainer.rates:
        bar.set_description(named(trainer.name, rate))
        model, state, seconds = trainer.model, trainer.init(trainer.model), 0.0
        run = Run(trainer.name, rate, model, [0], [first], [0.0])
        for i in range(looks):
            inputs = np.float32(rate or 0) * decay[i], corpus.batches[i], keys[i]
            began = time.perf_counter()
            model, state = many_steps(trainer.step, model, state, *inputs)
            jax.block_until_ready(model)
            seconds += time.perf_counter() - began
            run.steps.append((i + 1) * each)
            run.losses.append(look(final(model, state)))
            run.seconds.append(seconds)
            bar.update(each)
            bar.set_postfix(loss=f"{run.losses[-1]:.3g}")
        runs.append(run._replace(model=final(model, state)))
    return Result(runs, compile_seconds)


# %% [markdown]
# ## What came out


# %%
def table(results: list[Result], corpus: Corpus) -> str:
    rows = [
        f"{'method':<14} {'rate':>6} {'loss - entropy':>14} {'test':>8} "
        f"{'right answers':>13} {'steps':>6} {'seconds':>8} {'ms/step':>8} "
        f"{'compile s':>9}"
    ]
    for result in results:
        best = result.best
        test = float(mean_loss(best.model, corpus.test)) - corpus.entropy
        right = float(right_answers(best.model, corpus.test))
        steps, seconds = best.steps[-1], best.seconds[-1]
        rate = "-" if best.rate is None else f"{best.rate:g}"
        rows.append(
            f"{best.trainer:<14} {rate:>6} {best.losses[-1]:>14.4f} {test:>8.4f} "
            f"{right:>13.4f} {steps:>6} {seconds:>8.2f} {1000 * seconds / steps:>8.2f} "
            f"{result.compile_seconds:>9.1f}"
        )
    return "\n".join(rows)


COLOURS = ["#d1495b", "#edae49", "#30638e"]


def plot(results: list[Result], path: Path) -> None:
    figure, axes = plt.subplots(1, 2, figsize=(10, 4), sharey=True)
    for axis, against in zip(axes, ("steps", "seconds")):
        for result, colour in zip(results, COLOURS):
            for run in result.runs:
                best = run is result.best
                label = named(run.trainer, run.rate) if best else None
                width, alpha = (2.2, 1.0) if best else (0.9, 0.3)
                style = dict(color=colour, linewidth=width, alpha=alpha, zorder=2 + best)
                axis.plot(getattr(run, against), run.losses, label=label, **style)
        axis.set_yscale("log")
        axis.set_ylim(top=2 * results[0].best.losses[0])
        longest = max(getattr(result.best, against)[-1] for result in results)
        axis.set_xlim(0, 1.03 * longest)
        axis.set_xlabel("steps" if against == "steps" else "seconds (without compiling)")
        axis.grid(True, color="0.9")
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("training loss above the text's entropy")
    axes[0].plot([], [], color="0.7", linewidth=0.9, label="other learning rates")
    axes[0].legend(frameon=False)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    plt.close(figure)


# %%
class Arguments(argparse.Namespace):
    steps: int
    batch: int
    seed: int
    out: Path
    toy: bool


def parse(argv: list[str] | None = None) -> Arguments:
    parser = argparse.ArgumentParser(
        description="K-FAC and AdamW on a small language model."
    )
    parser.add_argument("--steps", type=int, default=300, help="steps of every run")
    parser.add_argument("--batch", type=int, default=64, help="lines in a batch")
    parser.add_argument("--seed", type=int, default=0, help="initialisation and text")
    parser.add_argument("--out", type=Path, default=Path("runs/transformer.png"))
    parser.add_argument("--toy", action="store_true", help="a tiny network, few steps")
    arguments = parser.parse_args(argv, namespace=Arguments())
    if arguments.steps < 1 or arguments.batch < 1:
        parser.error("--steps and --batch must be at least 1")
    if arguments.toy:
        arguments.steps = min(arguments.steps, 20)
        arguments.batch = min(arguments.batch, 16)
    return arguments


def main(argv: list[str] | None = None) -> None:
    arguments = parse(argv)
    width, depth, per_line = (8, 1, 1) if arguments.toy else (32, 2, 3)
    key = jax.random.key(arguments.seed)
    model = Transformer(per_line * LENGTH, width, depth, key)
    adamw_rates = (3e-3, 1e-2) if arguments.toy else (3e-3, 1e-2, 3e-2)
    corpus = write(arguments.steps, arguments.batch, per_line, arguments.seed)
    trainers = [
        kfac_trainer("K-FAC, expand", kfac.Expand(), model),
        kfac_trainer("K-FAC, reduce", kfac.Reduce(), model),
        adamw(model, adamw_rates),
    ]
    looks, each = corpus.batches.shape[:2]
    num_runs = sum(len(trainer.rates) for trainer in trainers)
    with tqdm(total=num_runs * looks * each, unit=" steps", disable=None) as bar:
        results = [train(trainer, corpus, bar) for trainer in trainers]
    print(table(results, corpus))
    plot(results, arguments.out)
    print(f"Curves: {arguments.out}")


if __name__ == "__main__":
    main()
