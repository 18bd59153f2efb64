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

- Several loss terms per example, exact ("type-2") Fisher: they pull back the columns of
  all terms at once, and what is squared, or summed over positions and then squared, has
  products of different terms in it. This is right where nothing sees two terms: expand,
  if the model does not mix positions. Ours pulls back one term at a time.
- Grouped convolutions: they average the inputs over the groups, and have one Kronecker
  product for all channels; for us, groups are layers side by side.
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

    @property
    def is_convolution(self):
        return len(self.shape) == 3


def mix(h):
    return h + 2 * h.mean(1)[:, None]


cases = {
    "vectors": Case((3,), 4),
    "tokens": Case((T, 3), 4, terms=(T,)),
    "mixed tokens": Case((T, 3), 4, mix, terms=(T,)),
    "pooled tokens": Case((T, 3), 4, lambda h: h.mean(1)),
    "convolution": Case((2, 5, 4), 12, lambda h: h.reshape(len(h), -1)),
    "pooled convolution": Case((2, 5, 4), 2, lambda h: h.mean((2, 3))),
    "groups": Case((2, 5, 4), 4, lambda h: h.mean((2, 3)), groups=2),
}
ungrouped = [name for name in cases if cases[name].groups == 1]
shared = [name for name in ungrouped if name != "vectors"]
several_terms = [name for name in cases if cases[name].terms]
one_term = [name for name in ungrouped if name not in several_terms]


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
            arguments = dict(stride=(2, 1), padding=(1, 0), dilation=(1, 2))
            out = 2 * case.groups
            self.first = torch.nn.Conv2d(2, out, 2, groups=case.groups, **arguments)
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
    parameters = [p for p in model.parameters() if p.requires_grad]
    if kind in (curvlinops.KFACLinearOperator, curvlinops.EKFACLinearOperator):
        options = dict(separate_weight_and_bias=False) | options
    options = dict(check_deterministic=False) | options
    return kind(model, losses[loss].theirs, parameters, [(x, y)], **options)


@quiet
def matrix_of(operator, size):
    return (operator @ torch.eye(size, dtype=torch.float64)).detach().numpy()


@quiet
def their_matrix(*args, **options):
    size = sum(p.numel() for p in their_model(args[1]).parameters())
    return matrix_of(their_operator(*args, **options), size)


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
        arguments = dict(stride=(2, 1), padding=(1, 0), dilation=(1, 2))
        out = 2 * case.groups
        first = eqx.nn.Conv2d(2, out, 2, groups=case.groups, **arguments, key=key)
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
def curvature_and_matrix(loss, fisher, trained, frozen, x, y):
    def loss_fn(trained, x, y):
        return objective(loss)(eqx.combine(trained, frozen), x, y)

    curvature = kfac.curvature(loss_fn, fisher)(trained, x, y)
    return curvature, kfac.BlockDiagonalOperator(curvature, trained).as_matrix()


@ft.cache
def ours(kind, name, loss, fisher, sharing, linear=False, train="all"):
    """The curvature and the matrix that it denotes."""
    model = our_model(name, linear, kind(sharings[sharing]))
    keep = {
        "all": lambda path: True,
        "weights": lambda path: path[-1].name == "weight",
        "biases": lambda path: path[-1].name == "bias",
    }[train]
    mask = jax.tree_util.tree_map_with_path(
        lambda path, leaf: eqx.is_inexact_array(leaf) and keep(path), model
    )
    trained, frozen = eqx.partition(model, mask)
    x, y = map(jnp.asarray, data(name, loss))
    return curvature_and_matrix(loss, fishers[fisher], trained, frozen, x, y)


def our_blocks(*args, **kwargs):
    return np.asarray(ours(*args, **kwargs)[1])


def our_factors(*args):
    curvature, _ = ours(kfac.Kronecker, *args)
    layers = curvature.first, curvature.last
    return [(f.input_factor, f.output_factor) for f in layers]


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


