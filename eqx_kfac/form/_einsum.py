import math
from typing import Any

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Inexact, Shaped

from .._custom_types import Layer
from ._base import AbstractForm, Sizes
from ._dense import join, split
from ._inputs import Vectors


class Einsum(AbstractForm):
    r"""`z = einsum("weight,x->z", weight, x) + bias`, for layers whose weight has more
    than two axes. The meaning of an axis depends on where its letter is:

    - in all three: separate layers side by side, such as blocks or depthwise channels;
    - in the weight and $x$: inputs;
    - in the weight and $z$: outputs;
    - in $x$ and $z$: positions that share the weight.

    !!! Example

        `Einsum("hdi,i->hd")` projects onto heads, `Einsum("boi,bi->bo")` is
        block-diagonal, `Einsum("oi,ti->to")` acts on a whole sequence.
    """

    linear = True
    subscripts: str = eqx.field(static=True)
    weight: str = eqx.field(static=True)
    bias: str | None = eqx.field(static=True)

    def __init__(
        self, subscripts: str, weight: str = "weight", bias: str | None = "bias"
    ):
        """**Arguments:**

        - `subscripts`: as in `jnp.einsum`, without an ellipsis or spaces.
        - `weight`: the name of the layer's weight.
        - `bias`: the name of the layer's bias. It has the axes of $z$ that the weight
            has, in the order of $z$. `None`: there is none.

        **Raises:** `ValueError` if a letter is in one place only, or twice in one place.
        """
        operands, _, z = subscripts.partition("->")
        w, _, x = operands.partition(",")
        counts = {a: (a in w) + (a in x) + (a in z) for a in {*w, *x, *z}}
        repeated = any(len(set(part)) < len(part) for part in (w, x, z))
        letters = all(part == "" or part.isalpha() for part in (w, x, z))
        if (
            "->" not in subscripts
            or "," not in operands
            or repeated
            or not letters
            or not w
        ):
            raise ValueError(
                f"`{subscripts}` is not of the form 'weight,x->z' with every letter at "
                "most once in each of the three."
            )
        if any(count < 2 for count in counts.values()):
            alone = sorted(a for a, count in counts.items() if count < 2)
            raise ValueError(
                f"In `{subscripts}`, {alone} are in one place only. Sum over them, or "
                "broadcast them, outside of the layer."
            )
        self.subscripts = subscripts
        self.weight = weight
        self.bias = bias

    @property
    def names(self) -> tuple[str, ...]:
        return (self.weight,) if self.bias is None else (self.weight, self.bias)

    @property
    def groups(self) -> int:
        return int(self._letters["groups"] != "")

    def sizes(self, layer: Layer) -> Sizes:
        weight, bias = self._pair(layer)
        letters = self._letters
        known = letters["w"] if weight is not None else letters["b"]
        leaf = bias if weight is None else weight
        stack = leaf.shape[: leaf.ndim - len(known)]
        size = dict(zip(known, leaf.shape[leaf.ndim - len(known) :], strict=True))

        def product(names):
            return math.prod(size[a] for a in names)

        own = (product(letters["groups"]),) if letters["groups"] else ()
        d_in = 0 if weight is None else product(letters["in"])
        d_out = product(letters["out"])
        return Sizes(stack + own, d_out, d_in, bias is not None)

    def inputs(self, x: Shaped[Array, "..."], stack: int, axes: int) -> Vectors:
        letters = self._letters
        return Vectors(self._rows(x, letters["x"], letters["in"], stack, axes))

    def outputs(
        self, z: Inexact[Array, "..."], stack: int, axes: int
    ) -> Inexact[Array, "*rows d_out"]:
        letters = self._letters
        return self._rows(z, letters["z"], letters["out"], stack, axes)

    def to_matrix(self, layer: Layer) -> Inexact[Array, "*stack d_out d_in"]:
        letters, sizes = self._letters, self.sizes(layer)
        weight, bias = self._pair(layer)
        shape = (*sizes.stack, sizes.d_out)
        if weight is not None:
            weight = _reorder(weight, letters["w"], letters["canonical"])
            weight = weight.reshape(*shape, sizes.d_in)
        if bias is not None:
            bias = _reorder(bias, letters["b"], letters["groups"] + letters["out"])
            bias = bias.reshape(*shape, 1)
        return join(weight, bias)

    def from_matrix(
        self, matrix: Inexact[Array, "*stack d_out d_in"], layer: Layer
    ) -> Any:
        letters = self._letters
        weight, bias = self._pair(layer)
        rows = letters["groups"] + letters["out"]
        like = (
            None
            if weight is None
            else _reorder(weight, letters["w"], letters["canonical"]),
            None if bias is None else _reorder(bias, letters["b"], rows),
        )
        weight, bias = split(matrix, *like)
        if weight is not None:
            weight = _reorder(weight, letters["canonical"], letters["w"])
        if bias is not None:
            bias = _reorder(bias, rows, letters["b"])
        return self.replace(layer, (weight, bias))

    def _pair(self, layer: Layer) -> tuple[Any, Any]:
        return (*self.parameters(layer), None)[:2]  # pyright: ignore

    @property
    def _letters(self) -> dict[str, str]:
        operands, _, z = self.subscripts.partition("->")
        w, _, x = operands.partition(",")

        def those(where, *others):
            return "".join(a for a in where if all(a in o for o in others))

        groups = those(w, x, z)
        d_in = "".join(a for a in those(w, x) if a not in z)
        d_out = "".join(a for a in those(w, z) if a not in x)
        return {
            **dict(w=w, x=x, z=z, b=those(z, w), groups=groups, out=d_out),
            "in": d_in,
            "shared": "".join(a for a in those(x, z) if a not in w),
            "canonical": groups + d_out + d_in,
        }

    def _rows(self, x: Array, names: str, features: str, stack: int, axes: int) -> Array:
        """`x` with groups behind its stacked layers, and features as one last axis."""
        letters = self._letters
        shared, groups = letters["shared"], letters["groups"]
        x = _reorder(x, names, groups + shared + features)
        size = dict(zip(groups + shared + features, x.shape[axes:], strict=True))
        own = (math.prod(size[a] for a in groups),) if groups else ()
        positions = [size[a] for a in shared]
        flat = math.prod(size[a] for a in features)
        x = x.reshape(*x.shape[:axes], *own, *positions, flat)
        return jnp.moveaxis(x, axes, stack) if groups else x


def _reorder(x: Array, names: str, wanted: str) -> Array:
    """The last axes of `x`, called `names`, in another order."""
    lead = x.ndim - len(names)
    return x.transpose(*range(lead), *(lead + names.index(a) for a in wanted))
