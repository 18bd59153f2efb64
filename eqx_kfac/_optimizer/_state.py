"""What the optimizers remember from step to step, and what they tell about each."""

import dataclasses
from typing import Any, NamedTuple, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jaxtyping import Array, Bool, Float, Int, PyTree, Shaped

from .._custom_types import Model, Numeric
from .._devices import zeros_split_as
from .._jax import Tracer
from .._misc import accumulator, by_path, names
from ._extent import Extent
from ._hyperparameters import Hyperparameters
from ._rollback import Rollback
from ._said import shown, state_said
from ._schedule_free import Ahead, ScheduleFree


_Model = TypeVar("_Model")


# In the order of `Faults.each`. The last two do not reject a step.
_FAULTS = (
    "hyperparameters",
    "loss",
    "gradient",
    "weights",
    "curvature",
    "unseen",
    "update",
    "increase",
    "divergence",
    "factorisation",
    "waiting",
)


def _fault(name: str, meaning: str) -> Any:
    index = _FAULTS.index(name)
    return property(lambda self: self.each[..., index], doc=meaning)


class Faults(eqx.Module):
    """What can go wrong in a step. In [`eqx_kfac.Info`][], whether it did; in
    [`eqx_kfac.KFACState`][], how often so far. All faults but `factorisation` and
    `waiting` reject the step.

    **Fields:**

    - `each`: all of them in one array, `[..., 11]`, in the order of `as_dict`: booleans
        in `Info`, integers in the state. (Every array that enters or leaves `jit` takes
        time.)
    """

    each: Shaped[Array, "... 11"]

    hyperparameters = _fault(
        "hyperparameters", "A number in the state was out of its range."
    )
    loss = _fault("loss", "The loss was not finite before the step.")
    gradient = _fault(
        "gradient", "The loss was finite, but its gradient was not finite, or huge."
    )
    weights = _fault(
        "weights",
        """A loss had a weight below zero, so that its curvature would not be positive
        semidefinite. If the weights are advantages or the like, the objective is no
        weighted likelihood: add it as a scalar to a loss without targets, `surrogate +
        loss`.""",
    )
    curvature = _fault(
        "curvature",
        """Loss and gradient were finite, but the curvature was not, or there was none
        yet.""",
    )
    unseen = _fault(
        "unseen",
        """A layer had a gradient, but no curvature, although the curvature had just been
        estimated from the examples of this step. So the gradient did not come through the
        layer's tag (`kfac.verify` names the layer), or not from the loss of which the
        curvature is; or the squares that curvature is made of were rounded to zero.
        There are two exceptions in `KFAC.step`. If scalars are added to the loss, they
        have a gradient and no curvature. And if *no* layer has any curvature, the losses
        have none, because their outputs are certain, say: then damping determines the
        step.""",
    )
    update = _fault("update", "The update was not finite.")
    increase = _fault(
        "increase", "The loss after the step was not finite, or rose by too much."
    )
    divergence = _fault(
        "divergence",
        """The loss before the step was many times what losses had been. Either nothing
        bounded the step, so that it was not taken; or the parameters went back to where
        the loss was good. See `kfac.Rollback`.""",
    )
    factorisation = _fault(
        "factorisation",
        "The curvature could not be inverted: the previous inverse is still used.",
    )
    waiting = _fault(
        "waiting",
        """A layer had a gradient, but no curvature yet, because the examples from which
        curvature was estimated did not use it: the layer was left where it was. (A layer
        that is `unseen` when curvature is estimated waits at the steps in between.)""",
    )

    @classmethod
    def of(cls, **each: Array) -> "Faults":
        """**Arguments:** all of them, by name."""
        return cls(jnp.stack([each[name] for name in _FAULTS], axis=-1))

    @property
    def rejecting(self) -> Array:
        """Whether the step was not taken: not for the last two faults."""
        return jnp.any(self.each[..., :-2], axis=-1)

    def as_dict(self) -> dict[str, Array]:
        """All faults, by name."""
        return {name: getattr(self, name) for name in _FAULTS}

    def __repr__(self) -> str:
        each = self.each
        if not eqx.is_array(each) or isinstance(each, Tracer) or each.ndim > 1:
            return f"Faults({shown(each)})"
        number = lambda n: "" if each.dtype == bool else f"={n}"
        found = zip(_FAULTS, np.asarray(each), strict=True)
        return f"Faults({', '.join(f'{name}{number(n)}' for name, n in found if n)})"


