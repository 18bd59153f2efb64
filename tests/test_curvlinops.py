"""The same matrices as curvlinops, an implementation by others, in PyTorch: factors,
blocks and their damped inverses, and the exact matrices of a whole model. Skipped where
curvlinops 3 is not installed.

Where the two agree. Ours means `eqx_kfac`; theirs `reduction="mean"` and
`separate_weight_and_bias=False`.

- The objective is the mean over all loss terms (over the tokens too, where each has a
  term), and so is its curvature. Both keep `1/N` out of what is pulled back, or take it
  out again: `G` is the mean over terms of the sum over positions, `A` the mean over
  examples and positions (expand), or over examples of the mean over positions (reduce).
  Hence even the two factors are the same, not just their product.
- The bias is the last input, 1 before and after averaging over positions.
- `vec` is row-major: `G ⊗ A` here. (They say column-major and `A ⊗ G`, which are the same
  numbers; their vectors are the parameters behind one another, each row-major.) Patches
  of a convolution are ordered as its weight: channel, then kernel.
- Factored damping: the same `π`, `√λ π` for `A` and `√λ / π` for `G`.

Where they differ by convention, and what makes them agree:

- Squared error: ours is `½ ‖y - t‖²`, a term; theirs the mean of the squares over the `C`
  outputs too. Theirs is `2/C` times ours, and so are its Hessian and its Gauss-Newton
  matrix and Fisher. Of the empirical Fisher of a mean over outputs there are several
  notions; they take the outer product of `∇ ‖y - t‖²`, over `C`: `4/C` times ours.
  Damping has to be scaled like the matrix it is added to.
- Weight and bias apart (`separate_weight_and_bias=True`): what we get when one of them
  is frozen, for each of them. For a Kronecker block, that is the joint one without what
  couples them; for an eigenvalue-corrected one it is not.
- Logits: theirs have the classes as second axis.

Where they differ, and a dense computation is as ours (the tests say so):

- Several loss terms per example, exact ("type-2") Fisher: they pull back all terms at
  once, and get products of different terms where a position takes part in several, or
  positions are summed. They are right for expand, if the model does not mix positions.
  We pull back one term at a time. (Their EKFAC, as of 3.0, refuses this case.)
- Grouped convolutions: they average the inputs over the groups, and have one Kronecker
  product for all channels; for us, groups are layers side by side.

Everything is in float64. Matrices are compared whole, by relative Frobenius error, and so
eigenvectors may differ in sign.
"""

import functools as ft
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.linalg

import eqx_kfac as kfac

from .reference import error


with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    torch = pytest.importorskip("torch")
    curvlinops = pytest.importorskip("curvlinops")


N, T, C = 14, 3, 3  # Examples, tokens, outputs.


#
# Both
#


class Case(NamedTuple):
    """A layer, an activation, something without parameters, and a linear layer. The
    functions are NumPy's, of arrays with all axes: they work with either library."""

    shape: tuple[int, ...]  # Of one example.
    width: int  # Of the last layer's inputs.
    between: Callable = lambda h: h
    terms: tuple[int, ...] = ()  # The loss terms of one example.
    groups: int = 1
    repeated: bool = False  # Whether all tokens of an example are the same.

    @property
    def is_convolution(self):
        return len(self.shape) == 3


window = dict(stride=(2, 1), padding=(1, 0), dilation=(1, 2))


def mix(h):
    return h + 2 * h.mean(1)[:, None]


cases = {
    "vectors": Case((3,), 4),
    "tokens": Case((T, 3), 4, terms=(T,)),
    "mixed tokens": Case((T, 3), 4, mix, terms=(T,)),
    "pooled tokens": Case((T, 3), 4, lambda h: h.mean(1)),
    "convolution": Case((2, 5, 4), 12, lambda h: h.reshape(len(h), -1)),
    "pooled convolution": Case((2, 5, 4), 2, lambda h: h.mean((2, 3))),
    # Only where a dense computation decides.
    "repeated tokens": Case((T, 3), 4, mix, terms=(T,), repeated=True),
    "groups": Case((2, 5, 4), 4, lambda h: h.mean((2, 3)), groups=2),
}
several_terms = ["tokens", "mixed tokens"]


