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
#     python tests/benchmarks/studies/transformer.py  # a few minutes on two CPU cores
#     python tests/benchmarks/studies/transformer.py --seeds 3
#     python tests/benchmarks/studies/transformer.py --toy  # does everything run?

# %%
import argparse
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from harness import (
    make_parser,
    named,
    parsed,
    plot_grids,
    Result,
    Run,
    save_picture,
    verdict,
)
from jaxtyping import Array, Float, Int, PRNGKeyArray
from tqdm import tqdm

import eqx_kfac as kfac


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
    tagged: Callable[[Transformer], Any]  # The model as this optimizer wants it.
    rates: tuple[float | None, ...]  # `None`: nothing to choose.
    init: Callable[[Any], Any]
    # (model, state, learning rate, text, key) -> (model, state)
    step: Callable[..., tuple[Any, Any]]
    final: Callable[[Any, Any], Any]  # (model, state) -> the model to look at


def kfac_trainer(name: str, sharing: kfac.Expand | kfac.Reduce) -> Trainer:
    tagged = lambda model: kfac.convert(model, kfac.Kronecker(sharing))
    optimizer = kfac.KFAC()

    def step(model, state, rate, text, key):
        model, state, _ = optimizer.step(loss_fn, model, state, text, key=key)
        return model, state

    return Trainer(name, tagged, (None,), optimizer.init, step, kfac.averaged)


def adamw(rates: tuple[float, ...]) -> Trainer:
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

    same, final = lambda model: model, lambda model, state: model
    return Trainer("AdamW", same, rates, init, step, final)


# %% [markdown]
# ## Training
#
# Many steps are one compiled function: a `lax.scan` over the step, from one look at the
# loss on a few hundred lines to the next. The clock counts these steps only: neither
# compiling them, nor looking.


# %%
class Corpus(NamedTuple):
    seed: int
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
        seed,
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


def train(
    trainer: Trainer, models: list[Transformer], corpora: list[Corpus], bar: tqdm
) -> list[Result]:
    """The results of all learning rates, the best one first. Model and corpus: for each
    seed."""
    looks, each = corpora[0].batches.shape[:2]
    decay = optax.cosine_decay_schedule(1.0, looks * each)(np.arange(looks * each))
    decay = np.asarray(decay).reshape(looks, each)
    models, final = [trainer.tagged(m) for m in models], eqx.filter_jit(trainer.final)

    def look(model, corpus):
        return float(mean_loss(model, corpus.seen)) - corpus.entropy

    began, model = time.perf_counter(), models[0]
    inputs = decay[0], corpora[0].batches[0], jax.random.split(jax.random.key(1), each)
    jax.block_until_ready(many_steps(trainer.step, model, trainer.init(model), *inputs))
    results, compiling = [], time.perf_counter() - began
    for rate in trainer.rates:
        result = Result(trainer.name, rate, [], compiling)
        bar.set_description(named(result))
        for model, corpus in zip(models, corpora):
            keys = jax.random.split(jax.random.key(1 + corpus.seed), (looks, each))
            state, seconds = trainer.init(model), 0.0
            run = Run(corpus.seed, model, [0], [look(model, corpus)], [0.0])
            for i in range(looks):
                inputs = np.float32(rate or 0) * decay[i], corpus.batches[i], keys[i]
                began = time.perf_counter()
                model, state = many_steps(trainer.step, model, state, *inputs)
                jax.block_until_ready(model)
                seconds += time.perf_counter() - began
                run.steps.append((i + 1) * each)
                run.losses.append(look(final(model, state), corpus))
                run.seconds.append(seconds)
                bar.update(each)
                bar.set_postfix(loss=f"{run.losses[-1]:.3g}")
            result.runs.append(run._replace(model=final(model, state)))
        results.append(result)
    return sorted(results, key=lambda result: result.median.final_loss)


# %% [markdown]
# ## What came out


# %%
def table(results: list[Result], corpora: list[Corpus]) -> str:
    rows = [
        f"{'method':<14} {'rate':>6} {'seed':>4} {'loss - entropy':>14} {'test':>8} "
        f"{'right answers':>13} {'steps':>6} {'seconds':>8} {'ms/step':>8} "
        f"{'compile s':>9}"
    ]
    for result in results:
        rate = "-" if result.rate is None else f"{result.rate:g}"
        for run, corpus in zip(result.runs, corpora):
            test = float(mean_loss(run.model, corpus.test)) - corpus.entropy
            right = float(right_answers(run.model, corpus.test))
            steps, seconds = run.steps[-1], run.seconds[-1]
            rows.append(
                f"{result.name:<14} {rate:>6} {run.seed:>4} {run.losses[-1]:>14.4f} "
                f"{test:>8.4f} {right:>13.4f} {steps:>6} {seconds:>8.2f} "
                f"{1000 * seconds / steps:>8.2f} {result.compile_seconds:>9.1f}"
            )
    return "\n".join(rows)


COLOURS = {"K-FAC, expand": "#d1495b", "K-FAC, reduce": "#5f4b66", "AdamW": "#30638e"}


# %%
def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = make_parser("K-FAC and AdamW on a small language model.", "transformer")
    add = parser.add_argument
    add("--steps", type=int, default=300, help="steps of every run")
    add("--batch", type=int, default=64, help="lines in a batch")
    toy = dict(steps=20, batch=16)
    options = parsed(parser, argv, ["steps", "batch", "seeds"], toy)
    return options


def main(argv: list[str] | None = None) -> None:
    options = parse(argv)
    width, depth, per_line = (8, 1, 1) if options.toy else (32, 2, 3)
    seeds = range(options.seed, options.seed + options.seeds)
    keys = [jax.random.key(seed) for seed in seeds]
    models = [Transformer(per_line * LENGTH, width, depth, key) for key in keys]
    corpora = [write(options.steps, options.batch, per_line, seed) for seed in seeds]
    trainers = [
        kfac_trainer("K-FAC, expand", kfac.Expand()),
        kfac_trainer("K-FAC, reduce", kfac.Reduce()),
        adamw((3e-3, 1e-2) if options.toy else (3e-3, 1e-2, 3e-2)),
    ]
    looks, each = corpora[0].batches.shape[:2]
    number = sum(len(trainer.rates) for trainer in trainers) * options.seeds
    with tqdm(total=number * looks * each, unit=" steps", disable=None) as bar:
        grids = [train(trainer, models, corpora, bar) for trainer in trainers]
    best = [results[0] for results in grids]
    print(table(best, corpora))
    print(verdict(best, "training loss above the entropy", ".4f"))
    loss = "training loss above\nthe text's entropy, nats"
    figure = plot_grids(grids, COLOURS, "transformer", loss)
    for axis in figure.axes:
        axis.yaxis.set_major_formatter("{x:g}")
        axis.yaxis.set_minor_formatter("{x:g}")
    save_picture(figure, options.out)
    print(f"Picture: {options.out}")


if __name__ == "__main__":
    main()
