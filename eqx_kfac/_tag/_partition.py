"""The parameters of a model that tags cover, and the others."""

import equinox as eqx
import jax.numpy as jnp
import jax.tree_util as jtu

from .._custom_types import Model
from .._misc import names, parameters_of
from ._tagged import check_tagged, update_layers


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


def check_covered(model: Model, fallback: object) -> None:
    """Raises if there are parameters that neither a tag nor a fallback looks after."""
    check_tagged(model)
    _, rest = partition_tagged(model)
    leaves, _ = jtu.tree_flatten_with_path(rest)
    if not leaves or fallback is not None:
        return
    is_complex = [jnp.iscomplexobj(leaf) for _, leaf in leaves]
    paths = [jtu.keystr(path) for path, _ in leaves]
    numbers = [path for path, c in zip(paths, is_complex, strict=True) if c]
    if numbers:
        raise ValueError(
            f"The parameters {names(numbers)} are complex numbers, of which no curvature "
            "is collected. Keep their real and imaginary parts in two arrays; or freeze "
            "them (`eqx.partition` them out of the model that is trained); or pass "
            "`fallback=` with any optax transformation for them, such as "
            "`fallback=optax.adam(1e-3)`."
        )
    raise ValueError(
        f"No tagged layer covers the parameters {names(paths)}. Either convert the model "
        "with what one call of it gets (`kfac.convert(model, example=x[0])`), or write "
        "their layers with `kfac.Linear` and the like (a raw array as a "
        "`kfac.Parameter`), or freeze them (`eqx.partition` them out of the model that "
        "is trained), or pass `fallback=` with any optax transformation for them, such "
        "as `fallback=optax.adam(1e-3)`. Constants, and arrays in a "
        "`jax.lax.stop_gradient`, stay as they are with `fallback=optax.set_to_zero()`."
    )