class Loss(NamedTuple):
    ours: Any
    theirs: Any
    scale: float  # Theirs, as a multiple of ours; so is the Hessian, ...
    empirical_scale: float  # ... and so the empirical Fisher.

    def of(self, fisher):
        return self.empirical_scale if fisher == "empirical" else self.scale


losses = {
    "squared": Loss(kfac.SquaredError, torch.nn.MSELoss(), 2 / C, 4 / C),
    "softmax": Loss(kfac.SoftmaxCrossEntropy, torch.nn.CrossEntropyLoss(), 1.0, 1.0),
}
fishers = {"type-2": kfac.Exact(), "empirical": kfac.Empirical()}
sharings = {"expand": kfac.Expand(), "reduce": kfac.Reduce()}


@ft.cache
def data(name, loss):
    case, rng = cases[name], np.random.default_rng(1)
    x = rng.normal(size=(N, *case.shape)) + 0.5
    if case.repeated:
        x = np.repeat(x[:, :1], T, axis=1)
    if loss == "squared":
        return x, rng.normal(size=(N, *case.terms, C))
    return x, rng.integers(C, size=(N, *case.terms))


def quiet(fn):
    """PyTorch warns of what its own code uses."""

    @ft.wraps(fn)
    def wrapper(*args, **kwargs):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return fn(*args, **kwargs)

    return wrapper


#
# Theirs
#


class TheirModel(torch.nn.Module):
    def __init__(self, case, linear, classes_second):
        super().__init__()
        if case.is_convolution:
            out = 2 * case.groups
            self.first = torch.nn.Conv2d(2, out, 2, groups=case.groups, **window)
        else:
            self.first = torch.nn.Linear(3, 4)
        self.last = torch.nn.Linear(case.width, C)
        self.case, self.linear = case, linear
        self.classes_second = classes_second

    def forward(self, x):
        h = self.first(x)
        z = self.last(self.case.between(h if self.linear else torch.tanh(h)))
        return z.movedim(-1, 1) if self.classes_second else z


@ft.cache
def their_model(name, linear=False, loss="squared"):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return TheirModel(cases[name], linear, loss == "softmax").double()


@quiet
def their_operator(kind, name, loss, linear=False, **options):
    model = their_model(name, linear, loss)
    x, y = map(torch.from_numpy, data(name, loss))
    parameters = list(model.parameters())
    if kind in (curvlinops.KFACLinearOperator, curvlinops.EKFACLinearOperator):
        options = dict(separate_weight_and_bias=False) | options
    options = dict(check_deterministic=False) | options
    return kind(model, losses[loss].theirs, parameters, [(x, y)], **options)


@quiet
def matrix_of(operator, size):
    """Row and column of every parameter: weight, bias, layer by layer."""
    return (operator @ torch.eye(size, dtype=torch.float64)).detach().numpy()


@ft.cache
@quiet
def their_matrix(*args, **options):
    return matrix_of(their_operator(*args, **options), sum(sizes(args[1])))


def their_blocks(kind, name, loss, fisher, sharing, **options):
    options = dict(fisher_type=fisher, kfac_approx=sharing) | options
    return their_matrix(kind, name, loss, **options)


@quiet
def their_factors(name, loss, fisher, sharing):
    """`(A, G)` of both layers."""
    kind = curvlinops.KFACLinearOperator
    options = dict(fisher_type=fisher, kfac_approx=sharing)
    operator = their_operator(kind, name, loss, **options)
    operator.compute_kronecker_factors()
    state = operator.state_dict()
    inputs, outputs = state["input_covariances"], state["gradient_covariances"]
    return [(inputs[k].numpy(), outputs[k].numpy()) for k in ("first", "last")]


#
# Ours
#


