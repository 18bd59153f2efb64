"""Which weight of a loss belongs to which row of a layer's inputs."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from .._custom_types import Weights
from .._devices import varying_axes
from .._misc import accumulator, common_prefix


def row_weights(weights: Weights, x: Array, stack: int, axes: int) -> Array | None:
    """Example weights on the axes of this layer that they speak of: the longest run of
    example axes, from the outermost, whose lengths agree. Over the weights' further axes
    (tokens, when the layer acts on whole sequences) the mean is taken."""
    if weights is None:
        return None
    members, examples = x.shape[:stack], x.shape[stack:axes]
    given = weights.shape[stack:]

    def matching(lengths):
        return len(common_prefix(examples, lengths))

    weights = _local(weights, x, stack, axes)
    readings = [weights] if matching(weights.shape[stack:]) > 0 else []
    for start in range(len(given) - stack + 1 if stack else 0):
        # The weights may have an axis for the members of an ensemble, like the outputs.
        rest = given[:start] + given[start + stack :]
        if given[start : start + stack] == members and start <= matching(rest) > 0:
            own = weights
            for i in range(stack):
                own = jnp.diagonal(own, axis1=i, axis2=stack + start)
                own = jnp.moveaxis(own, -1, i)
            readings.append(own)
    if len(readings) != 1:
        raise ValueError(_message(members, examples, given, len(readings)))
    (weights,) = readings
    extra = range(stack + matching(weights.shape[stack:]), weights.ndim)
    return jnp.mean(weights, axis=tuple(extra))


def with_influence(
    weights: Float[Array, "..."], g: Array, stack: int
) -> Float[Array, "..."]:
    r"""The weights of rows, given the gradients `g` at them. A row whose own loss term
    has no weight still matters if it influences others, through attention or along the
    edges of a graph: then it has a gradient, and counts by the size of that,

    $$w_s = \min\left(\bar w, \; \lVert g_s \rVert^2
    \frac{\sum_t w_t}{\sum_t \lVert g_t \rVert^2}\right)$$

    with sums over the rows $t$ of the same example that have weights, and $\bar w$ the
    mean of these. Weights on one axis alone belong to one example, a graph; or nothing
    mixes, and there is no such row.
    """
    dtype = accumulator(weights.dtype, g.dtype)
    w = weights.astype(dtype)
    behind = tuple(range(w.ndim, g.ndim))
    sizes = jnp.sum(jnp.abs(g).astype(dtype) ** 2, axis=behind)
    # Within an example, so that the result does not depend on the rest of the batch.
    within = tuple(range(stack + (w.ndim > stack + 1), w.ndim))
    labelled = w != 0
    number = jnp.sum(labelled, axis=within, keepdims=True, dtype=dtype)
    total = jnp.sum(w, axis=within, keepdims=True)
    size = jnp.sum(sizes, axis=within, keepdims=True, where=labelled)
    mean = total / jnp.maximum(number, 1)
    # If none of these has a gradient, all others are larger. (Infinity times zero would
    # look like a mistake to `jax_debug_nans`.)
    most = jnp.finfo(dtype).max
    relative = jnp.where(size == 0, most, total / jnp.where(size == 0, 1, size))
    return jnp.where(labelled, w, jnp.minimum(mean, sizes * relative))


def _message(members: tuple, examples: tuple, given: tuple, readings: int) -> str:
    where = f"a layer acts on examples with axes of lengths {examples}"
    if members:
        where += f", as one of {members} layers in parallel"
    found = "do not say" if readings == 0 else "leave open"
    return (
        f"The loss has weights of shape {given}, which {found} how the inputs of every "
        f"layer are weighted: {where}. The batch should be the outermost `vmap` around "
        "the model, and the first axis of the weights (of an ensemble: members first, "
        "batch second). For a layer whose inputs are not examples at all, such as "
        "constants, use the block `kfac.Kronecker(weighted=False)`."
    )


def _local(weights: Array, x: Array, stack: int, axes: int) -> Array:
    """Within a `shard_map` inside the loss function, a device sees its own examples but
    the weights of all: its part of them."""
    split = varying_axes(x) - varying_axes(weights)
    if not split or axes == stack:
        return weights
    number = x.shape[stack]
    if len(split) > 1 or number * jax.lax.axis_size(*split) != weights.shape[stack]:
        raise ValueError(
            "Cannot tell which example weights belong to which device: a layer inside "
            f"`shard_map` sees {number} examples, varying over the mesh axes "
            f"{sorted(map(str, split))}, and the loss has {weights.shape[stack]} "
            "weights. Put the whole loss function inside the `shard_map`, where every "
            "device has its own weights."
        )
    start = jax.lax.axis_index(*split) * number
    return jax.lax.dynamic_slice_in_dim(weights, start, number, axis=stack)
