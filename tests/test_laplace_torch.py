"""The same posterior as laplace-torch, an implementation by others, in PyTorch. Skipped
where it is not installed.

It takes weights and biases apart (a Kronecker block of a bias is its output factor), and
so does the model here. What the two agree on: `sigma_noise` divides a squared error of
½ ‖y - t‖², cross-entropies are sums, and the prior is around zero."""

import warnings

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqx_kfac as kfac

from .helpers import close


torch = pytest.importorskip("torch")
laplace = pytest.importorskip("laplace")
N, DELTA = 30, 0.7


class Net(eqx.Module):
    first: kfac.Linear
    first_bias: kfac.Parameter
    last: kfac.Linear
    last_bias: kfac.Parameter

    def __init__(self, weights):
        w1, b1, w2, b2 = map(jnp.asarray, weights)

        def linear(weight):
            new = kfac.Linear(*weight.shape[::-1], use_bias=False, key=jax.random.key(0))
            return eqx.tree_at(lambda m: m.weight, new, weight)

        self.first, self.last = linear(w1), linear(w2)
        self.first_bias = kfac.Parameter(b1, block=kfac.Full())
        self.last_bias = kfac.Parameter(b2, block=kfac.Full())

    def __call__(self, x):
        x = jnp.tanh(self.first(x) + self.first_bias(x))
        return self.last(x) + self.last_bias(x)


@pytest.mark.parametrize("likelihood", ["regression", "classification"])
def test_same_posterior(likelihood):
    regression = likelihood == "regression"
    sigma = 0.5 if regression else 1.0
    torch.manual_seed(0)
    net = torch.nn.Sequential(
        torch.nn.Linear(3, 5), torch.nn.Tanh(), torch.nn.Linear(5, 3)
    ).double()
    x = torch.randn(N, 3, dtype=torch.float64)
    y = torch.randint(0, 3, (N,))
    if regression:
        y = torch.randn(N, 3, dtype=torch.float64)
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=N)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = laplace.Laplace(
            net,
            likelihood,
            subset_of_weights="all",
            hessian_structure="kron",
            prior_precision=DELTA,
            sigma_noise=sigma,
        )
        theirs.fit(data)
        _, variances = theirs._glm_predictive_distribution(x[:4])
        evidence = theirs.log_marginal_likelihood()
        logdet = theirs.log_det_posterior_precision

    def loss_fn(model, x, y):
        loss = kfac.SquaredError if regression else kfac.SoftmaxCrossEntropy
        return loss(jax.vmap(model)(x), y)

    model = Net([p.detach().numpy() for p in net.parameters()])
    x, y = jnp.asarray(x.numpy()), jnp.asarray(y.numpy())
    curvature = kfac.curvature(loss_fn, fisher=kfac.Exact())(model, x, y)
    ours = kfac.analysis.Laplace(curvature, model, N, DELTA, sigma)
    close(ours.precision().logdet(), float(logdet), 1e-6)
    close(
        ours.log_marginal_likelihood(float(theirs.log_likelihood)), float(evidence), 1e-6
    )
    variance = lambda x: ours.functional_variance(lambda m, x: m(x), x)
    close(jax.vmap(variance)(x[:4]), variances.detach().numpy(), 1e-6)
    if not regression:
        probit = theirs(torch.tensor(np.array(x[:4])), link_approx="probit")
        found = jax.vmap(lambda x: ours.predict_classes(lambda m, x: m(x), x))(x[:4])
        close(found, probit.detach().numpy(), 1e-6)
