"""The loss, its gradient, and its curvature, without an optimizer."""

from collections.abc import Callable

from .._fisher import AbstractFisher, check_fisher, MonteCarlo
from ._batch import Batch


def value_grad_and_curvature(
    loss_fn: Callable, fisher: AbstractFisher = MonteCarlo(), has_aux: bool = False
) -> Callable:
    r"""The loss, its gradient and its curvature, from one forward pass.

    **Arguments:**

    - `loss_fn`: called as `loss_fn(model, *args, **kwargs)`; returns a loss (such as
        `kfac.SoftmaxCrossEntropy`) or a sum of losses and scalars, or `(loss, aux)`.
    - `fisher`: which Fisher estimate; see [`eqx_kfac.MonteCarlo`][].
    - `has_aux`: whether `loss_fn` returns `(loss, aux)`.

    **Returns:**

    A function `(model, *args, key=None, **kwargs) -> (value, grads, curvature)`, or
    `((value, aux), grads, curvature)`. `grads` is shaped like the model. So is
    `curvature`, with every tagged layer replaced by its factors (see
    [`eqx_kfac.curvature`][]). `key` is for the Fisher estimate; it is not passed to
    `loss_fn`.

    **Raises:** `TypeError` if `loss_fn` returns something other than a loss, or if
    `fisher` is none of the estimates; `ValueError` if it needs a `key` and gets none.

    !!! Example

        ```python
        value_and_all = kfac.value_grad_and_curvature(loss_fn)
        loss, grads, curvature = value_and_all(model, x, y, key=key)
        ```
    """

    check_fisher(fisher)

    def wrapped(model, *args, key=None, **kwargs):
        batch = Batch(loss_fn, args, kwargs).linearise(model)
        found = batch.value_and_grads()
        value = (found.value, found.aux) if has_aux else found.value
        return value, found.grads, batch.curvature(fisher, key)

    return wrapped


def curvature(loss_fn: Callable, fisher: AbstractFisher = MonteCarlo()) -> Callable:
    r"""The curvature of a loss, layer by layer, without an optimizer.

    **Arguments:**

    - `loss_fn`: called as `loss_fn(model, *args, **kwargs)`; returns a loss, a sum of
        losses, or `(loss, aux)`. Targets may be left out of the loss.
    - `fisher`: which Fisher estimate; see [`eqx_kfac.MonteCarlo`][].

    **Returns:**

    A function `(model, *args, key=None, **kwargs) -> curvature`. `curvature` is shaped
    like the model, with every tagged layer replaced by its factors and every other leaf
    by `None`: for a [`eqx_kfac.Kronecker`][] block, `.input_factor`
    `[*stack, d_in(+1), d_in(+1)]` and `.output_factor` `[*stack, d_out, d_out]`, whose
    Kronecker product $G \otimes A$ approximates the curvature of the *mean* loss.

    **Raises:** as [`eqx_kfac.value_grad_and_curvature`][].

    !!! Example

        ```python
        factors = kfac.curvature(loss_fn, fisher=kfac.Exact())(model, x, y)
        factors.layers[0].input_factor
        ```
    """

    check_fisher(fisher)

    def wrapped(model, *args, key=None, **kwargs):
        batch = Batch(loss_fn, args, kwargs).first(fisher.examples)
        return batch.linearise(model).curvature(fisher, key)

    return wrapped
