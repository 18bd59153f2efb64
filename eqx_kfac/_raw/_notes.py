"""What a program does with the arrays of a model, and the tags that follow from it."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from jaxtyping import Array, PyTree

from .._block import AbstractBlock, Kronecker
from .._tag import Tag
from ..form import AbstractForm, Convolution, Leaf, Lookup, Parameters, size_of, View
from ._facts import AbstractVisitor, Order, Term
from ._sites import Site
from ._watched import matrix, transposed


class Noted(NamedTuple):
    """A use of an array, with the bias that is added to the result."""

    form: AbstractForm
    weight: Leaf
    stack: int
    bias: int | None
    bias_leaf: Leaf | None


class Notes(AbstractVisitor):
    """Notes what an array of parameters is used as, and whether it is used otherwise."""

    def __init__(self):
        self.uses: dict[int, list[Noted]] = {}
        self.others: dict[int, set[int]] = {}  # How many axes loops went along.

    def site(self, site: Site, z: Array, bias: Term | None, order: Order | None) -> Array:
        number = leaf = None
        if bias is not None and order is not None:
            number, leaf = bias.parameter, _bias_leaf(site, bias, *order)
        use = site.use
        noted = Noted(use.form, use.weight, site.stack, number, leaf)
        if noted not in self.uses.setdefault(site.parameter, []):
            self.uses[site.parameter].append(noted)
        return z

    def accepts(self, site: Site, bias: Term) -> bool:
        return True

    def otherwise(self, term: Term) -> None:
        self.others.setdefault(term.parameter, set()).add(term.stack)

    def sliced(self, parameters: set[int]) -> tuple[PyTree, Callable]:
        return (), lambda _: self


def _bias_leaf(site: Site, bias: Term, sizes: tuple, order: tuple) -> Leaf:
    """Where a bias is, as its form expects it."""
    form, seen = site.use.form, site.use.weight.seen
    if isinstance(form, Convolution):
        seen = (seen[0], *[1] * len(form.kernel))
    else:
        seen = seen[:-1]
    window = bias.axes.window[bias.stack :]
    return Leaf("", window, sizes, order, seen)


class RawArray(NamedTuple):
    """An array of a model that no layer has a tag for: the path of the module that holds
    it, its name there, and its shape."""

    module: str
    name: str
    shape: tuple[int, ...]

    @property
    def path(self) -> str:
        """The path of this array in the model."""
        return f"{self.module}.{self.name}"


class Part(NamedTuple):
    """A window of an array, which is one matrix in all of its uses."""

    number: int  # Of the array.
    form: AbstractForm
    weight: Leaf
    stack: int
    tied: bool  # In some of them, it is transposed.
    bias: int | None
    bias_leaf: Leaf | None


def parts_of(arrays: Sequence[RawArray], notes: Notes) -> list[Part]:
    """The parts of all arrays that are matrices in whatever is done with them, with their
    biases."""
    found: list[Part] = []
    biases = {use.bias for uses in notes.uses.values() for use in uses}
    for number, array in enumerate(arrays):
        if number in notes.uses and number not in {*notes.others, *biases}:
            found += _parts(number, array, notes.uses[number])
    by_bias = lambda part: -1 if part.bias is None else part.bias
    for bias, parts in itertools.groupby(sorted(found, key=by_bias), key=by_bias):
        parts = list(parts)
        if bias >= 0 and not _is_bias(bias, parts, arrays, notes):
            for part in parts:
                alone = part._replace(bias=None, bias_leaf=None)
                found[found.index(part)] = alone
    return found


def _parts(number: int, array: RawArray, uses: list[Noted]) -> list[Part]:
    """The parts of one array; none if its uses do not agree, or leave out any of it."""
    stacks = {use.stack for use in uses}
    if len(stacks) > 1:
        return []
    (stack,) = stacks
    own = math.prod(array.shape[stack:])
    by_window: dict[Any, list[Noted]] = {}
    for use in uses:
        by_window.setdefault(use.weight.window, []).append(use)
    leaves = [same[0].weight for same in by_window.values()]
    if sum(map(size_of, leaves)) != own or not _are_apart([w.window for w in leaves]):
        return []
    parts = [_part(number, stack, same) for same in by_window.values()]
    return [] if None in parts else parts  # pyright: ignore


def _part(number: int, stack: int, uses: list[Noted]) -> Part | None:
    """What all these uses of a window have in common."""
    lookups = [use for use in uses if isinstance(use.form, Lookup)]
    owner = (lookups or uses)[0]
    kind, tied = matrix(owner.form, owner.weight), False
    for use in uses:
        own = matrix(use.form, use.weight)
        if own != kind:
            if isinstance(use.form, Convolution) or transposed(own) != kind:
                return None
            tied = True
    biases = {(use.bias, use.bias_leaf) for use in uses}
    bias, leaf = biases.pop() if len(biases) == 1 and not tied else (None, None)
    return Part(number, owner.form, owner.weight, stack, tied, bias, leaf)


def _is_bias(
    bias: int, parts: list[Part], arrays: Sequence[RawArray], notes: Notes
) -> bool:
    """Whether an array is nothing but the bias of these parts, which are in the same
    module."""
    if bias in notes.others or bias in notes.uses:
        return False
    numbers = {part.number for part in parts}
    used_by = {n for n, uses in notes.uses.items() if any(u.bias == bias for u in uses)}
    modules = {arrays[n].module for n in (*numbers, bias)}
    stacks = {part.stack for part in parts}
    if used_by != numbers or len(modules) > 1 or len(stacks) > 1:
        return False
    leaves = [part.bias_leaf for part in parts if part.bias_leaf is not None]
    own = math.prod(arrays[bias].shape[stacks.pop() :])
    windows = [leaf.window for leaf in leaves]
    return sum(map(size_of, leaves)) == own and _are_apart(windows)


def _are_apart(windows: Sequence[Any]) -> bool:
    """Whether no two windows of an array have an entry in common."""

    def overlap(a, b):
        return all(max(s, t) < min(e, f) for (s, e), (t, f) in zip(a, b, strict=True))

    return not any(overlap(a, b) for a, b in itertools.combinations(windows, 2))


def tags_for(
    arrays: Sequence[RawArray], notes: Notes, choose: Callable
) -> dict[str, dict[str, Tag]]:
    """The tags of all modules, by path and name. `choose(array, part, name)` is the block
    for a part of an array, or for an array that is no matrix (`None`), at a tag of that
    name; or `None` for no tag."""
    plan: dict[str, dict[str, Tag]] = {}
    parts = parts_of(arrays, notes)
    covered: set[int] = set()
    for part in parts:
        array = arrays[part.number]
        block = choose(array, part, _name(array, part))
        if block is not None and part.tied:
            if not isinstance(block, Kronecker):
                continue
            block = dataclasses.replace(block, tied=True)
        if block is not None:
            own = plan.setdefault(array.module, {})
            own[_name(array, part)] = Tag(_form(part, arrays), block)
        covered |= {part.number} if part.bias is None else {part.number, part.bias}
    for number, array in enumerate(arrays):
        if number in covered:
            continue
        stack = _stack(notes, number)
        name = "others" if stack == 0 else f"others, stacked {stack}"
        block = choose(array, None, name)
        if block is not None:
            own = plan.setdefault(array.module, {})
            _add_at_value(own, name, array, stack, block)
    return plan


def _form(part: Part, arrays: Sequence[RawArray]) -> View:
    weight = dataclasses.replace(part.weight, name=arrays[part.number].name)
    if part.bias is None or part.bias_leaf is None:
        return View(part.form, weight)
    bias = dataclasses.replace(part.bias_leaf, name=arrays[part.bias].name)
    return View(part.form, weight, bias)


def _name(array: RawArray, part: Part) -> str:
    """The name of a tag: that of the array, and which part of it, if there are others."""
    own = array.shape[part.stack :]
    ranges = [
        ":" if (start, stop) == (0, n) else f"{start}:{stop}"
        for n, (start, stop) in zip(own, part.weight.window, strict=True)
    ]
    whole = all(r == ":" for r in ranges)
    return array.name if whole else f"{array.name}[{', '.join(ranges)}]"


def _stack(notes: Notes, number: int) -> int:
    """How many axes of an array loops go along, in all its uses."""
    stacks = {use.stack for use in notes.uses.get(number, ())}
    stacks |= notes.others.get(number, set())
    return stacks.pop() if len(stacks) == 1 else 0


def _add_at_value(
    tags: dict[str, Tag], name: str, array: RawArray, stack: int, block: AbstractBlock
) -> None:
    """One more array for the tag of a module at whatever is no matrix."""
    if name in tags and tags[name].block != block:
        name = array.name
    ranks = {}
    if name in tags:
        form: Any = tags[name].form
        ranks = dict(zip(form.leaves, form.ranks, strict=True))
    ranks[array.name] = len(array.shape) - stack
    tags[name] = Tag(Parameters(**ranks), block)
