from typing import Any

import jax.numpy as jnp
import jax.tree_util as jtu
from jaxtyping import Array, Float, PyTree

from .._checks import AT_LEAST_0, check_number
from .._custom_types import Model
from .._inner_products import tree_dot
from .._misc import masked
from .._tag import empty_tags
from ._base import AbstractObjective


class L2(AbstractObjective):
    r"""$\frac{c}{2} \sum \theta^2$ over the parameters of a model (or of a part of
    it). Unlike any other penalty, its curvature $c I$ counts too.

    **Fields:**

    - `parameters`: the parameters that are regularised, shaped like the model.
    """

    parameters: PyTree[Array]
    coefficient: Any

    def __init__(self, model: Model, coefficient: Any, mask: Any = None):
        """**Arguments:**

        - `model`: any PyTree of parameters. Pass a part of the model to regularise only
            that part.
        - `coefficient`: $c \\ge 0$, a scalar.
        - `mask`: which leaves are regularised, a filter as in `eqx.filter`: a function of
            a leaf (`lambda p: p.ndim > 1`) or a tree of booleans.

        **Raises:** `ValueError` for a negative coefficient, `TypeError` for one that is
        not a number.
        """
        coefficient = check_number("coefficient", coefficient, AT_LEAST_0)
        self.parameters = masked(empty_tags(model), mask)
        self.coefficient = coefficient

    @property
    def value(self) -> Float[Array, ""]:
        return 0.5 * self.coefficient * tree_dot(self.parameters, self.parameters)

    def diagonal(self, scale: Any = 1.0) -> PyTree[Array]:
        """The diagonal of its curvature at `parameters`, times `scale`."""
        curvature = scale * self.coefficient
        return jtu.tree_map(lambda p: jnp.full_like(p, curvature), self.parameters)
