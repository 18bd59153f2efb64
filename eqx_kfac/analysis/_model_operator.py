"""Exact curvature matrices of a model, as linear operators that are never written
out."""

import abc
from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import lineax as lx
import numpy as np
from jaxtyping import Array, Float, PyTree

from .._complex import as_complex, as_real, on_parts, steepest
from .._curvature import check_pushes_forward, evaluate, filter_linearize, whole
from .._custom_types import Kwargs, Model
from .._fisher import Empirical
from .._loss import AbstractLoss, L2, Sum
from .._misc import accumulator, trailing
from .._operator import AbstractSymmetricOperator, LinearisedOperator, Structure
from .._program import run
from .._tag import empty_tags, naming_layers


class AbstractModelOperator(AbstractSymmetricOperator):
    """A curvature matrix of `loss_fn(model, *args, **kwargs)`, on vectors shaped like
    the inexact arrays of the model, each complex one as its two parts.

    **Fields:**

    - `loss_fn`: a function of such a `model` and of the batch.
    - `model`: with [`eqx_kfac.ComplexParts`][] in the place of complex arrays.
    - `args`: what the loss function is called with behind the model: the batch.
    - `kwargs`: what it is called with by name.
    """

    loss_fn: Callable
    model: Model
    args: tuple
    kwargs: Kwargs

    def __init__(self, loss_fn: Callable, model: Model, *args, **kwargs):
        """**Arguments:**

        - `loss_fn`: called as `loss_fn(model, *args, **kwargs)`; returns a loss, a sum of
            losses and penalties, or `(loss, aux)`.
        - `model`: any PyTree; its inexact arrays are the parameters. None of its layers
            has to be tagged.
        """
        as_jax = lambda x: jnp.asarray(x) if isinstance(x, np.ndarray) else x
        args, kwargs = jtu.tree_map(as_jax, (args, kwargs))
        model = empty_tags(model)
        parts = as_real(model)

        def of_parts(parts, *args, **kwargs):
            return loss_fn(as_complex(parts), *args, **kwargs)

        with naming_layers(model):
            # What the function closes over is part of the operator, so that operators
            # can be made within, and differentiated in, any transformation.
            self.loss_fn = eqx.filter_closure_convert(of_parts, parts, *args, **kwargs)
        self.model = parts
        self.args = args
        self.kwargs = kwargs

    @abc.abstractmethod
    def _product(self) -> Callable:
        """The product with a vector, after whatever does not depend on the vector."""

    def mv(self, vector: PyTree) -> PyTree:
        return on_parts(self._product(), vector)

    def linearise(self) -> LinearisedOperator:
        structure = self.in_structure()
        return LinearisedOperator(self._product(), structure, self.positive_semidefinite)

    def in_structure(self) -> PyTree[jax.ShapeDtypeStruct]:
        return Structure(eqx.filter(self.model, eqx.is_inexact_array)).tree

    def _run(self, model: Model) -> Sum:
        return run(self.loss_fn, model, self.args, self.kwargs)[0]