class AveragedParameters(eqx.Module):
    """A moving average of the parameters.

    **Fields:**

    - `mean`: the averaged parameters, by path: an array for each inexact one of the
        model, in at least float32 (or complex64).
    - `weight`: $w$, the total weight of the average, a scalar; 0 before the first step.
    """

    mean: dict[str, Array]
    weight: Float[Array, ""]

    def add(
        self, model: Model, decay: Float[Array, ""], taken: Bool[Array, ""]
    ) -> "AveragedParameters":
        r"""$w \leftarrow \xi w + 1$, $\bar\theta \leftarrow \bar\theta + (\theta -
        \bar\theta) / w$: never biased towards the start; $\xi = 1$ is Polyak's mean.
        Nothing changes if the step that led to the model was not `taken`."""
        weight = decay.astype(self.weight.dtype) * self.weight + 1
        share = jnp.where(taken, 1 / weight, 0)
        weight = jnp.where(taken, weight, self.weight)

        def blend(mean, p):
            p = p.astype(mean.dtype)
            # Constants of a model may be infinite, as those of a mask are: then neither
            # their difference is a number, nor is zero times them.
            moves = taken & (p != mean)
            return mean + jnp.where(moves, share.astype(mean.dtype) * (p - mean), 0)

        return AveragedParameters(jtu.tree_map(blend, self.mean, by_path(model)), weight)

    def at(self, params: dict[str, Array]) -> "AveragedParameters":
        """The average of nothing but `params`."""
        mean = jtu.tree_map(lambda m, p: p.astype(m.dtype), self.mean, params)
        return AveragedParameters(mean, jnp.ones_like(self.weight))


def _number(name: str) -> Any:
    return property(
        lambda self: getattr(self.hyperparameters, name), doc=f"`hyperparameters.{name}`."
    )


class KFACState(NamedTuple):
    """The state of [`eqx_kfac.KFAC`][]. It consists of arrays; `eqx.tree_at` may change
    any of them between steps, including hyper-parameters (those that follow a schedule or
    a rule are overwritten by it). It is a named tuple, because `optax.tree.get` and
    `optax.tree.set` know no other types.

    **Fields:**

    - `step`: the number of steps so far, including rejected ones.
    - `curvature`: shaped like the model, with every tagged layer replaced by its
        averaged factors, and every other leaf by `None`. (After `kfac.packed`,
        symmetric matrices are `Packed`.)
    - `inverse`: the same, with the factorisation of the damped factors.
    - `weight`: the total weight of the moving average; 0 before the first estimate in
        which any layer has curvature.
    - `velocity`: the previous update of the tagged layers, by path: an array for each
        parameter (or how far these are ahead of their average, with
        [`eqx_kfac.ScheduleFree`][]). It is zero after an update that was rejected because
        it led uphill.
    - `extent`: how long `velocity` is in the metric of the curvature
        ([`eqx_kfac.Extent`][]), if a `TrustRegion` bounds it.
    - `layer_damping`: the damping of each layer as last chosen by a `LayerDamping`, if
        there is one.
    - `fallback`: the state of the optax optimizer for parameters that no tag covers.
    - `averaged_parameters`: the average of the parameters, if there is one; with
        [`eqx_kfac.ScheduleFree`][], [`eqx_kfac.Ahead`][].
    - `rollback`: the last good parameters, for a loss that diverges.
    - `hyperparameters`: the hyper-parameters, each as last chosen if a rule or a schedule
        chooses it (the damping: that of the next step). Each is also a property:
        `state.learning_rate`, `state.damping`.
    - `refactorise`: whether the factorisation is due at once, because the damping has
        changed after a rejection.
    - `known`: which layers have any curvature so far; the others stay where they are.
    - `rejected`: the number of steps that were not taken.
    - `faults`: how often each fault was found.
    """

    step: Int[Array, ""]
    curvature: Model
    inverse: Model
    weight: Float[Array, ""]
    velocity: dict[str, Array]
    extent: Extent | None
    layer_damping: Model | None
    fallback: Any
    averaged_parameters: AveragedParameters | Ahead | None
    rollback: Rollback
    hyperparameters: Hyperparameters
    refactorise: Bool[Array, ""]
    known: Bool[Array, " layers"]
    rejected: Int[Array, ""]
    faults: Faults

    learning_rate = _number("learning_rate")
    momentum = _number("momentum")
    damping = _number("damping")
    norm_constraint = _number("norm_constraint")
    ema = _number("ema")
    weight_decay = _number("weight_decay")
    averaging = _number("averaging")

    def __str__(self) -> str:
        return state_said(self)


