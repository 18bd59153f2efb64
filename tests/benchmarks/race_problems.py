"""The problems of `races.py`: ordinary networks of many kinds, and data that is there:
MNIST (if `data` is given), scikit-learn's digits, the text of Python's own library, and
generated data."""

import gzip
import re
import sysconfig
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

import eqx_kfac as kfac


class Race(NamedTuple):
    name: str
    batch: int
    model: Any  # Tagged.
    memory: Any  # An `eqx.nn.State`, or `None`.
    loss_fn: Callable[..., Any]  # (model, memory, *batch) -> (loss, memory)
    train: tuple[np.ndarray, ...]
    test: tuple[np.ndarray, ...]
    looked_at: int = 1000  # Of how many examples a loss is printed.


def pictures(data: Path | None) -> tuple[np.ndarray, np.ndarray]:
    """`[n, 28, 28]` in [0, 1] and their classes: MNIST, or smaller digits made larger."""
    if data is None:
        from sklearn.datasets import load_digits

        x, y = load_digits(return_X_y=True)
        x = np.kron(x.reshape(-1, 8, 8) / 16, np.ones((3, 3)))
        return np.pad(x, ((0, 0), (2, 2), (2, 2))).astype(np.float32), y.astype(np.int32)
    with gzip.open(data / "t10k-images-idx3-ubyte.gz") as file:
        x = np.frombuffer(file.read(), np.uint8, offset=16).reshape(-1, 28, 28)
    with gzip.open(data / "t10k-labels-idx1-ubyte.gz") as file:
        y = np.frombuffer(file.read(), np.uint8, offset=8)
    return (x / 255).astype(np.float32), y.astype(np.int32)


def _split(*arrays: np.ndarray, test: float = 0.15) -> tuple[tuple, tuple]:
    order = np.random.default_rng(0).permutation(len(arrays[0]))
    number = int(len(order) * test)
    pick = lambda index: tuple(a[index] for a in arrays)
    return pick(order[number:]), pick(order[:number])


def draw(race: Race, number: int, rng: np.random.Generator) -> tuple[jax.Array, ...]:
    """So many examples to train with, or all, if there are fewer."""
    size = len(race.train[0])
    drawn = rng.choice(size, min(number, size), replace=False)
    return tuple(jnp.asarray(a[drawn]) for a in race.train)


def plainly(network_loss: Callable[..., Any]) -> Callable[..., Any]:
    """A loss function of a network that remembers nothing."""
    return lambda model, memory, *batch: (network_loss(model, *batch), memory)


@plainly
def classify(model, x, y):
    return kfac.SoftmaxCrossEntropy(jax.vmap(model)(x), y)


@plainly
def reconstruct(model, x):
    return kfac.SigmoidCrossEntropy(jax.vmap(model)(x), x)


@plainly
def regress(model, *batch):
    *inputs, y = batch
    return kfac.SquaredError(jax.vmap(model)(*inputs), y)


def _chain(sizes: list[int], activation: Callable, key: Any) -> eqx.nn.Sequential:
    """Dense layers, an activation between any two."""
    layers = []
    for i, key in enumerate(jax.random.split(key, len(sizes) - 1)):
        layers += [eqx.nn.Linear(sizes[i], sizes[i + 1], key=key)]
        layers += [eqx.nn.Lambda(activation)] * (i < len(sizes) - 2)
    return eqx.nn.Sequential(layers)


def _flat(data: Path | None) -> tuple[tuple, tuple]:
    x, y = pictures(data)
    return _split(x.reshape(len(x), -1), y)


#
# Dense
#


def dense(key, data):
    model = _chain([784, 256, 256, 10], jax.nn.relu, key)
    return Race("dense", 128, model, None, classify, *_flat(data))


def small_batch(key, data):
    model = _chain([784, 128, 128, 10], jax.nn.gelu, key)
    return Race("small batch", 16, model, None, classify, *_flat(data))


def large_batch(key, data):
    model = _chain([784, 256, 256, 256, 10], jax.nn.silu, key)
    return Race("large batch", 1024, model, None, classify, *_flat(data))