class AbstractOuterProduct(AbstractModelOperator):
    r"""$\sum_i \frac{c_i}{N_i} \sum_n w_n J_n^\top M_n J_n$ over the terms $n$ of every
    loss $i$ of a sum, plus the curvature of its `L2` terms: what these operators have in
    common. They differ in the matrices $M_n$ at the outputs."""

    # Said in every subclass: type checkers would take each for a dataclass of its fields.
    __init__ = AbstractModelOperator.__init__

    @abc.abstractmethod
    def _output_product(self, loss: AbstractLoss, v: PyTree) -> PyTree:
        """$M_n v_n$ for every term."""

    @abc.abstractmethod
    def _output_root(self, loss: AbstractLoss, v: PyTree) -> Array:
        r"""$S_n^\top v_n$ for every term, with $S_n S_n^\top = M_n$."""

    def jacobian(self) -> lx.FunctionLinearOperator:
        """$J$: how the outputs of the model depend on its parameters.

        **Returns:** a lineax operator, whose transpose is the pullback. Its products are
        lists, with the `outputs` of every loss.
        """
        linear = self._linear()

        def product(v):
            return [loss.outputs for loss in linear.pushforward(v).losses]

        return lx.FunctionLinearOperator(product, self.in_structure())

    def factor(self) -> lx.FunctionLinearOperator:
        r"""$B$ with $B^\top B$ this operator: the Jacobian between a root of the matrix
        at the outputs, with all weights, coefficients and counts.

        **Returns:** a lineax operator. Its products are a pair of lists: an array for
        every loss; a tree of parameters for every `L2` term.

        **Raises:** `ValueError` for a loss whose matrix at the outputs has no known root.
        """
        linear = self._linear()
        for loss in linear.objective.losses:
            if loss.joint:
                raise ValueError(
                    f"`kfac.{type(loss).__name__}` has no root for every term by itself, "
                    "because its matrix at the outputs joins all terms."
                )
        product = linear.at_outputs(self._output_root, jnp.sqrt)

        return lx.FunctionLinearOperator(product, self.in_structure())

    def _product(self) -> Callable:
        linear = self._linear()
        at_outputs = linear.at_outputs(self._output_product, lambda scale: scale)
        return lambda v: linear.pull(*at_outputs(_cast(v, self.in_structure())))

    def _linear(self) -> "_Linear":
        objective, pushforward, pullback, _ = filter_linearize(
            lambda model: (self._run(model), None), self.model
        )
        what = f"Products with `kfac.analysis.{type(self).__name__}` need"
        params = eqx.filter(self.model, eqx.is_inexact_array)
        check_pushes_forward(what, pushforward, params)
        counts = whole(objective, self.model).counts
        return _Linear(objective, counts, pushforward, pullback)


class GaussNewtonOperator(AbstractOuterProduct):
    r"""The generalised Gauss-Newton matrix of the mean objective,

    $$C = \frac1N \sum_n w_n J_n^\top H_n J_n,$$

    with $J_n$ the Jacobian of the outputs of term $n$ and $H_n$ the Hessian of its loss
    at the outputs: the Hessian of the objective, if the model were linear in its
    parameters. For a sum of losses, the sum of their matrices; an [`eqx_kfac.L2`][] term
    adds its own Hessian, and scalar penalties nothing.

    A lineax operator, on vectors shaped like `eqx.filter(model, eqx.is_inexact_array)`.
    A product costs a forward and a backward pass; `lx.linearise(operator)` keeps the
    forward pass that all products share, `lx.materialise(operator)` the whole matrix.

    !!! Example

        ```python
        operator = kfac.analysis.GaussNewtonOperator(loss_fn, model, x, y)
        solver = lx.CG(rtol=1e-5, atol=1e-5)
        step = lx.linear_solve(operator.damped(0.1), grads, solver).value
        ```

    ??? cite "Reference"

        N. Schraudolph, *Fast Curvature Matrix-Vector Products for Second-Order Gradient
        Descent*, Neural Computation 2002.
    """

    __init__ = AbstractModelOperator.__init__

    @property
    def positive_semidefinite(self) -> bool:
        """Whether every loss is known to be convex in the model's outputs: a loss is, if
        they are natural parameters, or if it has a `hessian_root`."""
        objective = eqx.filter_eval_shape(self._run, self.model)
        return all(_is_convex(loss) for loss in objective.losses)

    def _output_product(self, loss: AbstractLoss, v: PyTree) -> PyTree:
        return loss.hessian_product(v)

    def _output_root(self, loss: AbstractLoss, v: PyTree) -> Array:
        return loss.transposed(loss.hessian_root, v)