class OurModel(eqx.Module):
    first: Any
    last: Any
    case: Case = eqx.field(static=True)
    linear: bool = eqx.field(static=True)

    def __call__(self, x):
        h = over(self.first, x, len(self.case.shape) if self.case.is_convolution else 1)
        return over(self.last, self.case.between(h if self.linear else jnp.tanh(h)), 1)


def over(layer, x, axes):
    for _ in range(x.ndim - axes):
        layer = jax.vmap(layer)
    return layer(x)


def with_their_parameters(layer, theirs):
    weight, bias = (jnp.asarray(p.detach().numpy()) for p in theirs.parameters())
    new = weight, bias.reshape(layer.bias.shape)
    return eqx.tree_at(lambda layer: (layer.weight, layer.bias), layer, new)


def our_model(name, linear=False, block=None):
    case, theirs, key = cases[name], their_model(name, linear), jax.random.key(0)
    if case.is_convolution:
        out = 2 * case.groups
        first = eqx.nn.Conv2d(2, out, 2, groups=case.groups, **window, key=key)
    else:
        first = eqx.nn.Linear(3, 4, key=key)
    last = eqx.nn.Linear(case.width, C, key=key)
    model = OurModel(
        with_their_parameters(first, theirs.first),
        with_their_parameters(last, theirs.last),
        case,
        linear,
    )
    return kfac.convert(model, block)


def objective(loss):
    return lambda model, x, y: losses[loss].ours(model(x), y)


@eqx.filter_jit
def collect(loss, fisher, trained, frozen, x, y):
    def loss_fn(trained, x, y):
        return objective(loss)(eqx.combine(trained, frozen), x, y)

    return kfac.curvature(loss_fn, fisher)(trained, x, y)


@ft.cache
def our_curvature(kind, name, loss, fisher, sharing, linear=False, train="all"):
    """The factors of both layers, and the part of the model that they are of."""
    model = our_model(name, linear, kind(sharings[sharing]))

    def is_trained(path, leaf):
        name = getattr(path[-1], "name", "")
        return eqx.is_inexact_array(leaf) and train in ("all", name)

    mask = jax.tree_util.tree_map_with_path(is_trained, model)
    trained, frozen = eqx.partition(model, mask)
    x, y = map(jnp.asarray, data(name, loss))
    curvature = collect(loss, fishers[fisher], trained, frozen, x, y)
    return (curvature.first, curvature.last), curvature, trained


def our_factors(*args):
    """`(A, G)` of both layers."""
    factors, *_ = our_curvature(kfac.Kronecker, *args)
    return [(f.input_factor, f.output_factor) for f in factors]


def our_blocks(kind, *args, train="all", **kwargs):
    """The matrix of both blocks, in the order of their vectors: weight, bias."""
    factors, *_ = our_curvature(kind, *args, train=train, **kwargs)
    return scipy.linalg.block_diag(*(dense(f, joint=train == "all") for f in factors))


def dense(factors, joint):
    """The matrix of one block; from the canonical order, where every row of the weight
    ends with its bias, if the two are `joint`."""
    if isinstance(factors, kfac.factors.EKFACFactors):
        Q = np.kron(factors.output_vectors, factors.input_vectors)
        matrix = Q * np.ravel(factors.eigenvalues) @ Q.T
        shape = factors.eigenvalues.shape
    else:
        A, G = factors.input_factor, factors.output_factor
        matrix, shape = np.kron(G, A), (len(G), len(A))
    index = np.arange(len(matrix)).reshape(shape)
    order = np.concatenate([index[:, :-1].ravel(), index[:, -1]])
    return matrix[np.ix_(order, order)] if joint else matrix


@eqx.filter_jit
def as_matrix(kind, loss, model, x, y):
    return kind(objective(loss), model, x, y).as_matrix()


@ft.cache
def our_matrix(kind, name, loss, linear=False):
    x, y = map(jnp.asarray, data(name, loss))
    return np.asarray(as_matrix(kind, loss, our_model(name, linear), x, y))


def sizes(name):
    """Of the leaves: weight and bias of the first layer, of the last."""
    return [p.numel() for p in their_model(name).parameters()]


def block_diagonal(matrix, labels):
    return np.where(np.equal.outer(labels, labels), matrix, 0)