def block_diagonal(matrix, sizes):
    labels = np.repeat(np.arange(len(sizes)), sizes)
    return np.where(labels[:, None] == labels, matrix, 0)


def layers(matrix, name):
    """The matrix without what couples two layers."""
    first, bias, *rest = sizes(name)
    return block_diagonal(matrix, [first + bias, sum(rest)])


#
# Factors and blocks
#


def same_columns(name, fisher):
    """Whether they pull back what we do, however positions are summed."""
    return name not in several_terms or fisher == "empirical"


kronecker = kfac.Kronecker, curvlinops.KFACLinearOperator
corrected = kfac.EKFAC, curvlinops.EKFACLinearOperator
settings = [
    (name, loss, fisher, sharing)
    for name in ungrouped
    for loss in losses
    for fisher in fishers
    for sharing in sharings
    if sharing == "expand" or name in shared
]
alike = [s for s in settings if same_columns(s[0], s[2])]
also_alike = [("tokens", loss, "type-2", "expand") for loss in losses]


@pytest.mark.parametrize("setting", alike + also_alike, ids="-".join)
def test_factors(setting):
    _, loss, fisher, _ = setting
    scale = losses[loss].of(fisher)
    pairs = zip(our_factors(*setting), their_factors(*setting), strict=True)
    for (A, G), (their_A, their_G) in pairs:
        assert error(A, their_A) < 1e-12
        assert error(scale * G, their_G) < 1e-12
    found = our_blocks(kronecker[0], *setting)
    assert error(scale * found, their_blocks(kronecker[1], *setting)) < 1e-12


@pytest.mark.parametrize(
    "setting", [s for s in settings if s[0] in one_term], ids="-".join
)
def test_corrected_eigenvalues(setting):
    _, loss, fisher, _ = setting
    found = losses[loss].of(fisher) * our_blocks(corrected[0], *setting)
    assert error(found, their_blocks(corrected[1], *setting)) < 1e-10


@pytest.mark.parametrize("name", ["vectors", "pooled convolution"])
@pytest.mark.parametrize("ours, theirs", [kronecker, corrected])
def test_weights_and_biases_apart(ours, theirs, name):
    setting = name, "softmax", "type-2", "expand"
    found = block_diagonal(our_blocks(ours, *setting), sizes(name))
    expected = their_blocks(theirs, *setting, separate_weight_and_bias=True)
    labels = np.repeat([0, 1, 0, 1], sizes(name))
    for label, train in enumerate(["weights", "biases"]):
        part = np.ix_(labels == label, labels == label)
        assert error(our_blocks(ours, *setting, train=train), expected[part]) < 1e-10
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
def inverse_matrix(curvature, model, damping, solver):
    operator = kfac.BlockDiagonalOperator(curvature, model)
    return operator.inverse(damping, solver).as_matrix()


def our_inverse(damping, setting):
    block, solver, _ = dampings[damping]
    model = our_model(setting[0], block=block(sharings[setting[3]]))
    curvature, _ = ours(block, *setting)
    return np.asarray(inverse_matrix(curvature, model, jnp.array(0.01), solver))


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
@pytest.mark.parametrize("loss", losses)
@pytest.mark.parametrize("name", ["vectors", "pooled convolution"])
def test_damped_inverses(name, loss, damping):
    setting = name, loss, "type-2", "reduce"
    found = our_inverse(damping, setting) / losses[loss].scale
    assert error(found, their_inverse(damping, setting)) < 1e-10
    for other in dampings:
        different = their_inverse(other, setting)
        assert other == damping or error(found, different) > 1e-3


#
# Exact matrices
#


operators = {
    "Gauss-Newton": (kfac.GaussNewton, curvlinops.GGNLinearOperator, "scale"),
    "Fisher": (kfac.Fisher, curvlinops.GGNLinearOperator, "scale"),
    "Hessian": (kfac.Hessian, curvlinops.HessianLinearOperator, "scale"),
    "empirical": (kfac.EmpiricalFisher, curvlinops.EFLinearOperator, "empirical_scale"),
}