class FisherOperator(AbstractOuterProduct):
    r"""The Fisher information matrix of the mean objective,

    $$F = \frac1N \sum_n w_n J_n^\top \, \mathbb{E}_{t \sim p_n} \left[s_n(t)
    s_n(t)^\top\right] J_n, \qquad s_n(t) = \nabla_{\text{outputs}} \ell_n(t),$$

    with targets from the model's own predictive distribution. It equals the
    [`eqx_kfac.analysis.GaussNewtonOperator`][] matrix if the outputs are natural
    parameters (softmax, sigmoid, squared error, Poisson); unlike that matrix, it is
    always positive semidefinite, and never needs targets. Otherwise it is like
    [`eqx_kfac.analysis.GaussNewtonOperator`][].

    !!! Example

        ```python
        fisher = kfac.analysis.FisherOperator(loss_fn, model, x, y)
        length = jnp.sqrt(tree_dot(step, fisher.mv(step)))
        ```

    ??? cite "Reference"

        J. Martens, *New Insights and Perspectives on the Natural Gradient Method*, JMLR
        2020.
    """

    __init__ = AbstractModelOperator.__init__

    @property
    def positive_semidefinite(self) -> bool:
        return True

    def _output_product(self, loss: AbstractLoss, v: PyTree) -> PyTree:
        return loss.fisher_product(v)

    def _output_root(self, loss: AbstractLoss, v: PyTree) -> Array:
        return loss.transposed(loss.fisher_root, v)


class EmpiricalFisherOperator(AbstractOuterProduct):
    r"""The matrix of the gradients at the given targets,

    $$\frac1N \sum_n w_n J_n^\top s_n s_n^\top J_n, \qquad s_n = \nabla_{\text{outputs}}
    \ell_n,$$

    over loss *terms* $n$: if an example has several (its tokens), their gradients are
    not added up before the outer product. It is not a curvature of the loss: it vanishes
    where the data are fitted. Otherwise it is like
    [`eqx_kfac.analysis.GaussNewtonOperator`][].

    !!! Example

        ```python
        noise = kfac.analysis.EmpiricalFisherOperator(loss_fn, model, x, y)
        noise.mv(direction)
        ```

    ??? cite "Reference"

        F. Kunstner, L. Balles, P. Hennig, *Limitations of the Empirical Fisher
        Approximation for Natural Gradient Descent*, NeurIPS 2019.
    """

    __init__ = AbstractModelOperator.__init__

    @property
    def positive_semidefinite(self) -> bool:
        return True

    def _output_product(self, loss: AbstractLoss, v: PyTree) -> PyTree:
        slope = self._output_root(loss, v)
        return _times_tree(slope, _score(loss))

    def _output_root(self, loss: AbstractLoss, v: PyTree) -> Float[Array, "*leading"]:
        def slope(s, u):
            dtype, number = accumulator(u.dtype), len(loss.leading)
            terms, own = tuple(range(number)), tuple(range(number, u.ndim))
            # Not the sum of a product: XLA's program for CPU (of JAX 0.10) gets it wrong
            # under `vmap`, for hundreds of examples and directions.
            dims = ((own, own), (terms, terms))
            s, u, precision = s.astype(dtype), u.astype(dtype), jax.lax.Precision.HIGHEST
            return jax.lax.dot_general(s, u, dims, precision=precision)

        slopes = jtu.tree_map(slope, _score(loss), v)
        return jtu.tree_reduce(jnp.add, slopes)


