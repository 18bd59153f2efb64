# %% [markdown]
# # A small language model
#
# A causal transformer of Equinox's layers learns to calculate, character by character:
# `12+34=046;`. `kfac.convert` tags all of them, and positions too, by an `example`.
#
#     python examples/transformer.py        # two minutes on two CPU cores
#     python examples/transformer.py --toy  # does everything run?

# %%
from argparse import ArgumentDefaultsHelpFormatter, ArgumentParser
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure
from tqdm import tqdm

import eqx_kfac as kfac


CHARACTERS = "0123456789+-=;"
optimizer = kfac.KFAC()


def loss_fn(model, text):  # The mean over characters.
    return kfac.SoftmaxCrossEntropy(jax.vmap(model)(text[:, :-1]), text[:, 1:])


@eqx.filter_jit
def train_step(model, state, text, key):
    return optimizer.step(loss_fn, model, state, text, key=key)


# %%
class Transformer(eqx.Module):
    embedding: eqx.nn.Embedding
    positions: jax.Array
    norms: list[eqx.nn.LayerNorm]
    attention: list[eqx.nn.MultiheadAttention]
    mlps: list[eqx.nn.MLP]
    output: eqx.nn.Linear

    def __init__(self, width, key):
        keys = iter(jax.random.split(key, 7))
        attention = lambda key: eqx.nn.MultiheadAttention(4, width, key=key)
        mlp = lambda key: eqx.nn.MLP(width, width, 4 * width, 1, jax.nn.gelu, key=key)
        self.embedding = eqx.nn.Embedding(len(CHARACTERS), width, key=next(keys))
        self.positions = jax.random.normal(next(keys), (9, width))
        self.norms = [eqx.nn.LayerNorm(width) for _ in range(5)]
        self.attention = [attention(next(keys)) for _ in range(2)]
        self.mlps = [mlp(next(keys)) for _ in range(2)]
        self.output = eqx.nn.Linear(width, len(CHARACTERS), key=next(keys))

    def __call__(self, tokens):
        causal = jnp.tril(jnp.ones((len(tokens), len(tokens)), bool))
        norms = iter(self.norms)
        x = jax.vmap(self.embedding)(tokens) + self.positions
        for attend, mlp in zip(self.attention, self.mlps):
            h = jax.vmap(next(norms))(x)
            x = x + attend(h, h, h, mask=causal)
            x = x + jax.vmap(mlp)(jax.vmap(next(norms))(x))
        return jax.vmap(self.output)(jax.vmap(next(norms))(x))


# %%
def expressions():
    """All 20,000, as the numbers of their characters."""
    texts = [f"{a:02}+{b:02}={a + b:03};" for a in range(100) for b in range(100)]
    texts += [f"{a:02}-{b:02}={a - b:03};" for a in range(100) for b in range(100)]
    return np.array([[CHARACTERS.index(c) for c in text] for text in texts], np.int32)


@eqx.filter_jit
def answers(model, text):
    """The model's answers in the places of the results, given all that is before."""
    return jnp.argmax(jax.vmap(model)(text[:, :-1]), axis=-1)[:, 5:8]


def train(steps, seed):
    rng = np.random.default_rng(seed)
    known, unseen = np.split(rng.permutation(expressions()), [18_000])
    model = Transformer(32, jax.random.key(seed))
    model = kfac.convert(model, example=known[0, :-1])
    state, looks = optimizer.init(model), []
    for i in tqdm(range(1, steps + 1), unit=" steps", disable=None):
        text = known[rng.integers(len(known), size=256)]
        model, state, _ = train_step(model, state, text, jax.random.key(i))
        if i % 20 == 0 or i == steps:
            right = answers(kfac.averaged(model, state), unseen) == unseen[:, 6:9]
            looks.append((i, np.mean(np.all(right, axis=1))))
    return kfac.averaged(model, state), unseen, looks


def draw(looks, path):
    figure = Figure(figsize=(6, 3.2), layout="constrained")
    figure.subplots().plot(*np.transpose(looks), color="#d1495b")
    figure.suptitle("share of unseen results that are right, after so many steps")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)


# %%
if __name__ == "__main__":
    parser = ArgumentParser(formatter_class=ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("--steps", type=int, default=600, help="of training")
    add("--seed", type=int, default=0, help="of initialisation and batches")
    add("--out", type=Path, default=Path("runs/transformer.png"), help="picture")
    add("--toy", action="store_true", help="five steps, to see whether everything runs")
    options = parser.parse_args()
    model, unseen, looks = train(5 if options.toy else options.steps, options.seed)
    read = lambda tokens: "".join(CHARACTERS[c] for c in tokens)
    for text, answer in zip(unseen[:5], answers(model, unseen[:5])):
        print(read(text[:6]) + read(answer))
    print(f"{looks[-1][1]:.3f} of the results of unseen expressions are right.")
    draw(looks, options.out)
    print(f"Picture: {options.out}")
