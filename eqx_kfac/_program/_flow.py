"""How values flow through a traced function: what each depends on, whether it is known to
be zero, and which are the same expressions."""

import functools as ft
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax.core import Tracer
from jax.extend.core import JaxprEqn


class Value(NamedTuple):
    """What is known of a value: expressions with the same `key` are the same; `sources`
    are the bits of what it depends on."""

    key: int
    sources: int = 0


ZERO = Value(0)  # Zero for certain. (What it depends on does not matter.)


def all_sources(values: Iterable[Value]) -> int:
    """What any of some values depends on."""
    return ft.reduce(operator.or_, (v.sources for v in values), 0)


class Around(NamedTuple):
    """What is around an operation."""

    loops: tuple[int | None, ...] = ()  # How many times they go round, if known,
    along: tuple[int, ...] = ()  # and the sources of what they slice that is not kept.
    apart: bool = False  # A function whose derivative is not that of its operations,
    pushed: bool = False  # or one that says itself how tangents are pushed forward.

    def within(self, length: int | None, along: int) -> "Around":
        """The same in one more loop."""
        loops, others = (*self.loops, length), (*self.along, along)
        return self._replace(loops=loops, along=others)


class Expressions:
    """All expressions so far; which of them are known not to be negative, and which have
    zeros among their entries that are not told of: how many, does not matter yet."""

    def __init__(self):
        self.keys = {}
        self.nonnegative = set()
        self.padded = set()


