# %% [markdown]
# # Many devices, several processes
#
# Batches are split over all devices. New is a mesh, where the model and where a batch
# are put, and, with several processes, `jax.distributed.initialize`. Orbax writes
# checkpoints; a killed job goes on from the last one, on any number of devices.
#
#     python examples/distributed.py  # 8 devices made of a CPU; then also --resume
#     python examples/distributed.py --devices 4 --processes 2 --process 0 &
#     python examples/distributed.py --devices 4 --processes 2 --process 1

# %%
from argparse import ArgumentDefaultsHelpFormatter, ArgumentParser
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import NamedSharding, PartitionSpec
from matplotlib.figure import Figure
from sklearn.datasets import load_digits
from tqdm import tqdm

import eqx_kfac as kfac


optimizer = kfac.KFAC()


def loss_fn(model, x):
    return kfac.SigmoidCrossEntropy(jax.vmap(model)(x), x)


@eqx.filter_jit(donate="all-except-first")
def train_step(key, model, state, x):
    return optimizer.step(loss_fn, model, state, x, key=key)


def network(widths, key):
    layers = []
    for d_in, d_out, key in zip(widths, widths[1:], jax.random.split(key, len(widths))):
        layers += [kfac.Linear(d_in, d_out, key=key), eqx.nn.Lambda(jnp.tanh)]
    return eqx.nn.Sequential(layers[:-1])


def train(options):
    """The loss after every step."""
    images = (load_digits(return_X_y=True)[0] / 16).astype(np.float32)
    mesh = jax.make_mesh((jax.device_count(),), ("batch",))
    place = lambda *axes: NamedSharding(mesh, PartitionSpec(*axes))
    key, losses = jax.random.key(options.seed), jnp.full(options.steps, jnp.nan)
    model = network((64, 128, 64, 16, 64, 128, 64), key)
    model, losses = eqx.filter_shard((model, losses), place())
    run = model, optimizer.init(model), losses  # The state is put beside the model.
    every = ocp.CheckpointManagerOptions(max_to_keep=2, save_interval_steps=20)
    with ocp.CheckpointManager(options.checkpoints.absolute(), options=every) as manager:
        begin = manager.latest_step()
        if options.resume == (begin is None):
            raise SystemExit(
                "--resume goes on from checkpoints; without, there are none."
            )
        run = run if begin is None else restored(manager, run)
        quiet = options.process > 0 or None  # The first process has the bar.
        for i in tqdm(range(begin or 0, options.steps), unit=" steps", disable=quiet):
            x = images[np.random.default_rng([options.seed, i]).integers(1797, size=512)]
            # Every process puts on its devices what belongs there.
            x = jax.make_array_from_callback(x.shape, place("batch"), x.__getitem__)
            model, state, info = train_step(jax.random.fold_in(key, i), run[0], run[1], x)
            run = model, state, run[2].at[i].set(info.loss)
            manager.save(i + 1, args=ocp.args.StandardSave(arrays_of(run)))
    return run[2].tolist()


def arrays_of(tree):
    return jax.tree.leaves(eqx.filter(tree, eqx.is_array))


def restored(manager, tree):
    """The last arrays that were saved, on the devices where those of `tree` are."""
    leaves = manager.restore(None, args=ocp.args.StandardRestore(arrays_of(tree)))
    arrays, static = eqx.partition(tree, eqx.is_array)
    return eqx.combine(jax.tree.unflatten(jax.tree.structure(arrays), leaves), static)


def draw(losses, path):
    figure = Figure(figsize=(6, 3.2), layout="constrained")
    figure.subplots().semilogy(losses, color="#d1495b")
    figure.suptitle("cross-entropy, nats per image, after so many steps")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)


# %%
if __name__ == "__main__":
    parser = ArgumentParser(formatter_class=ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("--steps", type=int, default=200, help="in all")
    add("--seed", type=int, default=0, help="of initialisation and batches")
    add("--devices", type=int, default=8, help="of each process, made of a CPU")
    add("--processes", type=int, default=1, help="how many there are")
    add("--process", type=int, default=0, help="which of them this is")
    add("--coordinator", default="localhost:12355", help="where the first one listens")
    add("--out", type=Path, default=Path("runs/distributed.png"), help="picture")
    add("--checkpoints", type=Path, default=Path("runs/distributed"), help="their folder")
    add("--resume", action="store_true", help="from the last checkpoint, same --steps")
    add("--toy", action="store_true", help="twenty steps, to see whether all runs")
    options = parser.parse_args()
    options.steps = 20 if options.toy else options.steps
    jax.config.update("jax_num_cpu_devices", options.devices)
    if options.processes > 1:
        where = options.coordinator, options.processes, options.process
        jax.distributed.initialize(*where)
    losses = train(options)
    if options.process == 0:
        for i in (0, *range(19, options.steps, 20)):
            print(f"{i + 1:6d} {losses[i]:18.12g}")
        draw(losses, options.out)
        print(f"Picture: {options.out}")
