"""Work that is done for many matrices: for equal ones in one go, and each device of a
mesh does its part.

All devices hold the same matrices, so that each would decompose all of them. They are
dealt out instead, and the results are gathered, as by J. G. Pauloski et al., *KAISA: An
Adaptive Second-Order Optimizer Framework for Deep Neural Networks*, SC 2021."""

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
    decomposed_over_stack,
    Devices,
    is_split,
    varying_axes,
)


class Job(NamedTuple):
    """`fn(*args)`, for each of a stack of layers. (`fn` must not close over arrays; jobs
    of one `key` have the same.)"""

    key: Hashable
    fn: Callable
    args: tuple[PyTree[Array], ...]
    stack: int
    together: bool = True  # Whether several are better done at the same time, by `vmap`.

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the stack."""
        return jtu.tree_leaves(self.args)[0].shape[: self.stack]

    @property
    def kind(self) -> Hashable:
        """What has to be the same of jobs that are done together."""
        leaves, treedef = jtu.tree_flatten(self.args)
        shapes = tuple((a.shape[self.stack :], a.dtype) for a in leaves)
        return self.key, treedef, shapes

    @property
    def is_large(self) -> bool:
        """Whether one of several would keep a device busy."""
        sizes = [math.prod(a.shape[self.stack :]) for a in jtu.tree_leaves(self.args)]
        return max(sizes) >= _LARGE

    @property
    def alone(self) -> Any:
        """What the job returns, done by itself."""
        return decomposed_over_stack(self.fn, self.stack)(*self.args)


def done(jobs: Sequence[Job], devices: Devices | None = None) -> list[Any]:
    """What all `jobs` return; with several `devices`, each does a part of them."""
    groups, results = defaultdict(list), list[Any]([None] * len(jobs))
    for i, job in enumerate(jobs):
        alone = is_split(job.args) or (devices is None and not job.together)
        groups[i if alone else job.kind].append(i)
    joint = []
    for kind, members in groups.items():
        first = jobs[members[0]]
        if kind == members[0] or (devices is None and len(members) == 1):
            results[members[0]] = first.alone
        elif devices is None and first.is_large:
            some = [jobs[i] for i in members]
            # A CPU does them in a loop, of which it has little to compile. Elsewhere, a
            # stack of all, and of every intermediate result, would be most of the memory.
            _fill(results, members, _by_platform(some, _in_a_row, _each))
        else:
            joint.append(members)
    batches = [_Batch.of([jobs[i] for i in members]) for members in joint]
    for members, rows in zip(joint, _rows_of(batches, devices), strict=True):
        _fill(results, members, _apart([jobs[i] for i in members], rows))
    return results


# An array with so many numbers keeps a device that is not a CPU busy by itself.
_LARGE = 2**18


def products(jobs: Sequence[Job]) -> list[Any]:
    """What all `jobs` return, of which each is little more than a few products. A CPU
    does one after the other. Elsewhere, to launch a small one takes longer than to do
    it."""
    groups, results = defaultdict(list), list[Any]([None] * len(jobs))
    for i, job in enumerate(jobs):
        alone = job.is_large or is_split(job.args)
        groups[i if alone else job.kind].append(i)
    for members in groups.values():
        some = [jobs[i] for i in members]
        single = len(some) == 1
        own = [some[0].alone] if single else _by_platform(some, _each, _in_a_row)
        _fill(results, members, own)
    return results


def _fill(results: list[Any], members: Sequence[int], own: Sequence[Any]) -> None:
    """Puts the results of some jobs in their places."""
    for i, result in zip(members, own, strict=True):
        results[i] = result


def _by_platform(jobs: list[Job], cpu: Callable, elsewhere: Callable) -> list[Any]:
    """The results of jobs of one kind."""

    def of(how):
        return lambda args: how(
            [job._replace(args=a) for job, a in zip(jobs, args, strict=True)]
        )

    args = [job.args for job in jobs]
    return jax.lax.platform_dependent(args, cpu=of(cpu), default=of(elsewhere))


def _each(jobs: list[Job]) -> list[Any]:
    """What jobs return, each done where its arguments are."""
    return [job.alone for job in jobs]


def _in_a_row(jobs: list[Job]) -> list[Any]:
    """What jobs of one kind return, all done with their arguments in one row."""
    batch = _Batch.of(jobs)
    return _apart(jobs, batch(batch.args))


def _apart(jobs: list[Job], rows: PyTree) -> list[Any]:
    """The results of every job, from those in one row."""
    ends = np.cumsum([math.prod(job.shape) for job in jobs])

    def own(job, end):
        part = slice(int(end) - math.prod(job.shape), int(end))
        return jtu.tree_map(lambda a: a[part].reshape(job.shape + a.shape[1:]), rows)

    return [own(job, end) for job, end in zip(jobs, ends, strict=True)]


class _Batch(NamedTuple):
    """Jobs of one kind, their arguments in one row."""

    fn: Callable
    together: bool
    args: PyTree[Shaped[Array, "number ..."]]

    @classmethod
    def of(cls, jobs: list[Job]) -> "_Batch":
        def in_a_row(job):
            flat = lambda a: a.reshape(-1, *a.shape[job.stack :])
            return jtu.tree_map(flat, job.args)

        args = jtu.tree_map(lambda *a: jnp.concatenate(a), *map(in_a_row, jobs))
        return cls(jobs[0].fn, jobs[0].together, args)

    @property
    def number(self) -> int:
        return len(jtu.tree_leaves(self.args)[0])

    @property
    def work(self) -> int:
        """A measure of the operations for each: of vectors, there is nothing to do."""
        shapes = [a.shape[1:] for a in jtu.tree_leaves(self.args)]
        return sum(math.prod(s) * max(s) for s in shapes if len(s) > 1)

    def __call__(self, args: PyTree) -> PyTree:
        fn = lambda args: self.fn(*args)
        return jax.vmap(fn)(args) if self.together else jax.lax.map(fn, args)

    def some(self, which: Int[Array, " some"]) -> PyTree:
        if len(which) == 0:
            return self.zeros(0)
        return self(jtu.tree_map(lambda a: a[which], self.args))

    def zeros(self, number: int) -> PyTree:
        """Zeros in the place of so many results."""
        zeros = lambda a: jnp.zeros((number, *a.shape[1:]), a.dtype)
        return jtu.tree_map(zeros, jax.eval_shape(self, self.args))


def _rows_of(batches: list[_Batch], devices: Devices | None) -> list[PyTree]:
    if devices is None:
        return [batch(batch.args) for batch in batches]
    dealt = iter(_dealt_out([batch for batch in batches if batch.work > 0], devices))
    return [next(dealt) if batch.work > 0 else batch(batch.args) for batch in batches]


def _dealt_out(batches: list[_Batch], devices: Devices) -> list[PyTree]:
    """Deals matrices out: all devices get the same number of every batch as long as there
    are enough, and what remains goes to whoever has least to do."""
    if not batches:
        return []
    each = [batch.number // devices.number for batch in batches]
    rest = [batch.number % devices.number for batch in batches]
    hands = dealt([batch.work for batch in batches], rest, devices.number)

    def local(args):
        own = [batch._replace(args=a) for batch, a in zip(batches, args, strict=True)]
        me = devices.this_one()
        even = [
            devices.gathered(batch.some(me * n + jnp.arange(n, dtype=me.dtype)))
            for batch, n in zip(own, each, strict=True)
        ]
        return even, devices.added(_own_hand(own, rest, hands, me))

    even, last = devices.everywhere(local, [batch.args for batch in batches])
    join = lambda *parts: jnp.concatenate([p for p in parts if len(p) > 0])
    return [jtu.tree_map(join, *parts) for parts in zip(even, last, strict=True)]


Hand = tuple[tuple[int, int], ...]  # Batches and, among the last of them, jobs.


def dealt(
    work: Sequence[int | float], numbers: Sequence[int], devices: int
) -> list[Hand]:
    """Who does what, if there are so many jobs of so much work each: the largest are
    dealt out first, each to the device that has least to do so far; to none two more
    than to another, were all as large."""
    jobs = [(i, j) for i, number in enumerate(numbers) for j in range(number)]
    most = math.ceil(len(jobs) / devices) + 1
    hands, totals = [[] for _ in range(devices)], [0.0] * devices
    for i, j in sorted(jobs, key=lambda job: -work[job[0]]):
        free = [d for d, hand in enumerate(hands) if len(hand) < most]
        least = min(free, key=lambda d: totals[d])
        hands[least].append((i, j))
        totals[least] += work[i]
    return [tuple(sorted(hand)) for hand in hands]


def _own_hand(
    batches: list[_Batch], rest: list[int], hands: list[Hand], me: Int[Array, ""]
) -> list[PyTree]:
    """For the last jobs of every batch, the results of those in one device's hand, and
    zeros. Devices whose jobs are of the same kinds run the same code."""
    kinds = [tuple(i for i, _ in hand) for hand in hands]
    ways = sorted(set(kinds))
    jobs = np.zeros((len(hands), max(map(len, kinds))), np.int32)
    for row, hand in zip(jobs, hands, strict=True):
        row[: len(hand)] = [j for _, j in hand]

    nothing = [
        cast_varying(batch.zeros(n), varying_axes((me, batch.args)))
        for batch, n in zip(batches, rest, strict=True)
    ]

    def go(way, mine):
        results = list(nothing)
        for i in set(way):
            batch, own = batches[i], mine[bisect_left(way, i) : bisect_right(way, i)]
            new = batch.some(batch.number - rest[i] + own)
            put = lambda zeros, new, own=own: zeros.at[own].set(new)
            results[i] = jtu.tree_map(put, results[i], new)
        return results

    way = jnp.asarray([ways.index(kind) for kind in kinds], np.int32)[me]
    return jax.lax.switch(way, [ft.partial(go, w) for w in ways], jnp.asarray(jobs)[me])
