"""A loss function, run at a model."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jaxtyping import Array

from .._custom_types import Args, Kwargs, Model
from .._loss import AbstractLoss, AbstractObjective, Sum
from .._misc import accumulator, common_prefix
from .._tag import naming_layers, TaggedLayer


def run(loss_fn: Callable, model: Model, args: Args, kwargs: Kwargs) -> tuple[Sum, Any]:
    """The objective that `loss_fn` returns, and its aux."""
    with naming_layers(model):
        # Copies: an `eqx.nn.State` may be used once only.
        args, kwargs = jtu.tree_map(lambda x: x, (tuple(args), kwargs))
        _check_key(loss_fn, model, *args, **kwargs)
        out = loss_fn(model, *args, **kwargs)
    objective, aux = out if isinstance(out, tuple) and len(out) == 2 else (out, None)
    return _check_objective(objective), aux


def _check_key(loss_fn: Callable, *args: Any, **kwargs: Any) -> None:
    """Raises if the loss function waits for a `key`, because one was passed that is the
    randomness of the estimate."""
    try:
        signature = inspect.signature(loss_fn)
        given = signature.bind_partial(*args, **kwargs).arguments
    except (TypeError, ValueError):  # It has no signature, or another one.
        return
    key = signature.parameters.get("key")
    if key is not None and key.default is key.empty and key.name not in given:
        raise TypeError(
            "The loss function has a parameter `key`, which it does not get: what is "
            "passed as `key=` is the randomness of the curvature estimate. Give the "
            "parameter another name, and pass a key of its own: `loss_fn(model, x, y, "
            "noise)`, `optimizer.step(loss_fn, model, state, x, y, noise, key=key)`."
        )


def example_weights(
    losses: list[AbstractLoss], layers: Sequence[TaggedLayer]
) -> Array | None:
    """The weights of examples for the input moments of the layers, on the first axes that
    all weights of the losses have in common; `None` if no layer asks for them. A layer
    cannot tell which loss it serves: of several losses over the same examples, the mean
    of the weights is taken."""
    if not any(tag.block.weighted for _, tag, _ in layers):
        return None
    shapes = [loss.weights.shape for loss in losses if loss.weights is not None]
    if not shapes:
        return None
    shared = common_prefix(*shapes)
    if not shared:
        raise ValueError(
            "Several losses of a sum have weights, over different examples: the weights "
            f"have shapes {shapes}. Only one batch of examples can be weighted; give the "
            "weights of the others as fewer examples, or as a coefficient; or give all "
            "layers blocks whose inputs have no weights, such as `kfac.Kronecker("
            "weighted=False)` or `kfac.Kronecker(kfac.TensorNormal())`."
        )
    axes = len(shared)
    means = [
        jnp.mean(loss.term_weights, axis=tuple(range(axes, len(loss.leading))))
        for loss in losses
        if loss.leading[:axes] == shared
    ]
    dtype = accumulator(*[w.dtype for w in means])
    return jnp.mean(jnp.stack([w.astype(dtype) for w in means]), axis=0)


def _check_objective(objective: object) -> Sum:
    if not isinstance(objective, AbstractObjective):
        got, density = type(objective).__name__, ""
        if isinstance(objective, jax.Array):
            got = f"an array of type {objective.dtype} and shape {objective.shape}"
            density = (
                " If it is made of log-densities, such as `-jnp.mean(log_probs)`, return "
                "`kfac.NegativeLogLikelihood(log_probs)`, given those of all examples."
            )
        raise TypeError(
            "`loss_fn` must return a loss that knows its predictive distribution, such "
            "as `kfac.SoftmaxCrossEntropy(logits, targets)`, `kfac.SigmoidCrossEntropy` "
            "or `kfac.SquaredError` (or `(loss, aux)`), but returned "
            f"{got}. A bare number has no curvature to collect; add penalties to the "
            f"loss object instead: `loss + penalty`.{density}"
        )
    objective = objective + 0
    if not objective.losses:
        raise ValueError(
            "`loss_fn` returned only penalties, which have no curvature to collect. Add "
            "them to a loss such as `kfac.SoftmaxCrossEntropy`."
        )
    return objective