def layers(matrix, name):
    """The matrix without what couples two layers."""
    return block_diagonal(matrix, np.repeat([0, 0, 1, 1], sizes(name)))


#
# Factors and blocks
#


kronecker = kfac.Kronecker, curvlinops.KFACLinearOperator
corrected = kfac.EKFAC, curvlinops.EKFACLinearOperator
shared = [
    ("pooled tokens", "expand"),
    ("pooled tokens", "reduce"),
    ("convolution", "expand"),
    ("convolution", "reduce"),
]
alone = [("vectors", "expand"), ("pooled convolution", "reduce"), *shared]
every_token = [(name, sharing) for name in several_terms for sharing in sharings]
combinations = [(loss, fisher) for loss in losses for fisher in fishers]
alike = [
    *[(n, loss, f, s) for n, s in alone for loss, f in combinations],
    *[(n, loss, "empirical", s) for n, s in every_token for loss in losses],
    *[("tokens", loss, "type-2", "expand") for loss in losses],
]


@pytest.mark.parametrize("setting", alike, ids="-".join)
def test_factors(setting):
    _, loss, fisher, _ = setting
    scale = losses[loss].of(fisher)
    pairs = zip(our_factors(*setting), their_factors(*setting), strict=True)
    for (A, G), (their_A, their_G) in pairs:
        assert error(A, their_A) < 1e-12
        assert error(scale * G, their_G) < 1e-12
    found = our_blocks(kronecker[0], *setting)
    assert error(scale * found, their_blocks(kronecker[1], *setting)) < 1e-12


corrected_alike = [
    (name, loss, fisher, sharing)
    for name, sharing in alone
    for loss, fisher in [("softmax", "type-2"), ("squared", "empirical")]
]


@pytest.mark.parametrize("setting", corrected_alike, ids="-".join)
def test_corrected_eigenvalues(setting):
    _, loss, fisher, _ = setting
    found = losses[loss].of(fisher) * our_blocks(corrected[0], *setting)
    assert error(found, their_blocks(corrected[1], *setting)) < 1e-10


@pytest.mark.parametrize("name", ["vectors", "convolution"])
@pytest.mark.parametrize("ours, theirs", [kronecker, corrected])
def test_weights_and_biases_apart(ours, theirs, name):
    setting = name, "softmax", "type-2", "expand"
    expected = their_blocks(theirs, *setting, separate_weight_and_bias=True)
    labels = np.repeat([0, 1, 0, 1], sizes(name))
    for label, train in enumerate(["weight", "bias"]):
        part = np.ix_(labels == label, labels == label)
        assert error(our_blocks(ours, *setting, train=train), expected[part]) < 1e-10
    leaves = np.repeat(range(4), sizes(name))
    found = block_diagonal(our_blocks(ours, *setting), leaves)
    if ours is kfac.Kronecker:
        assert error(found, expected) < 1e-12
    else:
        assert error(found, expected) > 1e-2


#
# Damped inverses
#


dampings = {
    "exact": (kfac.Kronecker, kfac.Eigh(), dict(use_exact_damping=True)),
    "factored": (
        kfac.Kronecker,
        kfac.Cholesky(),
        dict(use_heuristic_damping=True, min_damping=0.0),
    ),
    "corrected": (kfac.EKFAC, kfac.Eigh(), dict(use_exact_damping=True)),
}


@eqx.filter_jit
def matrix_and_inverse(curvature, model, damping, solver):
    operator = kfac.analysis.BlockDiagonalOperator(curvature, model)
    return operator.as_matrix(), operator.inverse(damping, solver).as_matrix()


@quiet
def their_inverse(damping, setting):
    name, loss, fisher, sharing = setting
    kind = dict([kronecker, corrected])[dampings[damping][0]]
    options = dict(fisher_type=fisher, kfac_approx=sharing)
    operator = their_operator(kind, name, loss, **options)
    if damping == "corrected":
        operator.compute_eigenvalue_correction()
    inverse = curvlinops.KFACInverseLinearOperator(
        operator, 0.01 * losses[loss].of(fisher), **dampings[damping][2]
    )
    return matrix_of(inverse, sum(sizes(name)))