@pytest.mark.parametrize("operator", operators)
@pytest.mark.parametrize("loss", losses)
@pytest.mark.parametrize("name", cases)
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
    options = dict(mc_samples=20_000, seed=0)
    sampled = their_matrix(curvlinops.FisherMCLinearOperator, name, loss, **options)
    scale = losses[loss].scale
    assert error(sampled, scale * our_matrix(kfac.Fisher, name, loss)) < 0.02
    assert error(sampled, scale * our_matrix(kfac.EmpiricalFisher, name, loss)) > 0.1


#
# What must differ
#


@pytest.mark.parametrize("fisher", fishers)
@pytest.mark.parametrize("loss", losses)
@pytest.mark.parametrize("name", shared)
def test_expand_and_reduce_differ(name, loss, fisher):
    scale = losses[loss].of(fisher)
    for a, b in [("expand", "reduce"), ("reduce", "expand")]:
        found = scale * our_blocks(kronecker[0], name, loss, fisher, a)
        assert error(found, their_blocks(kronecker[1], name, loss, fisher, b)) > 1e-2


@pytest.mark.parametrize("sharing", sharings)
@pytest.mark.parametrize("loss", losses)
@pytest.mark.parametrize("name", one_term)
def test_fisher_and_empirical_differ(name, loss, sharing):
    for a, b in [("type-2", "empirical"), ("empirical", "type-2")]:
        expected = their_blocks(kronecker[1], name, loss, b, sharing)
        for scale in (losses[loss].scale, losses[loss].empirical_scale):
            found = scale * our_blocks(kronecker[0], name, loss, a, sharing)
            assert error(found, expected) > 1e-2


@pytest.mark.parametrize("loss", losses)
@pytest.mark.parametrize("name", one_term)
def test_correction_matters(name, loss):
    setting = name, loss, "type-2", "expand"
    found = losses[loss].scale * our_blocks(corrected[0], *setting)
    assert error(found, their_blocks(kronecker[1], *setting)) > 1e-2


#
# Exact where theory says so: theirs, and ours
#


@pytest.mark.parametrize(
    "name, sharing, exact",
    [
        ("vectors", "expand", True),
        ("tokens", "expand", True),
        ("pooled tokens", "reduce", True),
        ("pooled convolution", "reduce", True),
        ("pooled tokens", "expand", False),
        ("pooled convolution", "expand", False),
    ],
)
def test_linear_networks(name, sharing, exact):
    """Without activations, with squared error, both are the Gauss-Newton matrix."""
    setting = name, "squared", "type-2", sharing
    options = dict(fisher_type="type-2", kfac_approx=sharing, linear=True)
    expected = their_matrix(
        curvlinops.GGNLinearOperator, name, "squared", linear=True
    )
    expected = layers(expected, name)
    theirs = their_matrix(kronecker[1], name, "squared", **options)
    found = 2 / C * our_blocks(kronecker[0], *setting, linear=True)
    assert (error(theirs, expected) < 1e-12) == exact
    assert (error(found, expected) < 1e-12) == exact
    assert error(found, theirs) < 1e-12


#
# Where they differ, a dense computation decides
#


def dense_blocks(kind, name, loss, linear=False):
    """By autodiff alone, in the scale of ours: checked against both in
    `test_operators`."""
    return layers(our_matrix(kind, name, loss, linear), name)


@pytest.mark.parametrize("sharing", sharings)
@pytest.mark.parametrize("name", several_terms)
def test_several_terms(name, sharing):
    """The exact Fisher where every token has a term."""
    setting = name, "squared", "type-2", sharing
    (_, G), (_, last_G) = our_factors(*setting)
    (_, their_G), (_, their_last_G) = their_factors(*setting)
    expected = dense_output_factors(name, sharing)
    for found, want in zip([G, last_G], expected, strict=True):
        assert error(found, want) < 1e-12
    right = (name, sharing) == ("tokens", "expand")
    assert (error(their_G, 2 / C * expected[0]) < 1e-12) == right