def autoencoder(key, data):
    model = _chain([784, 400, 150, 30, 150, 400, 784], jnp.tanh, key)
    (x, _), (test, _) = _flat(data)
    return Race("autoencoder", 256, model, None, reconstruct, (x,), (test,))


def curves(key, data):
    """A deep, narrow autoencoder of smooth curves."""
    rng = np.random.default_rng(1)
    points = rng.uniform(4, 24, (6000, 3, 2))
    t = np.linspace(0, 1, 60)[:, None]
    weights = np.concatenate([(1 - t) ** 2, 2 * t * (1 - t), t**2], axis=1)
    path = np.einsum("tk,nkd->ntd", weights, points)
    grid = np.arange(28)
    x = np.exp(-((path[:, :, 0, None] - grid) ** 2))
    y = np.exp(-((path[:, :, 1, None] - grid) ** 2))
    image = np.clip(np.einsum("nti,ntj->nij", x, y), 0, 1)
    train, test = _split(image.reshape(-1, 784).astype(np.float32))
    sizes = [784, 200, 100, 50, 25, 6, 25, 50, 100, 200, 784]
    model = _chain(sizes, jnp.tanh, key)
    return Race("curves", 256, model, None, reconstruct, train, test)


def regression(key, data):
    """Inputs of very different sizes, outputs of a random network."""
    rng = np.random.default_rng(2)
    x = (
        rng.normal(size=(8000, 20))
        @ rng.normal(size=(20, 20))
        * np.logspace(-1.5, 0.5, 20)
    )
    hidden = np.tanh(x @ rng.normal(size=(20, 40)) / 2)
    y = hidden @ rng.normal(size=(40, 3)) / 4 + np.sin(x[:, :3])
    train, test = _split(x.astype(np.float32), y.astype(np.float32))
    model = _chain([20, 64, 64, 64, 3], jnp.tanh, key)
    return Race("regression", 256, model, None, regress, train, test)


def many_classes(key, data):
    """A thousand classes, a dozen examples of each."""
    rng = np.random.default_rng(3)
    y = rng.integers(0, 1000, 12000)
    x = rng.normal(size=(1000, 32))[y] + 0.6 * rng.normal(size=(12000, 32))
    x = np.tanh(x @ rng.normal(size=(32, 64)) / 4)
    train, test = _split(x.astype(np.float32), y.astype(np.int32))
    model = _chain([64, 192, 192, 1000], jax.nn.relu, key)
    return Race("many classes", 256, model, None, classify, train, test)


class Denoiser(eqx.Module):
    """What is left of a picture's noise, from the picture and the noise's size."""

    start: eqx.nn.Linear
    blocks: list
    end: eqx.nn.Linear

    def __init__(self, width, key):
        keys = jax.random.split(key, 5)
        self.start = eqx.nn.Linear(65, width, key=keys[0])
        self.blocks = [
            (
                eqx.nn.LayerNorm(width),
                eqx.nn.MLP(width, width, width, 1, jax.nn.silu, key=k),
            )
            for k in keys[1:4]
        ]
        self.end = eqx.nn.Linear(width, 64, key=keys[4])

    def __call__(self, x, level):
        h = self.start(jnp.append(x, jnp.log(level)))
        for norm, mlp in self.blocks:
            h = h + mlp(norm(h))
        return self.end(h)


@plainly
def denoise(model, x, noise, level):
    noisy = (x + level[:, None] * noise) / jnp.sqrt(1 + level[:, None] ** 2)
    return kfac.SquaredError(jax.vmap(model)(noisy, level), noise)


def denoiser(key, data):
    from sklearn.datasets import load_digits

    x = np.tile(load_digits().data.astype(np.float32) / 8 - 1, (6, 1))
    rng = np.random.default_rng(4)
    noise = rng.normal(size=x.shape).astype(np.float32)
    level = np.exp(rng.uniform(-2, 1.5, len(x))).astype(np.float32)
    train, test = _split(x, noise, level)
    return Race("denoiser", 256, Denoiser(128, key), None, denoise, train, test)


#
# Convolutional
#


