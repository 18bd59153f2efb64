"""A normal distribution of parameters, from the curvature at the trained ones."""

import functools as ft
import math
from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
from jaxtyping import Array, ArrayLike, Float, PyTree

from .._checks import (
    check_array,
    check_count,
    check_key,
    is_number,
    is_scalar,
    plain,
    POSITIVE,
)
from .._custom_types import Key, Model, PerLayer
from .._misc import accumulator
from .._operator import flatten, matmul, widest
from .._tag import map_tags, partition_tagged
from ._block_diagonal import BlockDiagonalOperator


# So many numbers take no memory worth mentioning.
_SMALL = 2**16


class Laplace(eqx.Module):
    r"""The Laplace approximation of the posterior of a model's parameters: a normal
    distribution around the trained ones, whose precision is the sum of the curvature of
    all training data and the precision of the prior,

    $$q(\theta) = \mathcal N(\theta_*, \Sigma), \qquad
    \Sigma^{-1} = \frac{N}{\sigma^2 T} C + \operatorname{diag}(\delta)$$

    with $C$ the curvature of the *mean* loss, block by block; $N$ the number of training
    examples; $\sigma$ the standard deviation of the noise of an
    [`eqx_kfac.SquaredError`][] (other losses: 1); $T$ a temperature; and $\delta$ the
    precision of a normal prior around zero.

    All four are array leaves: `eqx.tree_at` changes them, and they take part in
    `jax.grad` and `jax.vmap`; nothing is decomposed anew. Parameters that no tag covers,
    or that are frozen, are treated as known exactly.

    An [`eqx_kfac.L2`][] term of the loss is a prior. It is removed from $C$, so that
    nothing is counted twice. `prior_precision=None` takes this prior.

    **Fields:**

    - `curvature`: $C$, with the eigendecomposition of every layer. (The others are the
        arguments of the constructor, with numbers as arrays.)

    !!! Example

        ```python
        curvature = kfac.curvature(loss_fn, fisher=kfac.Exact())(model, x, y)
        posterior = kfac.analysis.Laplace(curvature, model, num_examples=len(x))
        posterior = posterior.with_tuned_prior()
        mean, covariance = jax.vmap(lambda x: posterior.predict(forward, x))(x_test)
        ```

    ??? cite "Reference"

        D. MacKay, *A Practical Bayesian Framework for Backpropagation Networks*, Neural
        Computation 1992. With Kronecker factors: H. Ritter, A. Botev, D. Barber, *A
        Scalable Laplace Approximation for Neural Networks*, ICLR 2018.
    """

    curvature: BlockDiagonalOperator
    model: Model
    num_examples: Float[Array, ""]
    prior_precision: PerLayer
    sigma_noise: Float[Array, ""]
    temperature: Float[Array, ""]

    def __init__(
        self,
        curvature: Model,
        model: Model,
        num_examples: ArrayLike,
        prior_precision: PerLayer = 1.0,
        sigma_noise: ArrayLike = 1.0,
        temperature: ArrayLike = 1.0,
    ):
        r"""**Arguments:**

        - `curvature`: what [`eqx_kfac.curvature`][] returns, or `state.curvature` of an
            optimizer: with any blocks. It is decomposed here, once.
        - `model`: the trained model that it belongs to, or the part of it that is trained
            (`eqx.partition`): a last layer, say.
        - `num_examples`: $N$, of all training data.
        - `prior_precision`: $\delta > 0$: a number, or one for every layer, in a tree
            like the one from `posterior.curvature.per_layer(1.0)`. `None`: that of the
            [`eqx_kfac.L2`][] terms of the loss, $N / (\sigma^2 T)$ times their
            coefficient.
        - `sigma_noise`: $\sigma > 0$.
        - `temperature`: $T > 0$. Below 1, the posterior is narrower than the model says.

        **Raises:** `ValueError` for numbers that are not positive, and for layers that
        have no curvature.
        """
        whole = BlockDiagonalOperator(curvature, model)
        dtype = accumulator(widest(whole.in_structure()))

        def positive(name, value):
            check_array(name, value, POSITIVE)
            return jnp.asarray(value, dtype)

        self.model = model
        self.curvature = whole.without_l2().spectral()
        self.num_examples = positive("num_examples", num_examples)
        self.sigma_noise = positive("sigma_noise", sigma_noise)
        self.temperature = positive("temperature", temperature)
        if prior_precision is None:
            scale = self._scale()
            prior_precision = jtu.tree_map(lambda c: scale * c, whole.l2())
        elif not (is_number(plain(prior_precision)) or is_scalar(prior_precision)):
            prior_precision = whole.per_layer(prior_precision, "prior_precision")
        self.prior_precision = jtu.tree_map(
            ft.partial(positive, "prior_precision"), prior_precision
        )

    def precision(self) -> BlockDiagonalOperator:
        r"""$\Sigma^{-1}$, a lineax operator on trees shaped like the model."""
        return self._likelihood().damped(self._prior())

    def covariance(self) -> BlockDiagonalOperator:
        r"""$\Sigma$, a lineax operator on trees shaped like the model."""
        return self.precision().power(-1)

    def sample(self, key: Key) -> Model:
        r"""A model with parameters drawn from the posterior. `eqx.filter_vmap` over keys
        makes an ensemble."""
        check_key(key)
        leaves, treedef = jtu.tree_flatten(self.curvature.in_structure())
        keys = jr.split(key, len(leaves))
        noise = [jr.normal(k, s.shape, s.dtype) for k, s in zip(keys, leaves)]
        step = self.precision().power(-0.5).mv(treedef.unflatten(noise))
        return eqx.apply_updates(self.model, step)

    def log_marginal_likelihood(self, log_likelihood: ArrayLike) -> Float[Array, ""]:
        r"""The logarithm of the evidence of the data under this approximation,

        $$\log p(D \mid \theta_*) - \tfrac12 \theta_*^\top \operatorname{diag}(\delta)
        \theta_* + \tfrac12 \log\det \operatorname{diag}(\delta) - \tfrac12 \log\det
        \Sigma^{-1},$$

        to be differentiated with respect to the prior precision, and to be compared
        between models.

        **Arguments:**

        - `log_likelihood`: $\log p(D \mid \theta_*)$, of all training data: $-N$ times
            the mean loss, for losses that are negative log likelihoods. For a
            [`eqx_kfac.SquaredError`][] $h$ of $k$ outputs, $-N h / \sigma^2 - \frac12 N k
            \log(2 \pi \sigma^2)$. (Divided by $T$, if $T$ is not 1.)
        """
        prior = self._over_layers(
            lambda d, size, square: jnp.sum(size * jnp.log(d) - d * square), self._prior()
        )
        log_prior = jnp.sum(jnp.stack(jtu.tree_leaves(prior)))
        logdet = self.precision().logdet()
        return jnp.asarray(log_likelihood, logdet.dtype) + 0.5 * (log_prior - logdet)

    def with_tuned_prior(self, per_layer: bool = False) -> "Laplace":
        r"""The same posterior with the prior precision of largest evidence. The evidence
        is concave in $\log\delta$; at its maximum, the parameters are as large as the
        prior says, in the directions that the data determine:
        $\delta \lVert \theta_* \rVert^2 = \operatorname{tr} (\Sigma^{-1} - \delta I)
        \Sigma$.

        **Arguments:**

        - `per_layer`: whether every layer gets a prior precision of its own. (So does
            each layer of a stack.)
        """

        def step(_, prior):
            known = likelihood.effective_dimensions(prior)
            if not per_layer:
                known = _total(known)
            # Half way in log(delta): a contraction, by half at least.
            return jtu.tree_map(
                lambda d, k, s: jnp.sqrt(d * k / s), prior, known, squares
            )

        likelihood, prior = self._likelihood(), self._prior()
        squares = self._over_layers(lambda d, size, square: square, prior)
        if not per_layer:
            squares = _total(squares)
        prior = jax.lax.fori_loop(0, 60, step, prior)
        if not per_layer:
            prior = jtu.tree_leaves(prior)[0].reshape(-1)[0]
        return eqx.tree_at(lambda p: p.prior_precision, self, prior)

    def functional_variance(
        self, fn: Callable, x: PyTree
    ) -> Float[Array, "outputs outputs"]:
        r"""The covariance $J \Sigma J^\top$ of the outputs, linearised around the trained
        parameters.

        **Arguments:**

        - `fn`: called as `fn(model, x)`; returns an array, whose entries are the outputs.
        - `x`: one input; use `jax.vmap` for many. (For a `fn` of several inputs, the
            covariance is that of all outputs at all of them.)
        """
        return self._variance(*self._pullback(fn, x))

    def predict(
        self, fn: Callable, x: PyTree
    ) -> tuple[Float[Array, " outputs"], Float[Array, "outputs outputs"]]:
        r"""Mean and covariance of a regression's targets: the covariance of the outputs,
        and $\sigma^2$ of noise. Arguments as for `functional_variance`."""
        outputs, pull = self._pullback(fn, x)
        variance = self._variance(outputs, pull)
        outputs = outputs.astype(variance.dtype)
        noise = self.sigma_noise.astype(variance.dtype) ** 2
        return outputs, variance + noise * jnp.eye(len(variance), dtype=variance.dtype)

    def predict_classes(
        self,
        fn: Callable,
        x: PyTree,
        key: Key | None = None,
        num_samples: int = 1000,
    ) -> Float[Array, " outputs"]:
        r"""Probabilities of classes, for a `fn` whose outputs are their logits. Arguments
        as for `functional_variance`, and:

        - `key`: for `num_samples` samples of the logits, whose probabilities are
            averaged. Without a key, the probit approximation is used:
            $\operatorname{softmax}(f_c / \sqrt{1 + \pi v_c / 8})$, with $v_c$ the
            variance of the logit $f_c$.

        ??? cite "Reference"

            D. MacKay, *The Evidence Framework Applied to Classification Networks*, Neural
            Computation 1992.
        """
        check_key(key)
        check_count("num_samples", num_samples, 1)
        logits, pull = self._pullback(fn, x)
        if key is None:
            variances = self._variances(logits, pull)
            logits = logits.astype(variances.dtype)
            return jax.nn.softmax(logits / jnp.sqrt(1 + math.pi / 8 * variances))
        variance = self._variance(logits, pull)
        logits = logits.astype(variance.dtype)
        # A root by eigenvectors: the variance need not have full rank.
        values, vectors = jnp.linalg.eigh(variance)
        noise = jr.normal(key, (num_samples, len(logits)), logits.dtype)
        noise = noise * jnp.sqrt(jnp.maximum(values, 0))[None, :]
        samples = logits[None, :] + matmul(noise, vectors.T)
        return jnp.mean(jax.nn.softmax(samples), axis=0)

    def _pullback(self, fn: Callable, x: PyTree) -> tuple[Array, Callable]:
        r"""The outputs, and $J^\top$."""

        def outputs(parameters):
            return jnp.ravel(fn(eqx.combine(parameters, self.model), x))

        out, pull = jax.vjp(outputs, partition_tagged(self.model)[0])
        return out, lambda cotangent: pull(cotangent)[0]

    def _variance(self, out: Array, pull: Callable) -> Float[Array, "outputs outputs"]:
        r"""$J \Sigma J^\top$. Of $J$ itself, which has as many numbers as outputs times
        parameters, only some rows are there at a time."""
        covariance, dtype = self.covariance(), accumulator(out.dtype)
        # Not a forward-mode derivative, which a `custom_vjp` has not.
        push = jax.linear_transpose(pull, out)

        def row(cotangent):
            (tangent,) = push(covariance.mv(pull(cotangent)))
            return tangent.astype(dtype)

        variance = self._of_each(row, out, len(out) ** 2)
        return (variance + variance.T) / 2

    def _variances(self, out: Array, pull: Callable) -> Float[Array, " outputs"]:
        r"""The diagonal of $J \Sigma J^\top$."""
        root, dtype = self.precision().power(-0.5), accumulator(out.dtype)

        def variance(cotangent):
            return jnp.sum(flatten(root.mv(pull(cotangent)), dtype) ** 2)

        return self._of_each(variance, out, len(out))

    def _of_each(self, fn: Callable, out: Array, numbers: int) -> Array:
        """`fn` of the unit vector of each output, of so many at a time that their
        gradients take no more memory than the result, which has so many `numbers`."""
        number, size = len(out), self.curvature.in_size()
        at_once = min(max(1, max(numbers, _SMALL) // size), number)
        unit = lambda index: (jnp.arange(number) == index).astype(out.dtype)
        each = lambda index: fn(unit(index))
        return jax.lax.map(each, jnp.arange(number), batch_size=at_once)

    def _likelihood(self) -> BlockDiagonalOperator:
        return self.curvature.scaled(self._scale())

    def _scale(self) -> Float[Array, ""]:
        return self.num_examples / (self.sigma_noise**2 * self.temperature)

    def _prior(self) -> Model:
        """The prior precision of every layer."""
        return self.curvature.per_layer(self.prior_precision, "prior_precision")

    def _over_layers(self, fn: Callable, prior: Model) -> Model:
        """`fn(prior precision, number of parameters, their sum of squares)` of every
        layer, summed over those of a stack."""

        def of_layer(tag, layer, d):
            if d is None:
                return None
            matrix = tag.to_matrix(layer).astype(d.dtype)
            axes = tuple(range(d.ndim, matrix.ndim))
            size = math.prod(matrix.shape[d.ndim :])
            return fn(d, size, jnp.sum(matrix**2, axis=axes))

        return map_tags(of_layer, self.model, prior)


def _total(tree: Model) -> Model:
    """The sum over all layers, in the place of each."""
    total = sum(jnp.sum(x) for x in jtu.tree_leaves(tree))
    return jtu.tree_map(lambda x: jnp.full_like(x, total), tree)
