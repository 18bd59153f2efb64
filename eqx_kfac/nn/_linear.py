from typing import Any

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Shaped

from ._base import TaggedOutputs
from ._inputs import check_floating, check_input


class Linear(TaggedOutputs, eqx.nn.Linear):
    """A drop-in for `equinox.nn.Linear` from which curvature can be collected. Same
    constructor, same leaves, same outputs; `isinstance(layer, eqx.nn.Linear)` holds."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)

    def __call__(
        self, x: Shaped[Array, "..."], *, key: Any = None
    ) -> Shaped[Array, "..."]:
        """**Arguments:**

        - `x`: a single input, of shape `(in_features,)`, or `()` if
            `in_features="scalar"`. Use `jax.vmap` for a batch.
        - `key`: ignored.

        **Returns:**

        An array of shape `(out_features,)`, or `()` if `out_features="scalar"`.

        **Raises:** `ValueError` for an input of another shape; while curvature is being
        collected, for an integer input.
        """
        if not self.tag.collecting:
            return super().__call__(x, key=key)
        check_input(self, x)
        check_floating(self, x)
        return self.tag(self.tag.covered(self)._forward(x), x)

    def _forward(self, x: Shaped[Array, "..."]) -> Shaped[Array, "..."]:
        """What the parent computes, as $x W^T$ instead of $W x$: under `vmap`, examples
        then come first in derivatives, too, and XLA has nothing to transpose. (Nor does a
        scan over layers keep a transposed copy of each weight for its derivative.)"""
        y = jnp.tensordot(jnp.atleast_1d(x), self.weight, axes=(0, 1))
        y = y if self.bias is None else y + self.bias
        return jnp.squeeze(y) if self.out_features == "scalar" else y