@pytest.mark.parametrize("damping", dampings)
@pytest.mark.parametrize(
    "setting",
    [
        ("vectors", "softmax", "type-2", "expand"),
        ("pooled convolution", "squared", "type-2", "reduce"),
    ],
    ids="-".join,
)
def test_damped_inverses(setting, damping):
    kind, solver, _ = dampings[damping]
    _, curvature, model = our_curvature(kind, *setting)
    arguments = curvature, model, jnp.array(0.01), solver
    matrix, inverse = matrix_and_inverse(*arguments)
    assert error(matrix, our_blocks(kind, *setting)) < 1e-12
    found = inverse / losses[setting[1]].scale
    assert error(found, their_inverse(damping, setting)) < 1e-10
    for other in dampings:
        assert other == damping or error(found, their_inverse(other, setting)) > 1e-3


#
# Exact matrices
#


operators = {
    "Gauss-Newton": (
        kfac.analysis.GaussNewtonOperator,
        curvlinops.GGNLinearOperator,
        "scale",
    ),
    "Fisher": (kfac.analysis.FisherOperator, curvlinops.GGNLinearOperator, "scale"),
    "Hessian": (kfac.analysis.HessianOperator, curvlinops.HessianLinearOperator, "scale"),
    "empirical": (
        kfac.analysis.EmpiricalFisherOperator,
        curvlinops.EFLinearOperator,
        "empirical_scale",
    ),
}


@pytest.mark.parametrize("operator", operators)
@pytest.mark.parametrize("loss", losses)
@pytest.mark.parametrize("name", ["vectors", "mixed tokens", "convolution"])
def test_operators(name, loss, operator):
    ours, theirs, scale = operators[operator]
    found = getattr(losses[loss], scale) * our_matrix(ours, name, loss)
    assert error(found, their_matrix(theirs, name, loss)) < 1e-12


@pytest.mark.parametrize("loss", losses)
@pytest.mark.parametrize("name", ["vectors", "mixed tokens", "convolution"])
def test_operators_of_another_kind_differ(name, loss):
    for a, (_, theirs, scale) in operators.items():
        expected = their_matrix(theirs, name, loss)
        for b, (ours, other, _) in operators.items():
            found = getattr(losses[loss], scale) * our_matrix(ours, name, loss)
            assert theirs is other or error(found, expected) > 1e-2, (a, b)


@pytest.mark.parametrize("loss", losses)
@pytest.mark.parametrize("name", ["vectors", "mixed tokens"])
def test_sampled_fisher(name, loss):
    """Of many samples, theirs comes close to the Fisher, and not to the empirical one."""
    options = dict(mc_samples=4000, seed=0)
    sampled = their_matrix(curvlinops.FisherMCLinearOperator, name, loss, **options)
    scale = losses[loss].scale
    assert (
        error(sampled, scale * our_matrix(kfac.analysis.FisherOperator, name, loss))
        < 0.05
    )
    assert (
        error(
            sampled, scale * our_matrix(kfac.analysis.EmpiricalFisherOperator, name, loss)
        )
        > 0.1
    )


#
# What must differ
#


@pytest.mark.parametrize("fisher", fishers)
@pytest.mark.parametrize("loss", losses)
@pytest.mark.parametrize("name, sharing", shared)
def test_expand_and_reduce_differ(name, sharing, loss, fisher):
    (other,) = sharings.keys() - {sharing}
    found = losses[loss].of(fisher) * our_blocks(
        kfac.Kronecker, name, loss, fisher, other
    )
    assert error(found, their_blocks(kronecker[1], name, loss, fisher, sharing)) > 1e-2


@pytest.mark.parametrize("loss", losses)
@pytest.mark.parametrize("name, sharing", alone)
def test_fisher_and_empirical_differ(name, sharing, loss):
    for a, b in [("type-2", "empirical"), ("empirical", "type-2")]:
        expected = their_blocks(kronecker[1], name, loss, b, sharing)
        for scale in (losses[loss].scale, losses[loss].empirical_scale):
            found = scale * our_blocks(kronecker[0], name, loss, a, sharing)
            assert error(found, expected) > 1e-2