def _convnet(norms: list[Any], key: Any) -> eqx.nn.Sequential:
    keys = jax.random.split(key, 4)
    relu, layers = eqx.nn.Lambda(jax.nn.relu), []
    sizes, strides = [1, 16, 32, 32], [2, 2, 1]
    for i, norm in enumerate(norms):
        conv = eqx.nn.Conv2d(*sizes[i : i + 2], 3, strides[i], padding=1, key=keys[i])
        layers += [conv, norm, relu]
    pool = [eqx.nn.AvgPool2d(2, 2), eqx.nn.Lambda(jnp.ravel)]
    return eqx.nn.Sequential([*layers, *pool, eqx.nn.Linear(288, 10, key=keys[3])])


def convnet(key, data):
    x, y = pictures(data)
    model = _convnet([eqx.nn.GroupNorm(4, n) for n in (16, 32, 32)], key)
    sets = _split(x[:, None], y)
    return Race("ConvNet, GroupNorm", 128, model, None, classify, *sets)


def normalised(model, memory, x, y):
    forward = jax.vmap(model, in_axes=(0, None), out_axes=(0, None), axis_name="batch")
    logits, memory = forward(x, memory)
    return kfac.SoftmaxCrossEntropy(logits, y), memory


def batchnorm(key, data):
    x, y = pictures(data)
    norms = lambda: [eqx.nn.BatchNorm(n, "batch", mode="batch") for n in (16, 32, 32)]
    model, memory = eqx.nn.make_with_state(lambda key: _convnet(norms(), key))(key)
    sets = _split(x[:, None], y)
    return Race("ConvNet, BatchNorm", 128, model, memory, normalised, *sets)


class Mixer(eqx.Module):
    embed: eqx.nn.Linear
    blocks: list
    norm: eqx.nn.LayerNorm
    out: eqx.nn.Linear

    def __init__(self, tokens, patch, width, key):
        keys = jax.random.split(key, 6)
        self.embed = eqx.nn.Linear(patch, width, key=keys[0])
        mlp = lambda n, k: eqx.nn.MLP(n, n, 2 * n, 1, jax.nn.gelu, key=k)
        norm = lambda: eqx.nn.LayerNorm(width)
        self.blocks = [
            (norm(), mlp(tokens, keys[1 + 2 * i]), norm(), mlp(width, keys[2 + 2 * i]))
            for i in range(2)
        ]
        self.norm = norm()
        self.out = eqx.nn.Linear(width, 10, key=keys[5])

    def __call__(self, patches):
        h = jax.vmap(self.embed)(patches)
        for norm1, over_tokens, norm2, over_channels in self.blocks:
            h = h + jax.vmap(over_tokens)(jax.vmap(norm1)(h).T).T
            h = h + jax.vmap(over_channels)(jax.vmap(norm2)(h))
        return self.out(jnp.mean(jax.vmap(self.norm)(h), axis=0))


def mixer(key, data):
    x, y = pictures(data)
    x = x.reshape(-1, 7, 4, 7, 4).swapaxes(2, 3).reshape(-1, 49, 16)
    model = Mixer(49, 16, 48, key)
    return Race("mixer", 128, model, None, classify, *_split(x, y))


#
# Sequences
#


class Recurrent(eqx.Module):
    cell: eqx.nn.GRUCell
    out: eqx.nn.Linear

    def __call__(self, rows):
        step = lambda h, row: (self.cell(row, h), None)
        h, _ = jax.lax.scan(step, jnp.zeros(self.cell.hidden_size), rows)
        return self.out(h)


def gru(key, data):
    keys = jax.random.split(key)
    out = eqx.nn.Linear(64, 10, key=keys[1])
    model = Recurrent(eqx.nn.GRUCell(28, 64, key=keys[0]), out)
    return Race("GRU", 128, model, None, classify, *_split(*pictures(data)))


class Block(eqx.Module):
    norms: tuple[eqx.nn.LayerNorm, eqx.nn.LayerNorm]
    attention: eqx.nn.MultiheadAttention
    mlp: eqx.nn.MLP

    def __init__(self, width, heads, key):
        keys = jax.random.split(key)
        self.norms = eqx.nn.LayerNorm(width), eqx.nn.LayerNorm(width)
        self.attention = eqx.nn.MultiheadAttention(heads, width, key=keys[0])
        self.mlp = eqx.nn.MLP(width, width, 4 * width, 1, jax.nn.gelu, key=keys[1])

    def __call__(self, h):
        mask = jnp.tril(jnp.ones((len(h), len(h)), bool))
        x = jax.vmap(self.norms[0])(h)
        h = h + self.attention(x, x, x, mask)
        return h + jax.vmap(self.mlp)(jax.vmap(self.norms[1])(h))


