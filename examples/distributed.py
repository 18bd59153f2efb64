# %% [markdown]
# # Many devices, several processes
#
# The deep autoencoder once more, with each batch split over all devices. What is
# different from training on one device is four lines: a mesh, where the model is put,
# where a batch is put, and, with several processes, `jax.distributed.initialize`. The
# library shares out the decompositions over the devices of the mesh by itself.
#
# Orbax writes checkpoints in the background, every device what it has. A job that was
# killed goes on from the last one, also on another number of devices.
#
#     python examples/distributed.py              # one process; 8 devices made of a CPU
#     python examples/distributed.py --resume     # go on after an interruption
#     python examples/distributed.py --toy        # seconds: does everything run?
#
# Two processes, on one machine or two, are started with the address of the first:
#
#     python examples/distributed.py --devices 4 --processes 2 --process 0 &
#     python examples/distributed.py --devices 4 --processes 2 --process 1
#
# With `--data`, the images are those of a folder of MNIST files; without, the digits of
# scikit-learn.

# %%
import argparse
import gzip
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float, PyTree
from matplotlib.figure import Figure
from sklearn.datasets import load_digits
from tqdm import tqdm

import eqx_kfac as kfac


# %% [markdown]
# ## Data, network and loss: as on one device


# %%
def load(folder: Path | None) -> Float[np.ndarray, "images pixels"]:
    """Images with pixels in [0, 1]."""
    if folder is None:
        return (load_digits(return_X_y=True)[0] / 16).astype(np.float32)
    found = sorted(folder.rglob("*images-idx3-ubyte*"))
    if not found:
        raise SystemExit(f"No `*images-idx3-ubyte` or `.gz` file in {folder}.")
    raw = found[-1].read_bytes()
    raw = gzip.decompress(raw) if found[-1].suffix == ".gz" else raw
    pixels = np.frombuffer(raw, np.uint8, offset=16)
    return (pixels.reshape(-1, 784) / 255).astype(np.float32)


def network(pixels: int, widths: tuple[int, ...], seed: int) -> eqx.nn.Sequential:
    """An autoencoder of tagged layers."""
    sizes = [pixels, *widths, *widths[-2::-1], pixels]
    keys = jax.random.split(jax.random.key(seed), len(sizes) - 1)
    layers = []
    for d_in, d_out, key in zip(sizes[:-1], sizes[1:], keys, strict=True):
        layers += [kfac.Linear(d_in, d_out, key=key), eqx.nn.Lambda(jnp.tanh)]
    return eqx.nn.Sequential(layers[:-1])


def loss_fn(model: eqx.nn.Sequential, x: Float[Array, "batch pixels"]) -> Any:
    return kfac.SigmoidCrossEntropy(jax.vmap(model)(x), x)


# %% [markdown]
# ## Where things are


# %%
class Devices:
    """All devices of all processes, along the axis `batch` of a mesh."""

    def __init__(self) -> None:
        self.mesh = jax.make_mesh((jax.device_count(),), ("batch",))

    def everywhere(self, tree: PyTree) -> PyTree:
        """A copy of all arrays on every device."""
        return eqx.filter_shard(tree, NamedSharding(self.mesh, PartitionSpec()))

    def split(self, batch: Float[np.ndarray, "batch pixels"]) -> Array:
        """A batch, some of the examples on each device. Every process has the whole in
        NumPy, and puts on its devices what belongs there."""
        sharding = NamedSharding(self.mesh, PartitionSpec("batch"))
        return jax.make_array_from_callback(batch.shape, sharding, lambda i: batch[i])


# %% [markdown]
# ## Checkpoints


# %%
class Checkpoints:
    """The last checkpoints of a run: every array under its path in model and state."""

    def __init__(self, folder: Path, every: int) -> None:
        options = ocp.CheckpointManagerOptions(max_to_keep=2, save_interval_steps=every)
        self.manager = ocp.CheckpointManager(folder.absolute(), options=options)

    def check_empty(self) -> None:
        """Orbax would keep what is there, and nothing of a run that begins anew."""
        if self.manager.latest_step() is not None:
            raise SystemExit(
                f"There are checkpoints in {self.manager.directory}. Go on from them by "
                "`--resume`, remove them, or choose another folder by `--checkpoints`."
            )

    def save(self, step: int, tree: PyTree) -> None:
        """Returns at once; devices go on while files are written."""
        self.manager.save(step, args=ocp.args.StandardSave(_by_path(tree)))

    def restore(self, tree: PyTree) -> tuple[int, PyTree]:
        """The number of the last step, and its arrays, on the devices where those of
        `tree` are."""
        step = self.manager.latest_step()
        if step is None:
            raise SystemExit("There is no checkpoint. Leave out `--resume`.")
        like = jtu.tree_map(_abstract, _by_path(tree))
        found = self.manager.restore(step, args=ocp.args.StandardRestore(like))
        arrays, static = eqx.partition(tree, eqx.is_array)
        arrays = jtu.tree_unflatten(jtu.tree_structure(arrays), list(found.values()))
        return step, eqx.combine(arrays, static)

    def close(self) -> None:
        self.manager.wait_until_finished()
        self.manager.close()


