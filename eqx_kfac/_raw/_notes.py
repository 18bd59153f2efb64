"""What a program does with the arrays of a model, and the tags that follow from it.

While the program is evaluated (`_walk.py`), `Notes` collects all uses of every array. A
*use* is a place where the array, or a *window* of it (a range along every axis),
multiplies data in one of the forms that are known: as a matrix, as the kernel of a
convolution, as a table whose rows are looked up. Anything else that is done with an array
is an *other use*.

Then `tags_for` chooses the tags. An array that has no other use is divided into *parts*,
each of which is a window with the same matrix in all of its uses. A part has a tag of its
own, which also covers the bias that is added to the products, if it is the same for all
of them. An array that cannot be divided like that is tagged at its value, in one tag with
all such arrays of its module.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

from jaxtyping import Array, PyTree

from .._block import AbstractBlock, Kronecker
from .._jax import Equation
from .._tag import Tag
from ..form import (
    AbstractForm,
    Convolution,
    Leaf,
    Lookup,
    Mask,
    Masked,
    Parameters,
    size_of,
    View,
)
from ._facts import AbstractVisitor, Order, Term
from ._masks import canonical_mask, concrete, first_of_equal, masked_term
from ._sites import matrix_key, Site, transposed_key


class NotedUse(NamedTuple):
    """A use of an array, and the bias that is added to the result."""

    form: AbstractForm
    weight: Leaf  # How the form sees the array.
    stack: int  # Along how many leading axes of the array loops go.
    bias: int | None  # The number of the array that is the bias.
    bias_leaf: Leaf | None  # How the form sees the bias.
    mask: Mask | None = None  # Which entries of the canonical matrix are used.


class Notes(AbstractVisitor):
    """A visitor that notes all uses of arrays, by the numbers of these, and changes
    nothing."""

    def __init__(self):
        self.uses: dict[int, list[NotedUse]] = {}
        # Products with what is the same for all data.
        self.constant_uses: dict[int, list[NotedUse]] = {}
        # Along how many leading axes of an array loops go, in each of its other uses.
        self.other_uses: dict[int, set[int]] = {}

    def site(self, site: Site, z: Array, bias: Term | None, order: Order | None) -> Array:
        number = leaf = None
        if bias is not None and order is not None:
            number, leaf = bias.parameter, _bias_leaf(site, bias, order)
        use, mask = site.use, canonical_mask(site)
        if mask is None and site.mask is not None:  # It has no canonical matrix.
            self.other_uses.setdefault(site.parameter, set()).add(site.stack)
        noted = NotedUse(use.form, use.weight, site.stack, number, leaf, mask)
        uses = self.constant_uses if site.constant else self.uses
        if noted not in uses.setdefault(site.parameter, []):
            uses[site.parameter].append(noted)
        return z

    def accepts(self, site: Site, bias: Term) -> bool:
        # A lookup has no bias, nor has the beginning of a gradient. Whether all uses have
        # the same bias is only known in the end.
        return not isinstance(site.use.form, Lookup) and not site.constant

    def otherwise(self, terms: Sequence[Term], value: Any, matters: bool) -> Any:
        for term in terms if matters else ():
            self.other_uses.setdefault(term.parameter, set()).add(term.stack)
        return value

    def masked(
        self, term: Term, mask: Any, kept: int, elsewhere: Sequence[Any]
    ) -> Term | None:
        return masked_term(term, mask, kept, elsewhere)

    def evaluated(self, eqn: Equation, values: Sequence[Any]) -> list[Any]:
        return concrete(eqn, values)

    def same_in_rounds(self, values: Any) -> Any:
        return first_of_equal(values)

    def sliced(self, parameters: set[int]) -> tuple[PyTree, Callable]:
        return (), lambda _: self  # There is nothing to slice: the visitor has no arrays.

    def finish(self) -> None:
        """Takes products with constants for uses if they are of the transpose of a matrix
        that multiplies data, as where a gradient within the model begins. What any other
        one returns is a parameter in other clothes."""
        for number, constant_uses in self.constant_uses.items():
            uses = self.uses.get(number, [])
            keys = {
                transposed_key(matrix_key(use.form, use.weight))
                for use in uses
                if not isinstance(use.form, Convolution)
            }
            for use in constant_uses:
                if matrix_key(use.form, use.weight) not in keys:
                    self.other_uses.setdefault(number, set()).add(use.stack)
                elif use not in uses:
                    uses.append(use)
        self.constant_uses = {}


def _bias_leaf(site: Site, bias: Term, order: Order) -> Leaf:
    """How the form of a site sees a bias: along the outputs, which come first in its
    weight; in a convolution with an axis of length one for each axis of the kernel."""
    form, weight_shape = site.use.form, site.use.weight.seen
    if isinstance(form, Convolution):
        bias_shape = (weight_shape[0], *[1] * len(form.kernel))
    else:
        bias_shape = weight_shape[:-1]
    sizes, permutation = order
    window = bias.axes.window[bias.stack :]
    # The name of an array is not known here: `_form` fills it in.
    return Leaf("", window, shape=sizes, order=permutation, seen=bias_shape)


class RawArray(NamedTuple):
    """An array of a model that no tagged layer covers: the path of the module that holds
    the array, the name of the array there, and its shape."""

    module: str
    name: str
    shape: tuple[int, ...]

    @property
    def path(self) -> str:
        """The path of this array in the model."""
        return f"{self.module}.{self.name}"


# Which block a tag has, given an array, the part of it that the tag is for (`None`: the
# value of the array), and the name of the tag; `None` if there is to be no tag.
Choose: TypeAlias = Callable[..., AbstractBlock | None]


class Part(NamedTuple):
    """A window of an array, which is the same matrix, or its transpose, in all uses."""

    number: int  # The number of the array.
    form: AbstractForm
    weight: Leaf  # How the form sees the window.
    stack: int  # Along how many leading axes of the array loops go.
    tied: bool  # Whether some of the uses are of the transpose.
    bias: int | None  # The number of the array that is the bias in all uses.
    bias_leaf: Leaf | None
    mask: Mask | None = None  # Which entries of the canonical matrix are used.


def parts_of(arrays: Sequence[RawArray], notes: Notes, choose: Choose) -> list[Part]:
    """The parts of all arrays that can be divided into parts. An array that is a bias
    anywhere has none."""
    all_parts: list[Part] = []
    biases = {use.bias for uses in notes.uses.values() for use in uses}
    for number, array in enumerate(arrays):
        if number in notes.uses and number not in {*notes.other_uses, *biases}:
            parts = _parts(number, array, notes.uses[number])
            if all(_has_fitting_block(array, part, choose) for part in parts):
                all_parts += parts
    # Whether an array can be a bias depends on all parts to which it is added.
    by_bias = lambda part: -1 if part.bias is None else part.bias
    for bias, parts in itertools.groupby(sorted(all_parts, key=by_bias), key=by_bias):
        parts = list(parts)
        if bias >= 0 and not _is_bias(bias, parts, arrays, notes):
            for part in parts:
                without_bias = part._replace(bias=None, bias_leaf=None)
                all_parts[all_parts.index(part)] = without_bias
    return all_parts


def _parts(number: int, array: RawArray, uses: list[NotedUse]) -> list[Part]:
    """The parts of one array; none if the windows of its uses overlap or leave out any
    entry, or if the uses of a window differ."""
    stacks = {use.stack for use in uses}
    if len(stacks) > 1:
        return []
    (stack,) = stacks
    size = math.prod(array.shape[stack:])
    by_window: dict[Any, list[NotedUse]] = {}
    for use in uses:
        by_window.setdefault(use.weight.window, []).append(use)
    leaves = [of_window[0].weight for of_window in by_window.values()]
    if sum(map(size_of, leaves)) != size or not _are_apart([w.window for w in leaves]):
        return []
    parts = [_part(number, stack, of_window) for of_window in by_window.values()]
    return [] if None in parts else parts  # pyright: ignore


def _part(number: int, stack: int, uses: list[NotedUse]) -> Part | None:
    """The part that all these uses of one window are uses of; `None` if there is none."""
    # The tag has the form of one of the uses: of a lookup if there is any, so that the
    # factor for the rows to look up, which may be very many, is diagonal.
    lookups = [use for use in uses if isinstance(use.form, Lookup)]
    owner = (lookups or uses)[0]
    owner_key, tied = matrix_key(owner.form, owner.weight), False
    for use in uses:
        key = matrix_key(use.form, use.weight)
        if key != owner_key:
            # A kernel of a convolution is not one matrix that could be transposed.
            if isinstance(use.form, Convolution) or transposed_key(key) != owner_key:
                return None
            tied = True
    masks = {use.mask for use in uses}
    if len(masks) > 1 or (tied and owner.mask is not None):
        return None  # Each use has a gradient in other entries.
    biases = {(use.bias, use.bias_leaf) for use in uses}
    bias, leaf = biases.pop() if len(biases) == 1 and not tied else (None, None)
    matrix = number, owner.form, owner.weight, stack, tied
    return Part(*matrix, bias, leaf, owner.mask)


def _has_fitting_block(array: RawArray, part: Part, choose: Choose) -> bool:
    """Whether the chosen block, if any, can add statistics of the transpose to its own,
    which only Kronecker blocks can; unless nobody uses the transpose of the part."""
    block = choose(array, part, _name(array, part))
    return not part.tied or block is None or isinstance(block, Kronecker)


def _is_bias(
    bias: int, parts: list[Part], arrays: Sequence[RawArray], notes: Notes
) -> bool:
    """Whether the array with the number `bias` is the bias of these parts and nothing
    else, each of its entries is the bias of one output, and all arrays are in the same
    module."""
    if bias in notes.other_uses or bias in notes.uses:
        return False
    numbers = {part.number for part in parts}
    used_by = {n for n, uses in notes.uses.items() if any(u.bias == bias for u in uses)}
    modules = {arrays[n].module for n in (*numbers, bias)}
    stacks = {part.stack for part in parts}
    if used_by != numbers or len(modules) > 1 or len(stacks) > 1:
        return False
    leaves = [part.bias_leaf for part in parts if part.bias_leaf is not None]
    size = math.prod(arrays[bias].shape[stacks.pop() :])
    windows = [leaf.window for leaf in leaves]
    return sum(map(size_of, leaves)) == size and _are_apart(windows)


def _are_apart(windows: Sequence[Any]) -> bool:
    """Whether no two windows of an array, each with `(start, stop)` for every axis, have
    an entry in common."""

    def overlap(a, b):
        return all(max(s, t) < min(e, f) for (s, e), (t, f) in zip(a, b, strict=True))

    return not any(overlap(a, b) for a, b in itertools.combinations(windows, 2))


def tags_for(
    arrays: Sequence[RawArray], notes: Notes, choose: Choose
) -> dict[str, dict[str, Tag]]:
    """The tags of all modules, by the path of the module and the name of the tag."""
    notes.finish()
    plan: dict[str, dict[str, Tag]] = {}
    covered: set[int] = set()
    for part in parts_of(arrays, notes, choose):
        array = arrays[part.number]
        block = choose(array, part, _name(array, part))
        if isinstance(block, Kronecker) and part.tied:
            block = dataclasses.replace(block, tied=True)
        if block is not None:
            tags = plan.setdefault(array.module, {})
            tags[_name(array, part)] = Tag(_form(part, arrays), block)
        # If there is no block, the user wants the array untagged, also at its value.
        covered |= {part.number} if part.bias is None else {part.number, part.bias}
    for number, array in enumerate(arrays):
        if number in covered:
            continue
        stack = _stack(notes, number)
        name = _name_at_values(array, stack, arrays)
        block = choose(array, None, name)
        if block is not None:
            tags = plan.setdefault(array.module, {})
            _add_to_value_tag(tags, name, array, stack, block)
    return plan


def _form(part: Part, arrays: Sequence[RawArray]) -> View:
    """The form of the tag of a part."""
    weight = dataclasses.replace(part.weight, name=arrays[part.number].name)
    form = part.form if part.mask is None else Masked(part.form, part.mask.entries)
    if part.bias is None or part.bias_leaf is None:
        return View(form, weight)
    bias = dataclasses.replace(part.bias_leaf, name=arrays[part.bias].name)
    return View(form, weight, bias)


def _name(array: RawArray, part: Part) -> str:
    """The name of the tag of a part: the name of the array, with the window in brackets
    unless the part is the whole array."""
    shape = array.shape[part.stack :]
    ranges = [
        ":" if (start, stop) == (0, n) else f"{start}:{stop}"
        for n, (start, stop) in zip(shape, part.weight.window, strict=True)
    ]
    whole = all(r == ":" for r in ranges)
    return array.name if whole else f"{array.name}[{', '.join(ranges)}]"


def _name_at_values(array: RawArray, stack: int, arrays: Sequence[RawArray]) -> str:
    """The name of the tag at the values of the other arrays of a module, which no array
    of the module has."""
    names = {other.name for other in arrays if other.module == array.module}
    name = "others" if "others" not in names else "other arrays"
    return name if stack == 0 else f"{name}, stacked {stack}"


def _stack(notes: Notes, number: int) -> int:
    """Along how many leading axes of an array loops go. If its uses differ in that, the
    array is no stack: there are none."""
    stacks = {use.stack for use in notes.uses.get(number, ())}
    stacks |= notes.other_uses.get(number, set())
    return stacks.pop() if len(stacks) == 1 else 0


def _add_to_value_tag(
    tags: dict[str, Tag], name: str, array: RawArray, stack: int, block: AbstractBlock
) -> None:
    """Adds an array to the tag `name` of its module, which is at the values of arrays. A
    tag has one block: if the array is to have another one, it gets a tag of its own."""
    if name in tags and tags[name].block != block:
        name = array.name
    ranks = {}
    if name in tags:
        form: Any = tags[name].form
        ranks = dict(zip(form.leaves, form.ranks, strict=True))
    ranks[array.name] = len(array.shape) - stack
    tags[name] = Tag(Parameters(**ranks), block)