class ScaleByKFACState(NamedTuple):
    """The state of [`eqx_kfac.scale_by_kfac`][]."""

    step: Int[Array, ""]
    curvature: Model
    inverse: Model
    weight: Float[Array, ""]
    fallback: Any


class Info(eqx.Module):
    """What happened in one step of [`eqx_kfac.KFAC`][]. A number that this optimizer
    measures at some steps is infinite at the others; a number that it never measures is
    `None`.

    **Fields:**

    - `loss`: the objective before the step, penalties included.
    - `new_loss`: the objective after the step (without weight decay), on the same batch.
    - `aux`: what the loss function returned beside the loss; stacked over
        micro-batches.
    - `learning_rate`: before the norm constraint or the trust region shortens the step.
    - `momentum`: before the trust region shortens the step.
    - `damping`: the damping of this step. (A rule that adapts the damping chooses that
        of the next step, which is in the state.)
    - `reduction_ratio`: the change of the loss divided by what the quadratic model
        predicted; minus infinity if the model promised no descent.
    - `gradient_norm`: the Euclidean norm of the gradient, over all parameters; infinite
        if squares overflow.
    - `through_rows`: whether the gradients of layers that see fewer rows (examples,
        positions) than they have features were preconditioned row by row; `None` if
        there are no such layers, or this is not tried.
    - `update_norm`: the Euclidean norm of the update without weight decay; 0 if the
        step was not taken.
    - `rejected`: whether the step was not taken, so that the parameters stay (or go back
        to the last good ones, if `faults.divergence` says so).
        `info.select(new, old)` chooses for anything else that a step changed.
    - `faults`: why.
    """

    loss: Float[Array, ""]
    new_loss: Float[Array, ""] | None
    aux: Any
    learning_rate: Float[Array, ""]
    momentum: Float[Array, ""]
    damping: Float[Array, ""]
    reduction_ratio: Float[Array, ""] | None
    gradient_norm: Float[Array, ""]
    through_rows: Bool[Array, ""] | None
    update_norm: Float[Array, ""]
    rejected: Bool[Array, ""]
    faults: Faults

    def select(self, new: PyTree, old: PyTree) -> PyTree:
        """Chooses what a step changed beside the model only if that step was taken. For
        example, an `eqx.nn.State` that has seen a bad batch would make all later steps
        bad, too.

        **Arguments:**

        - `new`: as it is after the step.
        - `old`: as it was before, of the same structure.

        **Returns:** the arrays of `new`, or those of `old` if the step was rejected;
        anything that is not an array is taken from `old`.

        !!! Example

            ```python
            def loss_fn(model, bn_state, x, y):
                logits, bn_state = jax.vmap(
                    model, axis_name="batch", in_axes=(0, None), out_axes=(0, None)
                )(x, bn_state)
                return kfac.SoftmaxCrossEntropy(logits, y), bn_state

            model, state, info = optimizer.step(loss_fn, model, state, bn_state, x, y)
            bn_state = info.select(info.aux, bn_state)
            ```
        """

        def pick(new, old):
            is_array = isinstance(old, (jax.Array, np.ndarray))
            return jnp.where(self.rejected, old, new) if is_array else old

        return jtu.tree_map(pick, new, old)

    def as_dict(self) -> dict[str, Array]:
        """All numbers that this optimizer measures, by name, without `aux`: to be logged,
        or kept for [`eqx_kfac.plot.history`][]. Faults are `"faults/loss"`, ...

        !!! Example

            ```python
            numbers = {name: float(x) for name, x in info.as_dict().items()}
            ```
        """
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        numbers = {k: v for k, v in fields.items() if eqx.is_array(v) and k != "aux"}
        return numbers | {f"faults/{k}": v for k, v in self.faults.as_dict().items()}

    def __repr__(self) -> str:
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        say = lambda value: repr(value) if isinstance(value, Faults) else shown(value)
        said = [f"{k}={say(v)}" for k, v in fields.items() if v is not None]
        return f"Info({', '.join(said)})"