@pytest.mark.parametrize("setting", corrected_alike, ids="-".join)
def test_correction_matters(setting):
    _, loss, fisher, _ = setting
    found = losses[loss].of(fisher) * our_blocks(kfac.EKFAC, *setting)
    assert error(found, their_blocks(kronecker[1], *setting)) > 1e-3


#
# Where the Gauss-Newton matrix is known, or a dense computation decides
#


def exact_layers(name):
    """Theirs, of a network without activations, with squared error."""
    return layers(their_matrix(curvlinops.GGNLinearOperator, name, "squared", True), name)


@pytest.mark.parametrize(
    "name, sharing, ours_is_exact, theirs_is_exact",
    [
        ("vectors", "expand", True, True),
        ("tokens", "expand", True, True),
        ("pooled tokens", "reduce", True, True),
        ("pooled convolution", "reduce", True, True),
        ("pooled tokens", "expand", False, False),
        ("pooled convolution", "expand", False, False),
        ("repeated tokens", "reduce", True, False),
    ],
)
def test_linear_networks(name, sharing, ours_is_exact, theirs_is_exact):
    """Where an example has the same input at all positions, reduce leaves out nothing,
    whatever is mixed and wherever there are losses."""
    setting = name, "squared", "type-2", sharing
    expected = exact_layers(name)
    found = 2 / C * our_blocks(kfac.Kronecker, *setting, linear=True)
    theirs = their_blocks(kronecker[1], *setting, linear=True)
    for matrix, exact in [(found, ours_is_exact), (theirs, theirs_is_exact)]:
        assert (
            error(matrix, expected) < 1e-12 if exact else error(matrix, expected) > 1e-2
        )


@ft.cache
def jacobian_at_first_layer(name):
    """How the outputs change with what the first layer puts out at every position:
    `[terms, C, positions, d]`, the terms of all examples, the positions of its own."""
    model = our_model(name)
    x = jnp.asarray(data(name, "squared")[0])

    def outputs(h):
        return over(model.last, model.case.between(jnp.tanh(h[None])), 1)[0]

    h = over(model.first, x, 1)
    return np.concatenate(jax.vmap(jax.jacobian(outputs))(h))


@pytest.mark.parametrize("name, sharing", every_token)
def test_several_terms(name, sharing):
    """With squared error, `G` is the mean over terms of `Jᵀ J`, of every position by
    itself or of their sum."""
    J = jacobian_at_first_layer(name)
    J = J.sum(axis=2, keepdims=True) if sharing == "reduce" else J
    expected = np.einsum("tcpd,tcpe->de", J, J) / len(J)
    setting = name, "squared", "type-2", sharing
    (A, G), (their_A, their_G) = our_factors(*setting)[0], their_factors(*setting)[0]
    assert error(A, their_A) < 1e-12
    assert error(G, expected) < 1e-12
    distance = error(their_G, 2 / C * expected)
    right = (name, sharing) == ("tokens", "expand")
    assert distance < 1e-12 if right else distance > 1e-2


def test_groups():
    """Of a linear network, ours are the Gauss-Newton matrices of every group."""
    setting = "groups", "squared", "type-2", "reduce"
    (factors, _), *_ = our_curvature(kfac.Kronecker, *setting, linear=True)
    theirs = their_blocks(kronecker[1], *setting, linear=True)
    weight, bias, *_ = sizes("groups")
    labels = np.concatenate([np.repeat([0, 1], n // 2) for n in (weight, bias)])
    for group in range(2):
        (members,) = np.nonzero(labels == group)
        part = np.ix_(members, members)
        expected = exact_layers("groups")[part]
        own = jax.tree_util.tree_map(lambda a: a[group], factors)
        assert error(2 / C * dense(own, joint=True), expected) < 1e-12
        assert error(theirs[part], expected) > 1e-2
