"""The parameters of a model that tags cover, and the others."""

import equinox as eqx
import jax.tree_util as jtu

from .._custom_types import Model
from .._misc import parameters_of
from ._tagged import update_layers


def partition_tagged(model: Model) -> tuple[Model, Model]:
    """Splits a model (or gradients of it) into the parameters that tags cover and the
    others. `eqx.combine` joins them again."""

    covered = object()

    def mark(tag, layer, new):
        parameters = tag.form.parameters(layer)
        marks = tuple(None if p is None else covered for p in parameters)
        return tag.form.replace(new, marks)

    mask = jtu.tree_map(lambda leaf: leaf is covered, update_layers(mark, model))
    tagged, rest = eqx.partition(model, mask)
    return tagged, parameters_of(rest)