def init_average(
    averaging: Numeric | ScheduleFree | None, model: Model
) -> AveragedParameters | Ahead | None:
    """An average of which no iterate is part yet, as `averaging` wants it."""
    if averaging is None:
        return None
    if isinstance(averaging, ScheduleFree):
        return Ahead()

    def zeros(p):
        dtype = p.dtype if jnp.iscomplexobj(p) else accumulator(p.dtype)
        return zeros_split_as(p, dtype)

    return AveragedParameters(jtu.tree_map(zeros, by_path(model)), jnp.zeros((), float))


def averaged(model: _Model, state: KFACState) -> _Model:
    r"""The model at the average of its iterates,

    $$\bar\theta = \sum_t \xi^{T-t} \theta_t \Big/ \sum_t \xi^{T-t},$$

    over the steps that were taken. It is usually better than the last iterate if steps
    are noisy. Evaluate it, but go on training `model`.

    **Arguments:**

    - `model`, `state`: as returned from [`eqx_kfac.KFAC`][]`.step`.

    **Returns:** a model like `model`; before the first step, `model` itself. Anything
    that was not trained stays as it is.

    **Raises:** `ValueError` if the optimizer does not average, or not this model.

    !!! Example

        ```python
        optimizer = kfac.KFAC()
        state = optimizer.init(model)
        model, state, info = optimizer.step(loss_fn, model, state, x, y, key=key)
        test_model = kfac.averaged(model, state)
        ```

    ??? cite "Reference"

        B. Polyak and A. Juditsky, *Acceleration of Stochastic Approximation by
        Averaging*, SIAM J. Control Optim. 30(4), 1992; with decay, J. Martens and
        R. Grosse, ICML 2015, section 13 of the long version.
    """
    iterates = state.averaged_parameters
    if iterates is None:
        raise ValueError(
            "This optimizer does not average its iterates. Construct it with "
            "`kfac.KFAC(..., averaging=0.99)` (or 1 for the mean of all)."
        )
    known = state.velocity if isinstance(iterates, Ahead) else iterates.mean
    missing = sorted(set(known) - set(by_path(model)))
    if missing:
        raise ValueError(
            f"The state has averages of {names(missing)}, which the model does not have. "
            "Give the model (or the part of it that is trained) that `step` returned."
        )

    def choose(path, leaf):
        found = known.get(jtu.keystr(path))
        if found is None:
            return leaf
        if isinstance(iterates, Ahead):
            return leaf - found
        return jnp.where(iterates.weight == 0, leaf, found.astype(leaf.dtype))

    return jtu.tree_map_with_path(choose, model)


def init_faults() -> Faults:
    """Counts of zero: nothing went wrong so far."""
    return Faults(jnp.zeros(len(_FAULTS), jnp.int32))


def count(faults: Faults, new: Faults) -> Faults:
    """The counts with those of one more step."""
    return Faults(faults.each + new.each.astype(faults.each.dtype))
