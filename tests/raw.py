"""Models written with arrays of their own, and their curvature without the library."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax.flatten_util import ravel_pytree

import eqx_kfac as kfac

from .helpers import close, filled, leaves


def module(call: Callable, **shapes: Any) -> Any:
    """A module with arrays of these shapes (or trees of shapes, or what functions make)
    as its fields, which is called as `call(module, *args)`: random numbers are in it."""
    is_shape = lambda s: type(s) is tuple and all(type(n) is int for n in s)
    new = lambda s: jnp.zeros(s) if is_shape(s) else s() if callable(s) else s

    def called(self, *args):
        with jax.numpy_rank_promotion("allow"):  # As most people have it.
            return call(self, *args)

    def make():
        fields = jtu.tree_map(new, shapes, is_leaf=is_shape)
        namespace = {"__annotations__": dict.fromkeys(shapes, Any), "__call__": called}
        return type(eqx.Module)("Raw", (eqx.Module,), namespace)(**fields)

    return filled(make)


def case(call, x, want, *shared, **shapes):
    """What is called, of which examples; what is tagged, and which arrays are used more
    than once; and the shapes of all."""
    path = lambda name: f"['{name}']" if "['" not in name else f".{name}']"
    return call, x, {path(k): v for k, v in want.items()}, list(map(path, shared)), shapes


def squared(model, x):
    """Half the sum of squares of all outputs, so that their Fisher is the identity."""
    out = jax.vmap(model)(x)
    out = out.reshape(len(out), -1)
    return kfac.SquaredError(out, jnp.zeros_like(out))


class Seen(NamedTuple):
    """What the library and JAX say of one model."""

    outputs: Any  # Of the model, converted and not.
    ours: Any  # Value and gradient, while curvature is collected,
    theirs: Any  # and without tags.
    jacobian: Any  # [examples, outputs, parameters]
    blocks: tuple  # Of every layer: of all examples with the one model,
    of_one: tuple  # of the first one with the other. And which parameters are where.
    back: Any  # All arrays, and those that have been matrices in between.


@eqx.filter_jit
def seen(model: Any, full: Any, kron: Any, x: Any, loss_fn: Callable) -> Seen:
    params, static = eqx.partition(model, eqx.is_inexact_array)
    flat, unravel = ravel_pytree(params)
    run = lambda flat, x: jnp.ravel(eqx.combine(unravel(flat), static)(x))
    estimate = kfac.value_grad_and_curvature(loss_fn, kfac.Exact())
    value, grads, blocks = estimate(full, x)
    _, _, of_one = estimate(kron, x[:1])
    plain = lambda params: loss_fn(eqx.combine(params, static), x).value
    plain_value, plain_grads = jax.value_and_grad(plain)(params)
    numbers = jtu.tree_leaves(unravel(jnp.arange(flat.size, dtype=flat.dtype)))
    matrix = lambda tag, layer: tag.form.to_matrix(layer)
    each = lambda fn, *models: [own for _, own in kfac._tag.flatten_tags(fn, *models)[0]]

    def with_places(model, factors):
        places = each(matrix, with_arrays(model, numbers))
        return each(lambda tag, layer, own: own, model, factors), places

    def there_and_back(model):
        matrices = kfac._tag.map_tags(matrix, with_arrays(model, numbers))
        zeros = with_arrays(model, [0 * a for a in numbers])
        back = lambda tag, layer, new, own: tag.form.from_matrix(own, new)
        return leaves(kfac._tag.update_layers(back, zeros, matrices))

    return Seen(
        outputs=[jax.vmap(m)(x) for m in (model, full, kron)],
        ours=(value, leaves(grads)),
        theirs=(plain_value, leaves(plain_grads)),
        jacobian=jax.vmap(lambda x: jax.jacobian(run)(flat, x))(x),
        blocks=with_places(full, blocks),
        of_one=with_places(kron, of_one),
        back=(numbers, there_and_back(kron)),
    )


def with_arrays(model: Any, new: list) -> Any:
    """The model, with other numbers in its arrays."""
    arrays, treedef = jtu.tree_flatten(model)
    new = iter(new)
    return treedef.unflatten(
        [next(new) if eqx.is_inexact_array(a) else a for a in arrays]
    )


def shown(model: Any) -> dict[str, str]:
    """All tags of a model, as `form[stack] outputs x inputs`; `+1` for a bias."""
    lines = {}
    layers = zip(kfac._tag.trained_layers(model), kfac.summary(model).layers, strict=True)
    for (path, tag, _), line in layers:
        form = getattr(tag.form, "form", tag.form)
        kind = form.label if tag.form.mask else type(form).__name__
        stack = "".join(f"[{n}]" for n in line.stack)
        sizes = f"{line.d_out}x{line.d_in}" if line.d_in else f"{line.d_out}"
        bias = "+1" if line.bias and line.d_in else ""
        tied = ", tied" if getattr(tag.block, "tied", False) else ""
        lines[path] = f"{kind}{stack} {sizes}{bias}{tied}"
    return lines


def check(
    model: Any,
    x: Any,
    want: dict[str, str],
    shared: Sequence[str] = (),
    loss_fn: Callable = squared,
    **options: Any,
) -> None:
    """What holds of any converted model: it computes the same; all of its arrays have
    tags, `want` of them; every `Full` and `Diagonal` block is the dense one; and so is
    every Kronecker block of one example that uses its array once: all but those
    `shared`."""
    options = {"example": x[0], **options}
    kron = kfac.convert(model, **options)
    full = kfac.convert(model, kfac.Full(), **options)
    assert isinstance(kron, type(model))
    assert shown(kron) == want and kfac.summary(kron).untagged == {}
    assert all(a is b for a, b in zip(leaves(kron), leaves(model), strict=True))
    found = seen(model, full, kron, x, loss_fn)
    for outputs in found.outputs[1:]:
        np.testing.assert_array_equal(outputs, found.outputs[0])
    ours, theirs = map(jtu.tree_leaves, (found.ours, found.theirs))
    for a, b in zip(ours, theirs, strict=True):
        close(a, b)
    for a, b in zip(*found.back, strict=True):
        np.testing.assert_array_equal(a, b)

    jacobian = np.asarray(found.jacobian)
    for number, blocks, exact_for in (
        (len(x), found.blocks, full),
        (1, found.of_one, kron),
    ):
        rows = jacobian[:number].reshape(-1, jacobian.shape[-1])
        dense = rows.T @ rows / number
        layers = kfac._tag.trained_layers(exact_for)
        for (path, tag, _), factors, places in zip(layers, *blocks, strict=True):
            mask = tag.form.mask and tag.form.mask.entries
            check_blocks(path, factors, places, dense, path in shared, mask)
        everywhere = np.sort(np.concatenate([np.ravel(places) for places in blocks[1]]))
        np.testing.assert_array_equal(everywhere, np.arange(len(dense)))


def check_blocks(
    path: str, factors: Any, places: Any, dense: Any, shared: bool, mask: Any = None
) -> None:
    """Of a layer, or of all in a stack: the dense block (what a `mask` leaves of it); or,
    if it is `shared`, another one."""
    places = np.asarray(places).astype(int)
    wrong = []
    for index in np.ndindex(places.shape[:-2]):
        own, used = places[index].ravel(), np.ones(places.shape[-2:], bool)
        if mask is not None:  # A bias is behind it.
            used[:, : mask.shape[1]] = mask
        block = jtu.tree_map(lambda a, i=index: np.asarray(a)[i], factors)
        error, size = block_error(block, dense[np.ix_(own, own)], used.ravel())
        wrong.append(error / size if size > 0 else error)
    is_kron = hasattr(factors, "output_factor")
    if shared and is_kron:
        assert max(wrong) > 1e-3, f"{path} is exact"
    else:
        assert max(wrong) <= 1e-10, f"{path} is wrong by {wrong}"


def block_error(block: Any, exact: Any, used: Any) -> tuple[float, float]:
    """How far a block, where entries are `used`, is from the exact one; and the size of
    that."""
    norm = np.linalg.norm
    if hasattr(block, "diagonal"):
        diagonal = np.diag(exact)
        return norm(used * block.diagonal.ravel() - diagonal), norm(diagonal)
    if hasattr(block, "matrix"):
        whole = block.matrix
    else:
        both = block.output_factor, block.input_factor
        whole = np.kron(*(f if f.ndim == 2 else np.diag(f) for f in both))
    return norm(whole * used * used[:, None] - exact), norm(exact)