class Transformer(eqx.Module):
    tokens: eqx.nn.Embedding
    places: eqx.nn.Embedding
    blocks: list[Block]
    norm: eqx.nn.LayerNorm
    out: eqx.nn.Linear

    def __init__(self, symbols, length, width, key, depth=2, heads=4):
        keys = jax.random.split(key, 3 + depth)
        self.tokens = eqx.nn.Embedding(symbols, width, key=keys[0])
        self.places = eqx.nn.Embedding(length, width, key=keys[1])
        self.blocks = [Block(width, heads, k) for k in keys[2:-1]]
        self.norm = eqx.nn.LayerNorm(width)
        self.out = eqx.nn.Linear(width, symbols, key=keys[-1])

    def __call__(self, tokens):
        h = jax.vmap(self.tokens)(tokens)
        h = h + jax.vmap(self.places)(jnp.arange(len(tokens)))
        for block in self.blocks:
            h = block(h)
        return jax.vmap(self.out)(jax.vmap(self.norm)(h))


@plainly
def predict(model, tokens):
    logits = jax.vmap(model)(tokens[:, :-1])
    return kfac.SoftmaxCrossEntropy(logits, tokens[:, 1:])


def sources(pattern: str = "[a-h]*.py") -> str:
    """The text of Python's own library, without what is installed beside it."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    others = {"site-packages", "dist-packages"}
    paths = [p for p in sorted(folder.glob(pattern)) if not others & {*p.parts}]
    return "".join(path.read_text(errors="ignore") for path in paths)


def _pieces(symbols: np.ndarray, length: int) -> np.ndarray:
    cut = symbols[: len(symbols) // length * length]
    return cut.astype(np.int32).reshape(-1, length)


def characters(length: int, text: str) -> np.ndarray:
    """Pieces of a text, `[n, length]`, as numbers of 80 characters."""
    raw = np.frombuffer(text.encode("ascii", "ignore"), np.uint8)
    common = np.sort(np.argsort(-np.bincount(raw, minlength=128))[:80])
    return _pieces(np.clip(np.searchsorted(common, raw), 0, 79), length)


def words(length: int, vocabulary: int) -> np.ndarray:
    """Pieces of a text, `[n, length]`, as numbers of its most frequent words and signs,
    and one more number for all others."""
    text = re.findall(r"\w+|[^\w\s]", sources())
    frequent = Counter(text).most_common(vocabulary - 1)
    numbers = {word: i for i, (word, _) in enumerate(frequent)}
    other = vocabulary - 1
    return _pieces(np.array([numbers.get(word, other) for word in text]), length)


def transformer(key, data):
    train, test = _split(characters(65, sources()), test=0.05)
    model = Transformer(80, 64, 64, key)
    return Race("transformer", 32, model, None, predict, train, test)


def language_model(key, data):
    train, test = _split(words(33, 4096), test=0.05)
    model = Transformer(4096, 32, 64, key)
    return Race("words", 16, model, None, predict, train, test, looked_at=100)


def large_transformer(key, data):
    """For an accelerator: 25 million parameters, 16,384 characters a batch."""
    train, test = _split(characters(257, sources("**/*.py")), test=0.01)
    model = Transformer(80, 256, 512, key, depth=8, heads=8)
    return Race("large transformer", 64, model, None, predict, train, test, looked_at=100)


LARGE = [large_transformer]
ALL = [
    dense,
    small_batch,
    large_batch,
    autoencoder,
    curves,
    regression,
    many_classes,
    denoiser,
    convnet,
    batchnorm,
    mixer,
    gru,
    transformer,
    language_model,
]


def race(build: Callable, seed: int, data: Path | None) -> Race:
    """A problem, with its model converted."""
    built = build(jax.random.key(seed), data)
    return built._replace(model=kfac.convert(built.model))