def _by_path(tree: PyTree) -> dict[str, Array]:
    leaves, _ = jtu.tree_flatten_with_path(eqx.filter(tree, eqx.is_array))
    digits = len(str(len(leaves)))  # The order of the tree, for dictionaries are sorted.
    return {f"{i:0{digits}d}{jtu.keystr(p)}": a for i, (p, a) in enumerate(leaves)}


def _abstract(a: Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding)


# %% [markdown]
# ## Training


# %%
def train(options: argparse.Namespace) -> list[float]:
    """The loss after every step."""
    checkpoints = Checkpoints(options.checkpoints, options.every)
    if not options.resume:
        checkpoints.check_empty()
    images = load(options.data)
    devices, optimizer = Devices(), kfac.KFAC()
    widths = (16, 8) if options.toy else (128, 64, 16)
    model = devices.everywhere(network(images.shape[1], widths, options.seed))
    state = optimizer.init(model)  # Beside the model.

    @eqx.filter_jit(donate="all-except-first")
    def train_step(key, model, state, x):
        return optimizer.step(loss_fn, model, state, x, key=key)

    begin, losses = 0, devices.everywhere(jnp.full(options.steps, jnp.nan))
    if options.resume:
        begin, (model, state, losses) = checkpoints.restore((model, state, losses))
    keys = jax.random.key(options.seed)
    quiet = options.process > 0 or None  # The first process has the bar.
    steps = range(begin + 1, options.steps + 1)
    for step in tqdm(steps, desc="K-FAC", unit=" steps", disable=quiet):
        rng = np.random.default_rng([options.seed, step])
        chosen = rng.integers(len(images), size=options.batch)
        x, key = devices.split(images[chosen]), jax.random.fold_in(keys, step)
        model, state, info = train_step(key, model, state, x)
        losses = losses.at[step - 1].set(info.loss)
        checkpoints.save(step, (model, state, losses))
    checkpoints.close()
    return losses.tolist()


# %% [markdown]
# ## What came out


# %%
def table(losses: list[float], every: int) -> str:
    lines = [f"{'step':>6} {'loss':>18}"]
    for step in sorted({1, *range(every, len(losses), every), len(losses)}):
        lines.append(f"{step:6d} {losses[step - 1]:18.12g}")
    return "\n".join(lines)


def verdict(losses: list[float]) -> str:
    return (
        f"The loss went from {losses[0]:.4g} to {losses[-1]:.4g} in {len(losses)} steps "
        f"(one seed; devices: {jax.device_count()}, processes: {jax.process_count()})."
    )


def plot(losses: list[float], path: Path) -> None:
    figure = Figure(figsize=(5, 3.6), layout="constrained")
    axis = figure.subplots()
    axis.plot(range(1, len(losses) + 1), losses, color="#d1495b", linewidth=2.2)
    axis.set_title("one batch over all devices", loc="left", fontweight="bold")
    axis.set(xlabel="steps", ylabel="cross-entropy, nats per image")
    axis.grid(True, color="0.92")
    axis.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)


# %%
def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="K-FAC on many devices.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--data", type=Path, help="folder of MNIST's files; none: scikit-learn's digits")
    add("--steps", type=int, default=200, help="in all")
    add("--batch", type=int, default=512, help="images, on all devices together")
    add("--seed", type=int, default=0, help="of initialisation and batches")
    add("--every", type=int, default=20, help="steps between two checkpoints")
    add("--devices", type=int, default=8, help="of each process, if made of a CPU")
    add("--processes", type=int, default=1, help="how many there are")
    add("--process", type=int, default=0, help="which of them this is")
    add("--coordinator", default="localhost:12355", help="where the first one listens")
    add("--out", type=Path, default=Path("runs/distributed.png"), help="picture")
    folder = Path("runs/distributed")
    add("--checkpoints", type=Path, default=folder, help="folder of checkpoints")
    add("--resume", action="store_true", help="from the last checkpoint, same --steps")
    add("--toy", action="store_true", help="small and quick, unless options say else")
    if parser.parse_known_args(argv)[0].toy:
        parser.set_defaults(steps=12, batch=64, every=3)
    options = parser.parse_args(argv)
    if min(options.steps, options.batch, options.every) < 1:
        parser.error("--steps, --batch and --every must be at least 1")
    return options


def main(argv: list[str] | None = None) -> None:
    options = parse(argv)
    jax.config.update("jax_num_cpu_devices", options.devices)
    if options.processes > 1:
        jax.distributed.initialize(
            options.coordinator, options.processes, options.process
        )
    losses = train(options)
    if options.process == 0:
        print(table(losses, options.every))
        print(verdict(losses))
        plot(losses, options.out)
        print(f"Picture: {options.out}")


if __name__ == "__main__":
    main()