class Flow:
    """Follows values through jaxprs. `visit(eqn, values, around)` gives the values of an
    operation's results and something to be kept in `seen`, or `None` for what is known of
    every operation; `kept` are the sources that a value has even if it has no derivative
    in them. Flows that share their `expressions` give equal ones the same key."""

    def __init__(self, expressions: Expressions, visit: Callable, kept: int):
        self.expressions = expressions
        self.visit = visit
        self.kept = kept
        self.seen = []
        self.opaque = False  # Whether any operation could not be looked into.

    def source(self, *name: Any, sources: int = 0) -> Value:
        """A value that is known by its name."""
        keys = self.expressions.keys
        return Value(keys.setdefault(name, len(keys) + 1), sources)

    def follow(
        self,
        jaxpr: Any,
        consts: Sequence[Value],
        inputs: Sequence[Value],
        around: Around = Around(),
    ) -> list[Value]:
        """The values that a jaxpr returns."""
        known = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *inputs]))

        def read(atom):
            return self._literal(atom) if hasattr(atom, "val") else known[atom]

        for eqn in jaxpr.eqns:
            values = [read(atom) for atom in eqn.invars]
            results = self._results(eqn, values, around)
            known.update(zip(eqn.outvars, results, strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    def constant(self, value: Any, sources: int = 0) -> Value:
        """An array that is not traced: known by what is in it, if that is not much."""
        if isinstance(value, Tracer):
            return self.source("tracer", id(value), sources=sources)
        kind = np.shape(value), str(getattr(value, "dtype", type(value)))
        plain = isinstance(value, (np.ndarray, np.generic, int, float, bool))
        if not plain or np.size(value) > 2**16:
            return self.source("array", *kind, sources=sources)
        array = np.asarray(value)
        if not array.any() and array.dtype.kind in "fiub":
            return ZERO
        return self.source("constant", *kind, array.tobytes(), sources=sources)

    def _literal(self, atom: Any) -> Value:
        if np.ndim(atom.val) == 0 and not np.any(atom.val):
            return ZERO
        return self.source("literal", str(atom.aval), repr(atom.val))

    def _results(self, eqn: JaxprEqn, values: list[Value], around: Around) -> list[Value]:
        visited = self.visit(eqn, values, around)
        if visited is not None:
            results, seen = visited
            self.seen += seen
            return results
        name, params = eqn.primitive.name, eqn.params
        if name == "scan":
            return self._scan(eqn, values, around)
        if name == "while":
            return self._while(params, values, around)
        if name == "cond":
            return self._cond(params, values, around)
        inner = list(_jaxprs(list(params.values())))
        if len(inner) == 1 and len(_open(inner[0]).invars) == len(values):
            apart = around.apart or name == "custom_vjp_call"
            pushed = around.pushed or name == "custom_jvp_call"
            inside = around._replace(apart=apart, pushed=pushed)
            return self._closed(inner[0], values, inside)
        if inner or any(map(_is_program, params.values())):
            return self._unknown(eqn, values, inner)
        return self._operation(eqn, values)

    def _closed(self, jaxpr: Any, values: list[Value], around: Around) -> list[Value]:
        consts = map(self.constant, getattr(jaxpr, "consts", ()))
        return self.follow(_open(jaxpr), list(consts), values, around)

    def _operation(self, eqn: JaxprEqn, values: list[Value]) -> list[Value]:
        name, known = eqn.primitive.name, self.expressions
        zero = [v.key == ZERO.key for v in values]
        if values and _is_zero(name, zero):
            return [ZERO] * len(eqn.outvars)
        if (name in ("add", "add_any") and any(zero)) or (name == "sub" and zero[1]):
            return [values[zero.index(False)]]
        keys = tuple(v.key for v in values)
        padded = [v.key in known.padded for v in values]
        there = [key for key, z in zip(keys, zero, strict=True) if not z]
        if name == "max" and any(zero) and there[0] in known.nonnegative:
            return [values[zero.index(False)]]
        if name == "concatenate" and (any(zero) or any(padded)):
            keys, pads = tuple(there), True
        else:
            pads = all(padded) and values != [] and name in _KEEPS_ZEROS
        sums = padded[:1] == [True] and (
            name == "reduce_sum"
            or (name == "reduce_max" and keys[0] in known.nonnegative)
        )
        shapes = ()
        if not (pads or sums):  # How many zeros there are, matters now.
            unsure = [z or p for z, p in zip(zero, padded, strict=True)]
            pairs = zip(eqn.invars, unsure, strict=True)
            shapes = tuple(str(atom.aval) for atom, u in pairs if u)
        sources = all_sources(values)
        results = []
        avals: list[Any] = [out.aval for out in eqn.outvars]
        for i, aval in enumerate(avals):
            smooth = name not in _FLAT and jnp.issubdtype(aval.dtype, jnp.inexact)
            kept = sources if smooth else sources & self.kept
            parts = "of", name, keys, shapes, _static(eqn.params), i
            results.append(self.source(*parts, sources=kept))
        found = {v.key for v in results}
        if name in ("abs", "square") or (name == "max" and any(zero)):
            known.nonnegative |= found
        if pads:
            known.padded |= found
        return results

    def _unknown(self, eqn: JaxprEqn, values: list[Value], inner: list) -> list[Value]:
        """An operation that is not made of operations that could be followed."""
        self.opaque = True
        apart = Around((None,), (0,), apart=True)
        for jaxpr in inner:
            inputs = [self.source("unknown", i) for i in range(len(_open(jaxpr).invars))]
            self._closed(jaxpr, inputs, apart)
        sources = all_sources(values) & self.kept
        keys = tuple(v.key for v in values if v.key != ZERO.key)
        return [
            self.source("unknown", eqn.primitive.name, keys, i, sources=sources)
            for i in range(len(eqn.outvars))
        ]

    def _scan(self, eqn: JaxprEqn, values: list[Value], around: Around) -> list[Value]:
        params, length = eqn.params, eqn.params["length"]
        m, n = scan_counts(eqn)
        consts, carry, xs = values[:m], values[m : m + n], values[m + n :]
        xs = [self._derived("slice", x) for x in xs]
        sliced = all_sources([x for x in xs if not x.sources & self.kept])
        inside = around.within(length, sliced)

        def body(carry):
            return self._closed(params["jaxpr"], [*consts, *carry, *xs], inside)

        carried, results = self._carried(body, carry, n)
        name = "scan", length, params["reverse"]
        return self._looped(name, carry, carried, results[:n], results[n:])

    def _while(self, params: Any, values: list[Value], around: Around) -> list[Value]:
        m, n = params["cond_nconsts"], params["body_nconsts"]
        of_cond, of_body, carry = values[:m], values[m : m + n], values[m + n :]
        inside = around.within(None, 0)

        def body(carry):
            new = self._closed(params["body_jaxpr"], [*of_body, *carry], inside)
            return new + self._closed(params["cond_jaxpr"], [*of_cond, *carry], inside)

        carried, results = self._carried(body, carry, len(carry))
        new, going = results[: len(carry)], results[len(carry) :]
        return self._looped(("while", going[0].key), carry, carried, new, [])

    def _carried(self, body: Callable, carry: list[Value], n: int) -> tuple[list, list]:
        """What a loop carries, at any time, and what its body then returns."""
        kinds = [v == ZERO for v in carry]
        sources = [v.sources for v in carry]
        start = len(self.seen)
        while True:
            del self.seen[start:]
            number = iter(range(n))
            carried = [
                ZERO if zero else self.source("carry", next(number), sources=bits)
                for zero, bits in zip(kinds, sources, strict=True)
            ]
            results = body(carried)
            new_kinds = [z and r == ZERO for z, r in zip(kinds, results)]
            new_sources = [s | r.sources for s, r in zip(sources, results)]
            if (new_kinds, new_sources) == (kinds, sources):
                return carried, results
            kinds, sources = new_kinds, new_sources

    def _looped(
        self, name: tuple, carry: list, carried: list, new: list, ys: list
    ) -> list[Value]:
        """The results of a loop, known by everything in it that is not zero."""
        there = [i for i, v in enumerate(carried) if v != ZERO]
        loop = (*name, tuple((carry[i].key, new[i].key) for i in there))
        out = [ZERO] * len(carried)
        for place, i in enumerate(there):
            sources = carry[i].sources | new[i].sources
            out[i] = self.source("loop", loop, place, sources=sources)
        return out + [self._derived(("loop", loop), y) for y in ys]

    def _derived(self, how: Any, value: Value) -> Value:
        if value == ZERO:
            return value
        return self.source("derived", how, value.key, sources=value.sources)

    def _cond(self, params: Any, values: list[Value], around: Around) -> list[Value]:
        index, *operands = values
        branches = [self._closed(b, operands, around) for b in params["branches"]]
        results = []
        for choices in zip(*branches, strict=True):
            if all(c == ZERO for c in choices):
                results.append(ZERO)
                continue
            sources = index.sources & self.kept | all_sources(choices)
            keys = tuple(c.key for c in choices)
            results.append(self.source("cond", index.key, keys, sources=sources))
        return results


_ZERO_OF_ZEROS = frozenset(
    "abs add add_any all_gather broadcast_in_dim concatenate convert_element_type copy "
    "copy_p cumsum dot_general dynamic_slice dynamic_update_slice expand_dims gather "
    "integer_pow max min mul neg optimization_barrier pad pcast psum pvary "
    "reduce_max reduce_min reduce_precision reduce_sum reshape reshard rev scatter-add "
    "scatter_add select_n sharding_constraint sign slice split sqrt square squeeze "
    "stop_gradient sub transpose".split()
)
# What makes zeros of zeros, entry by entry.
_KEEPS_ZEROS = frozenset(
    "abs convert_element_type copy integer_pow mul neg sign sqrt square".split()
)
# Without a derivative.
_FLAT = frozenset("stop_gradient sign floor ceil round".split())
# Zero, if the first operand is: the others only say where.
_PLACED = frozenset("gather dynamic_slice".split())


def _is_zero(name: str, zero: list[bool]) -> bool:
    """Whether the results of an operation are, given which of its operands are."""
    if all(zero) and name in _ZERO_OF_ZEROS:
        return True
    if name in ("mul", "dot_general", "conv_general_dilated"):
        return any(zero)
    return zero[0] and name in ("div", "integer_pow", *_PLACED)


def scan_counts(eqn: JaxprEqn) -> tuple[int, int]:
    """The numbers of constants and of values carried, told from shapes: JAX's own
    parameters for them change, but what a scan slices or stacks has one more axis."""
    body = _open(eqn.params["jaxpr"])

    def equal(outer, inner):
        return [o.aval.ndim == i.aval.ndim for o, i in zip(outer, inner, strict=True)]

    carried = sum(equal(eqn.outvars, body.outvars))
    return sum(equal(eqn.invars, body.invars)) - carried, carried


def _jaxprs(value: Any) -> Iterator[Any]:
    """The jaxprs among the parameters of an operation."""
    if hasattr(value, "eqns") or hasattr(value, "jaxpr"):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _jaxprs(item)


def _open(jaxpr: Any) -> Any:
    return getattr(jaxpr, "jaxpr", jaxpr)


def opened(jaxpr: Any) -> tuple[Any, Sequence[Any]]:
    """A jaxpr, closed or not, and its constants."""
    return _open(jaxpr), getattr(jaxpr, "consts", ())


def _is_program(value: Any) -> bool:
    """Whether a parameter of an operation is a function in disguise."""
    return isinstance(value, jtu.PyTreeDef) or (
        callable(value) and not isinstance(value, (type, np.dtype, jnp.dtype))
    )


def _static(value: Any) -> Any:
    """A parameter of an operation, as something to compare."""
    if isinstance(value, dict):
        return tuple((k, _static(v)) for k, v in sorted(value.items()))
    if isinstance(value, (tuple, list)):
        return tuple(map(_static, value))
    if isinstance(value, (int, float, complex, str, bytes, type(None))):
        return value
    if isinstance(value, np.ndarray):
        return value.shape, value.tobytes()
    return type(value).__name__ if _is_program(value) else str(value)
