"""Work that is the same for many matrices: for those of equal shape it is done in one
batch, and if there are several devices, each of them does a part.

A *job* is a function with the matrices of one layer, or of a stack of layers, as its
arguments: a factor to be decomposed, for instance. Jobs are of one *kind* if they have
the same key, which says what is computed, and arguments of the same shapes and types, so
that they can be done in a *batch*: their arguments are concatenated along a first axis,
over which the function is mapped, and the outputs are split again.

All devices of a mesh hold the same matrices, so that each of them would do all jobs.
Instead, the jobs are dealt out like cards, every device does those in its *hand*, and the
outputs are gathered, as by J. G. Pauloski et al., *KAISA: An Adaptive Second-Order
Optimizer Framework for Deep Neural Networks*, SC 2021.
"""

import functools as ft
import math
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jaxtyping import Array, Int, PyTree, Shaped

from ._devices import (
    cast_varying,
    Devices,
    is_split,
    split_over_stack,
    varying_axes,
)


class Job(NamedTuple):
    """`fn(*args)`, for one layer or for each layer of a stack.

    Two jobs with the same `key` must have functions that compute the same. (The functions
    themselves may be different objects. They must not close over arrays.)
    """

    key: Hashable
    fn: Callable
    args: tuple[PyTree[Array], ...]
    stack: int  # The number of leading axes along which layers are stacked.
    together: bool = True  # Whether several are done faster by `vmap` than in a loop.

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the stack."""
        return jtu.tree_leaves(self.args)[0].shape[: self.stack]

    @property
    def kind(self) -> Hashable:
        """What jobs in one batch have in common."""
        leaves, treedef = jtu.tree_flatten(self.args)
        shapes = tuple((a.shape[self.stack :], a.dtype) for a in leaves)
        return self.key, treedef, shapes

    @property
    def is_large(self) -> bool:
        """Whether `fn` of a single layer keeps an accelerator busy, so that nothing is
        gained by doing several layers at the same time."""
        sizes = [math.prod(a.shape[self.stack :]) for a in jtu.tree_leaves(self.args)]
        return max(sizes) >= _LARGE

    def run(self) -> Any:
        """What the job returns, done by itself."""
        return split_over_stack(self.fn, self.stack)(*self.args)


def done(jobs: Sequence[Job], devices: Devices | None = None) -> list[Any]:
    """What all `jobs` return. They are decompositions of matrices, or other work that is
    worth sharing out: with several `devices`, each does a part of the jobs."""

    def is_separate(job):
        # Split arguments stay on the devices that have them. And a batch that a loop goes
        # through gains nothing, unless it is shared out over devices.
        return is_split(job.args) or (devices is None and not job.together)

    results = list[Any]([None] * len(jobs))
    batched = []
    for members in _groups(jobs, is_separate):
        group = [jobs[i] for i in members]
        if is_separate(group[0]) or (devices is None and len(group) == 1):
            _fill(results, members, _one_by_one(group))
        elif devices is None:
            _fill(results, members, _by_platform(group, *_ways(group[0])))
        else:
            batched.append(members)
    batches = [_Batch.of([jobs[i] for i in members]) for members in batched]
    for members, outputs in zip(batched, _outputs_of(batches, devices), strict=True):
        _fill(results, members, _unbatched([jobs[i] for i in members], outputs))
    return results


def _ways(job: Job) -> tuple[Callable, Callable]:
    """How jobs like this one are done on a CPU, and how elsewhere.

    On a CPU, an operation on a batch goes through its matrices one after the other, so
    that it is a matter of compiling. What is done to a small matrix are a few operations,
    the same for every matrix, which XLA compiles once. (What takes each out of a batch
    would be a program of its own.) For a large one, they are hundreds.

    On an accelerator, it takes longer to launch an operation on a small matrix than to
    compute it. Large matrices gain nothing from a batch, which with all its intermediate
    results would take most of the memory."""
    if job.is_large:
        return _in_one_batch, _one_by_one
    return _one_by_one, _in_one_batch


# From this many numbers in an array on, work on it keeps an accelerator busy.
_LARGE = 2**18


def products(jobs: Sequence[Job]) -> list[Any]:
    """What all `jobs` return, each of which is no more than a few products of matrices. A
    CPU does one job after the other. On an accelerator, it takes longer to launch a small
    product than to compute it, so small jobs of one kind are done in one batch."""
    results = list[Any]([None] * len(jobs))
    for members in _groups(jobs, lambda job: job.is_large or is_split(job.args)):
        group = [jobs[i] for i in members]
        if len(group) == 1:
            _fill(results, members, _one_by_one(group))
        else:
            _fill(results, members, _by_platform(group, _one_by_one, _in_one_batch))
    return results


def _groups(jobs: Sequence[Job], is_separate: Callable) -> list[list[int]]:
    """The indices of the jobs of each kind; a job with `is_separate(job)` is a group of
    its own."""
    groups = defaultdict(list)
    for i, job in enumerate(jobs):
        # Kinds are tuples, so that no kind is equal to an index.
        groups[i if is_separate(job) else job.kind].append(i)
    return list(groups.values())


def _fill(results: list[Any], members: Sequence[int], of_group: Sequence[Any]) -> None:
    """Puts the results of a group of jobs in their places among all results."""
    for i, result in zip(members, of_group, strict=True):
        results[i] = result


def _by_platform(jobs: list[Job], cpu: Callable, elsewhere: Callable) -> list[Any]:
    """The results of jobs of one kind: `cpu(jobs)` on a CPU, `elsewhere(jobs)` on any
    other device. (A program may be compiled for a device that is not the default one.)"""

    def with_args(way):
        return lambda args: way(
            [job._replace(args=a) for job, a in zip(jobs, args, strict=True)]
        )

    args = [job.args for job in jobs]
    return jax.lax.platform_dependent(
        args, cpu=with_args(cpu), default=with_args(elsewhere)
    )


def _one_by_one(jobs: list[Job]) -> list[Any]:
    """What jobs return, without a copy of their arguments in a batch."""
    return [job.run() for job in jobs]


def _in_one_batch(jobs: list[Job]) -> list[Any]:
    """What jobs of one kind return, done in one batch."""
    batch = _Batch.of(jobs)
    return _unbatched(jobs, batch(batch.args))


def _unbatched(jobs: list[Job], outputs: PyTree) -> list[Any]:
    """The result of every job, from the outputs of their batch."""
    ends = np.cumsum([math.prod(job.shape) for job in jobs])

    def result(job, end):
        part = slice(int(end) - math.prod(job.shape), int(end))
        return jtu.tree_map(lambda a: a[part].reshape(job.shape + a.shape[1:]), outputs)

    return [result(job, end) for job, end in zip(jobs, ends, strict=True)]


class _Batch(NamedTuple):
    """Jobs of one kind, with their arguments concatenated. The layers of a stack become
    entries of the batch, like jobs of a single layer."""

    fn: Callable
    together: bool
    args: PyTree[Shaped[Array, "number ..."]]

    @classmethod
    def of(cls, jobs: list[Job]) -> "_Batch":
        def flat_args(job):
            flat = lambda a: a.reshape(-1, *a.shape[job.stack :])
            return jtu.tree_map(flat, job.args)

        args = jtu.tree_map(lambda *a: jnp.concatenate(a), *map(flat_args, jobs))
        return cls(jobs[0].fn, jobs[0].together, args)

    @property
    def number(self) -> int:
        """How many entries there are."""
        return len(jtu.tree_leaves(self.args)[0])

    @property
    def work(self) -> int:
        """A measure of the operations for one entry: the cube of the side of each square
        matrix. Vectors, the diagonals of factors, count nothing."""
        shapes = [a.shape[1:] for a in jtu.tree_leaves(self.args)]
        return sum(math.prod(s) * max(s) for s in shapes if len(s) > 1)

    def __call__(self, args: PyTree) -> PyTree:
        fn = lambda args: self.fn(*args)
        return jax.vmap(fn)(args) if self.together else jax.lax.map(fn, args)

    def some(self, which: Int[Array, " some"]) -> PyTree:
        """The outputs of some entries."""
        if len(which) == 0:
            return self.zeros(0)
        return self(jtu.tree_map(lambda a: a[which], self.args))

    def zeros(self, number: int) -> PyTree:
        """Zeros in the place of the outputs of so many entries."""
        zeros = lambda a: jnp.zeros((number, *a.shape[1:]), a.dtype)
        return jtu.tree_map(zeros, jax.eval_shape(self, self.args))


def _outputs_of(batches: list[_Batch], devices: Devices | None) -> list[PyTree]:
    """The outputs of all batches. Batches of vectors are so little work that every device
    does all of it."""
    if devices is None:
        return [batch(batch.args) for batch in batches]
    outputs = iter(_shared_out([batch for batch in batches if batch.work > 0], devices))
    return [next(outputs) if batch.work > 0 else batch(batch.args) for batch in batches]


def _shared_out(batches: list[_Batch], devices: Devices) -> list[PyTree]:
    """The outputs of all batches, each of which is shared out over the devices. The first
    entries of a batch are divided evenly. What is left over, fewer entries than there are
    devices, is dealt out together with what is left over of the other batches."""
    if not batches:
        return []
    shares = [batch.number // devices.number for batch in batches]
    left_over = [batch.number % devices.number for batch in batches]
    hands = deal([batch.work for batch in batches], left_over, devices.number)

    def on_one_device(args):
        local = [batch._replace(args=a) for batch, a in zip(batches, args, strict=True)]
        me = devices.this_one()
        even = [
            devices.all_gathered(batch.some(me * n + jnp.arange(n, dtype=me.dtype)))
            for batch, n in zip(local, shares, strict=True)
        ]
        # The hands are not of equal size, so that their outputs cannot be gathered. They
        # are added up instead, with zeros for what is in other hands.
        return even, devices.summed(_with_zeros(local, left_over, hands, me))

    even, last = devices.everywhere(on_one_device, [batch.args for batch in batches])
    join = lambda *parts: jnp.concatenate([p for p in parts if len(p) > 0])
    return [jtu.tree_map(join, *parts) for parts in zip(even, last, strict=True)]


# What one device does of the entries that are left over. The pair `(i, j)` stands for
# entry `j` among those of batch `i`; pairs are in ascending order.
Hand = tuple[tuple[int, int], ...]


def deal(work: Sequence[int | float], numbers: Sequence[int], devices: int) -> list[Hand]:
    """The hand of every device, if the batch `i` has `numbers[i]` entries of
    `work[i]` each. The largest entries are dealt out first, each to the device that has
    least work so far, as long as its hand is not full.

    A hand is full with `ceil(entries / devices) + 1` entries. The one more than an even
    division lets some devices do more of the small entries while others do a large one.
    There is a limit because `work` counts operations alone: many small entries take more
    time than it says, since each takes some however small it is.
    """
    entries = [(i, j) for i, number in enumerate(numbers) for j in range(number)]
    full = math.ceil(len(entries) / devices) + 1
    hands, totals = [[] for _ in range(devices)], [0.0] * devices
    for i, j in sorted(entries, key=lambda entry: -work[entry[0]]):
        free = [d for d, hand in enumerate(hands) if len(hand) < full]
        least = min(free, key=lambda d: totals[d])
        hands[least].append((i, j))
        totals[least] += work[i]
    return [tuple(sorted(hand)) for hand in hands]


def _with_zeros(
    batches: list[_Batch], left_over: list[int], hands: list[Hand], me: Int[Array, ""]
) -> list[PyTree]:
    """For each batch, the outputs of the entries that are left over: of those in the hand
    of the device with the number `me`, and zeros for all others.

    All devices run the same program, in which a `switch` chooses what a device does.
    Devices with entries of the same batches share a branch.
    """
    batches_in = [tuple(i for i, _ in hand) for hand in hands]
    branches = sorted(set(batches_in))
    entries_in = np.zeros((len(hands), max(map(len, batches_in))), np.int32)
    for row, hand in zip(entries_in, hands, strict=True):
        row[: len(hand)] = [j for _, j in hand]

    # All branches have to return the same types, so the zeros vary over devices, too.
    zeros = [
        cast_varying(batch.zeros(n), varying_axes((me, batch.args)))
        for batch, n in zip(batches, left_over, strict=True)
    ]

    def run(branch, entries):
        results = list(zeros)
        for i in set(branch):
            # A hand is in ascending order: its entries of one batch are side by side.
            batch = batches[i]
            places = entries[bisect_left(branch, i) : bisect_right(branch, i)]
            new = batch.some(batch.number - left_over[i] + places)
            put = lambda zeros, new, places=places: zeros.at[places].set(new)
            results[i] = jtu.tree_map(put, results[i], new)
        return results

    branch = jnp.asarray([branches.index(b) for b in batches_in], np.int32)[me]
    return jax.lax.switch(
        branch, [ft.partial(run, b) for b in branches], jnp.asarray(entries_in)[me]
    )