class HessianOperator(AbstractModelOperator):
    r"""The Hessian $\nabla^2 h$ of the mean objective: of everything that `loss_fn`
    returns, including scalar penalties. It is symmetric, and in general indefinite:
    conjugate gradients do not apply, but `lx.GMRES` and the dense solvers do.

    A lineax operator, on vectors shaped like `eqx.filter(model, eqx.is_inexact_array)`.
    A product is the forward-mode derivative of the gradient.

    !!! Example

        ```python
        hessian = kfac.analysis.HessianOperator(loss_fn, model, x, y)
        eigenvalues = jnp.linalg.eigvalsh(hessian.as_matrix())
        ```

    ??? cite "Reference"

        B. Pearlmutter, *Fast Exact Multiplication by the Hessian*, Neural Computation
        1994.
    """

    __init__ = AbstractModelOperator.__init__

    @property
    def positive_semidefinite(self) -> bool:
        return False

    def _product(self) -> Callable:
        params, static = eqx.partition(self.model, eqx.is_inexact_array)

        def value(params):
            model = eqx.combine(params, static)
            objective = self._run(model)
            return evaluate(objective, model, whole(objective, model))

        _, product = jax.linearize(jax.grad(value), params)
        return lambda v: product(_cast(v, params))


class _Linear(eqx.Module):
    """A loss function linearised at a model."""

    objective: Sum
    counts: list[Float[Array, ""]]
    pushforward: Callable
    pullback: Callable

    def at_outputs(self, fn: Callable, scaling: Callable) -> Callable:
        """Pushes a vector forward, and applies `fn(loss, tangent)` and the scales."""
        losses = self.objective.losses
        loss_scales = list(map(scaling, self.loss_scales()))
        l2_scales = list(map(scaling, self.l2_scales()))

        def product(v):
            tangents = self.pushforward(v)
            outputs = [
                fn(loss, tangent.outputs)
                for loss, tangent in zip(losses, tangents.losses, strict=True)
            ]
            parameters = [as_real(term.parameters) for term in _l2_terms(tangents)]
            return (
                list(map(_times_tree, loss_scales, outputs)),
                list(map(_times_tree, l2_scales, parameters)),
            )

        return product

    def pull(self, outputs: list[PyTree], parameters: list[PyTree]) -> PyTree:
        """Pulls cotangents of the losses' outputs and of the parameters that `L2` terms
        hold back to the model."""

        def where(objective):
            held = [term.parameters for term in _l2_terms(objective)]
            return [loss.outputs for loss in objective.losses] + held

        # A cotangent of JAX's is the conjugate of a direction.
        parameters = steepest(as_complex(parameters))
        inexact = eqx.filter(self.objective, eqx.is_inexact_array)
        zeros = jtu.tree_map(jnp.zeros_like, inexact)
        return self.pullback(eqx.tree_at(where, zeros, outputs + parameters))

    def loss_scales(self) -> list[Float[Array, "..."]]:
        r"""$c w_n / N$ for the terms of every loss; a scalar without weights."""
        scales = []
        terms = self.objective.weighted_losses
        for (coefficient, loss), count in zip(terms, self.counts, strict=True):
            scale = jnp.asarray(coefficient, count.dtype) / count
            if loss.weights is not None:
                scale = scale * loss.term_weights.astype(count.dtype)
            scales.append(scale)
        return scales

    def l2_scales(self) -> list[Float[Array, ""]]:
        terms = self.objective.terms
        return [
            jnp.asarray(c) * jnp.asarray(o.coefficient)
            for c, o in terms
            if isinstance(o, L2)
        ]


def _l2_terms(objective: Sum) -> list[L2]:
    return [o for _, o in objective.terms if isinstance(o, L2)]


def _is_convex(loss: AbstractLoss) -> bool:
    return loss.natural or type(loss).hessian_root is not AbstractLoss.hessian_root


def _score(loss: AbstractLoss) -> PyTree:
    (score,) = Empirical().cotangents([loss], 0, None)
    return score


def _times(scale: Float[Array, "*leading"], a: Array) -> Array:
    scale = scale.astype(a.dtype)
    return a * (scale if scale.ndim == 0 else trailing(scale, a))


def _times_tree(scale: Float[Array, "*leading"], tree: PyTree) -> PyTree:
    return jtu.tree_map(lambda a: _times(scale, a), tree)


def _cast(v: PyTree, like: PyTree) -> PyTree:
    return jtu.tree_map(lambda a, p: a.astype(p.dtype), v, like)
