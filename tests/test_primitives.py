"""JAX's primitives and their parameters have the names by which programs are read. (A
name that JAX has dropped would not be an error there, but an operation of which nothing
is known.)"""

from itertools import chain

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from eqx_kfac._program import _interpreter as interpreter, opened, scan_counts
from eqx_kfac._program._jaxpr import equations, jaxprs


X = jnp.ones((2, 2))
ROW = jnp.ones(2)


@jax.custom_jvp
def with_jvp(x):
    return x


with_jvp.defjvp(lambda primals, tangents: (primals[0], tangents[0]))


@jax.custom_vjp
def with_vjp(x):
    return x


with_vjp.defvjp(lambda x: (x, None), lambda _, ct: (ct,))


def scattered(x):
    return jax.grad(lambda x: jnp.sum(jnp.sin(x[np.array([0])])))(x)


def over_devices(fn):
    mesh = jax.make_mesh((1,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("i")
    return jax.shard_map(fn, mesh=mesh, in_specs=spec, out_specs=spec)


def resharded(x):
    mesh = jax.make_mesh((1,), ("i",), axis_types=(jax.sharding.AxisType.Explicit,))
    spec = jax.sharding.PartitionSpec("i")
    return jax.sharding.reshard(x, jax.sharding.NamedSharding(mesh, spec))


def constrained(x):
    mesh = jax.make_mesh((1,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    place = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    return lax.with_sharding_constraint(x, place)


# Of several names for the same, of different versions of JAX, any one will do.
MADE_BY = {
    ("abs",): jnp.abs,
    ("add",): lambda x: x + x,
    ("add_any",): lambda x: jax.linear_transpose(lambda x: x * 2 + x * 3, x)(x),
    ("all_gather",): over_devices(lambda x: lax.all_gather(x, "i")[0]),
    ("broadcast_in_dim",): lambda x: jnp.broadcast_to(x, (3, 2, 2)),
    ("ceil",): jnp.ceil,
    ("concatenate",): lambda x: jnp.concatenate([x, x]),
    ("conv_general_dilated",): lambda x: lax.conv(
        x[None, None], x[None, None], (1, 1), "SAME"
    ),
    ("convert_element_type",): lambda x: x.astype(jnp.float16),
    ("copy", "copy_p"): lambda x: jnp.array(x, copy=True),
    ("cumsum",): lambda x: jnp.cumsum(x, axis=0),
    ("div",): lambda x: x / 2,
    ("dot_general",): lambda x: x @ x,
    ("dynamic_slice",): lambda x: lax.dynamic_slice(x, (0, 0), (1, 1)),
    ("dynamic_update_slice",): lambda x: lax.dynamic_update_slice(x, x[:1], (0, 0)),
    ("expand_dims", "broadcast_in_dim", "reshape"): lambda x: jnp.expand_dims(x, 0),
    ("floor",): jnp.floor,
    ("gather",): lambda x: x[jnp.array([0, 1])],
    ("integer_pow",): lambda x: lax.integer_pow(x, 3),
    ("max",): lambda x: jnp.maximum(x, 0),
    ("min",): lambda x: jnp.minimum(x, 0),
    ("mul",): lambda x: x * 2,
    ("neg",): lambda x: -x,
    ("optimization_barrier",): lax.optimization_barrier,
    ("pad",): lambda x: jnp.pad(x, 1),
    ("pcast", "pvary"): over_devices(
        lambda x: x + lax.pcast(jnp.ones((2, 2)), "i", to="varying")
    ),
    ("psum", "psum_invariant"): over_devices(lambda x: x + lax.psum(x, "i")),
    ("reduce_max",): jnp.max,
    ("reduce_min",): jnp.min,
    ("reduce_precision",): lambda x: lax.reduce_precision(x, 8, 7),
    ("reduce_sum",): jnp.sum,
    ("reshape",): lambda x: x.reshape(4),
    ("reshard",): resharded,
    ("rev",): lambda x: lax.rev(x, (0,)),
    ("round",): jnp.round,
    ("scatter-add", "scatter_add"): scattered,
    ("select_n",): lambda x: jnp.where(x > 0, x, 0),
    ("sharding_constraint",): constrained,
    ("sign",): jnp.sign,
    ("slice",): lambda x: lax.slice(x, (0, 0), (1, 1)),
    ("split",): lambda x: jnp.split(x, 2),
    ("sqrt",): jnp.sqrt,
    ("square",): jnp.square,
    ("squeeze",): lambda x: lax.squeeze(x[:1], (0,)),
    ("stop_gradient", "copy"): lax.stop_gradient,
    ("sub",): lambda x: x - 1,
    ("transpose",): lambda x: x.T,
}


def made_by(fn):
    """The names of all primitives in a program, and in the programs in it."""
    return {eqn.primitive.name for eqn in equations(jax.make_jaxpr(fn)(X))}


@pytest.mark.parametrize("names", MADE_BY, ids=lambda names: names[0])
def test_names(names):
    assert {*names} & made_by(MADE_BY[names])
    assert not {*names} & made_by(lambda x: x)


def test_every_name_is_made():
    tables = (
        interpreter._ZERO_OF_ZEROS,
        interpreter._ENTRYWISE,
        interpreter._FLAT,
        interpreter._LOOKUPS,
    )
    assert {*chain(*tables)} <= {*chain(*MADE_BY)}
    assert interpreter._ENTRYWISE <= interpreter._ZERO_OF_ZEROS


def only_equation(fn):
    (eqn,) = jax.make_jaxpr(fn)(X).eqns
    return eqn


def test_scan():
    def fn(x):
        body = lambda carry, row: (carry + ROW @ x, row)
        return lax.scan(body, ROW, x)

    eqn = only_equation(fn)
    assert eqn.primitive.name == "scan"
    assert (eqn.params["length"], eqn.params["reverse"]) == (2, False)
    assert scan_counts(eqn) == (len(eqn.invars) - 2, 1)
    jaxpr, _ = opened(eqn.params["jaxpr"])
    assert len(jaxpr.invars) == len(eqn.invars)


def test_while():
    eqn = only_equation(
        lambda x: lax.while_loop(lambda a: a[0, 0] < 3, lambda a: a + x, x)
    )
    assert eqn.primitive.name == "while"
    assert (eqn.params["cond_nconsts"], eqn.params["body_nconsts"]) == (0, 1)
    body, _ = opened(eqn.params["body_jaxpr"])
    cond, _ = opened(eqn.params["cond_jaxpr"])
    assert (len(body.invars), len(cond.invars)) == (2, 1)


def test_cond():
    fn = lambda x: lax.cond(x[0, 0] > 0, jnp.sin, jnp.cos, x)
    eqn = jax.make_jaxpr(fn)(X).eqns[-1]
    assert eqn.primitive.name == "cond"
    assert len(eqn.params["branches"]) == 2
    # The index comes first, and the branches get all that follows.
    assert all(
        len(opened(b)[0].invars) == len(eqn.invars) - 1 for b in eqn.params["branches"]
    )


@pytest.mark.parametrize("name", ["custom_jvp_call", "custom_vjp_call"])
def test_functions_with_a_derivative(name):
    eqn = only_equation({"custom_jvp_call": with_jvp, "custom_vjp_call": with_vjp}[name])
    assert eqn.primitive.name == name
    (jaxpr,) = jaxprs(eqn)
    assert len(opened(jaxpr)[0].invars) == len(eqn.invars)


def test_literals():
    """Literals are told from variables by having a value."""
    jaxpr = jax.make_jaxpr(lambda x: x * 2.0)(X).jaxpr
    (eqn,) = jaxpr.eqns
    assert [hasattr(atom, "val") for atom in eqn.invars] == [False, True]
