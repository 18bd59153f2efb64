"""An abstract interpreter of jaxprs, which runs two analyses at once.

*Value numbering*: two values with the same number are the same expression of the same
inputs, so that two traces of a function can be compared. *Dependence analysis*: every
value has the set of sources that it depends on, as the bits of a number. What is zero for
certain is known by a number of its own and forgotten in sums: the slots of tags are
zeros, and an expression must not become another one because a model has them.
"""

import functools as ft
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np

from .._jax import Equation, Literal, Tracer


class Value(NamedTuple):
    """What is known of a value: the number of its expression, and the bits of the sources
    that it depends on."""

    expression: int
    sources: int = 0


ZERO = Value(0)  # Zero for certain. (What it depends on does not matter.)


def all_sources(values: Iterable[Value]) -> int:
    """What any of some values depends on."""
    return ft.reduce(operator.or_, (v.sources for v in values), 0)


class Context(NamedTuple):
    """What surrounds an operation.

    **Fields:**

    - `loops`: how many times the loops around it go round, from the outermost; `None`
        where that is not known.
    - `sliced`: for each of these loops, the sources of the arrays that it goes along.
        (Of those that are not tracked: a loop over data is no loop over layers.)
    - `custom_derivative`: whether it is in a function whose derivative is not that of its
        operations.
    - `in_custom_jvp`: whether it is in one that says itself how tangents are pushed
        forward.
    """

    loops: tuple[int | None, ...] = ()
    sliced: tuple[int, ...] = ()
    custom_derivative: bool = False
    in_custom_jvp: bool = False

    def within(self, length: int | None, sliced: int) -> "Context":
        """The context within one more loop."""
        return self._replace(loops=(*self.loops, length), sliced=(*self.sliced, sliced))


class Expressions:
    """All expressions so far, by number.

    **Fields:**

    - `numbers`: the numbers, by what the expressions are made of.
    - `nonnegative`: the numbers of those that are known not to be negative.
    - `padded`: the numbers of those among whose entries are zeros of tags, of which
        nothing has counted yet how many: their sum is that of the other entries.
    """

    def __init__(self):
        self.numbers = {}
        self.nonnegative = set()
        self.padded = set()


class Interpreter:
    """Interprets jaxprs: values in, values out.

    **Fields:**

    - `expressions`: interpreters that share these give equal expressions the same number.
    - `visit`: `visit(eqn, values, context)` returns the values of an operation's results
        and a list of records; or `None`, if nothing special is known of the operation.
    - `tracked`: the bits of sources that a value keeps even if it has no derivative in
        them. (A comparison depends on data, but no gradient flows through it.)
    - `records`: all records so far.
    - `opaque`: whether there was any operation that could not be looked into.
    """

    def __init__(self, expressions: Expressions, visit: Callable, tracked: int):
        self.expressions = expressions
        self.visit = visit
        self.tracked = tracked
        self.records = []
        self.opaque = False

    def source(self, *name: Any, sources: int = 0) -> Value:
        """The value of an expression that is known by a name: what it is made of."""
        numbers = self.expressions.numbers
        return Value(numbers.setdefault(name, len(numbers) + 1), sources)

    def interpret(
        self,
        jaxpr: Any,
        consts: Sequence[Value],
        inputs: Sequence[Value],
        context: Context = Context(),
    ) -> list[Value]:
        """The values that a jaxpr returns."""
        known = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *inputs]))

        def read(atom):
            return self._literal(atom) if isinstance(atom, Literal) else known[atom]

        for eqn in jaxpr.eqns:
            values = [read(atom) for atom in eqn.invars]
            results = self._results(eqn, values, context)
            known.update(zip(eqn.outvars, results, strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    def constant(self, value: Any, sources: int = 0) -> Value:
        """The value of an array that is not traced, known by its entries. (Of a large one
        only by its shape: comparing it would take longer than tracing.)"""
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

    def _results(
        self, eqn: Equation, values: list[Value], context: Context
    ) -> list[Value]:
        visited = self.visit(eqn, values, context)
        if visited is not None:
            results, records = visited
            self.records += records
            return results
        name, params = eqn.primitive.name, eqn.params
        # These are known by name. A `jit`, a `checkpoint`, a function with a derivative
        # of its own and whatever else has one program with the same inputs needs none.
        if name == "scan":
            return self._scan(eqn, values, context)
        if name == "while":
            return self._while(params, values, context)
        if name == "cond":
            return self._cond(params, values, context)
        inner = list(_jaxprs(list(params.values())))
        if len(inner) == 1 and len(_open(inner[0]).invars) == len(values):
            inside = context._replace(
                custom_derivative=context.custom_derivative or name == "custom_vjp_call",
                in_custom_jvp=context.in_custom_jvp or name == "custom_jvp_call",
            )
            return self._closed(inner[0], values, inside)
        if inner or any(map(_is_program, params.values())):
            return self._unknown(eqn, values, inner)
        return self._operation(eqn, values)

    def _closed(self, jaxpr: Any, values: list[Value], context: Context) -> list[Value]:
        consts = map(self.constant, getattr(jaxpr, "consts", ()))
        return self.interpret(_open(jaxpr), list(consts), values, context)

    def _operation(self, eqn: Equation, values: list[Value]) -> list[Value]:
        """The results of an operation on arrays."""
        name, known = eqn.primitive.name, self.expressions
        zero = [v.expression == ZERO.expression for v in values]
        if values and _is_zero(name, zero):
            return [ZERO] * len(eqn.outvars)
        if (name in ("add", "add_any") and any(zero)) or (name == "sub" and zero[1]):
            return [values[zero.index(False)]]
        operands = tuple(v.expression for v in values)
        nonzero = tuple(n for n, z in zip(operands, zero, strict=True) if not z)
        if name == "max" and any(zero) and nonzero[0] in known.nonnegative:
            return [values[zero.index(False)]]
        # A norm of all arrays of a model is a sum over the entries of tags, too: these
        # are zeros, and add nothing. So zeros are left out of a concatenation, and the
        # result is marked as padded, until a sum or a maximum has forgotten them.
        padded = [n in known.padded for n in operands]
        if name == "concatenate" and (any(zero) or any(padded)):
            operands, is_padded = nonzero, True
        else:
            is_padded = all(padded) and values != [] and name in _KEEPS_ZEROS
        forgets = padded[:1] == [True] and (
            name == "reduce_sum"
            or (name == "reduce_max" and operands[0] in known.nonnegative)
        )
        shapes = ()
        if not (is_padded or forgets):
            # Anything else notices how many zeros there are: their shape is part of it.
            noticed = [z or p for z, p in zip(zero, padded, strict=True)]
            pairs = zip(eqn.invars, noticed, strict=True)
            shapes = tuple(str(atom.aval) for atom, noticed in pairs if noticed)
        parts = "of", name, operands, shapes, _static(eqn.params)
        results = self._sourced(eqn, parts, all_sources(values))
        found = {v.expression for v in results}
        if name in ("abs", "square") or (name == "max" and any(zero)):
            known.nonnegative |= found
        if is_padded:
            known.padded |= found
        return results

    def _sourced(self, eqn: Equation, parts: tuple, sources: int) -> list[Value]:
        """The results of an operation that is made of `parts`. Those without a derivative
        depend on what is tracked alone."""
        results = []
        avals: list[Any] = [out.aval for out in eqn.outvars]
        for i, aval in enumerate(avals):
            smooth = jnp.issubdtype(aval.dtype, jnp.inexact)
            smooth = smooth and eqn.primitive.name not in _FLAT
            kept = sources if smooth else sources & self.tracked
            results.append(self.source(*parts, i, sources=kept))
        return results

    def _unknown(self, eqn: Equation, values: list[Value], inner: list) -> list[Value]:
        """The results of an operation that is not made of operations on arrays, such as a
        call of Python. Tags may be used in it, but nobody knows how."""
        self.opaque = True
        context = Context((None,), (0,), custom_derivative=True)
        for jaxpr in inner:
            inputs = [self.source("unknown", i) for i in range(len(_open(jaxpr).invars))]
            self._closed(jaxpr, inputs, context)
        sources = all_sources(values) & self.tracked
        numbers = [v.expression for v in values]
        operands = tuple(n for n in numbers if n != ZERO.expression)
        return [
            self.source("unknown", eqn.primitive.name, operands, i, sources=sources)
            for i in range(len(eqn.outvars))
        ]

    def _scan(self, eqn: Equation, values: list[Value], context: Context) -> list[Value]:
        params, length = eqn.params, eqn.params["length"]
        m, n = scan_counts(eqn)
        consts, carry, xs = values[:m], values[m : m + n], values[m + n :]
        xs = [self._derived("slice", x) for x in xs]
        sliced = all_sources([x for x in xs if not x.sources & self.tracked])
        inside = context.within(length, sliced)

        def body(carry):
            return self._closed(params["jaxpr"], [*consts, *carry, *xs], inside)

        carried, results = self._carried(body, carry, n)
        name = "scan", length, params["reverse"]
        return self._looped(name, carry, carried, results[:n], results[n:])

    def _while(self, params: Any, values: list[Value], context: Context) -> list[Value]:
        m, n = params["cond_nconsts"], params["body_nconsts"]
        cond_consts, body_consts, carry = values[:m], values[m : m + n], values[m + n :]
        inside = context.within(None, 0)

        def body(carry):
            new = self._closed(params["body_jaxpr"], [*body_consts, *carry], inside)
            return new + self._closed(
                params["cond_jaxpr"], [*cond_consts, *carry], inside
            )

        carried, results = self._carried(body, carry, len(carry))
        new, going = results[: len(carry)], results[len(carry) :]
        return self._looped(("while", going[0].expression), carry, carried, new, [])

    def _carried(self, body: Callable, carry: list[Value], n: int) -> tuple[list, list]:
        """What a loop carries, at any time, and what its body then returns: the least
        fixed point. A carry is zero if it begins as zero and stays it; it depends on all
        that it, or any carry that goes into it, has ever depended on."""
        zero = [v == ZERO for v in carry]
        sources = [v.sources for v in carry]
        start = len(self.records)
        while True:
            # Earlier rounds knew too little: only the records of the last one are kept.
            del self.records[start:]
            number = iter(range(n))
            carried = [
                ZERO if is_zero else self.source("carry", next(number), sources=bits)
                for is_zero, bits in zip(zero, sources, strict=True)
            ]
            results = body(carried)
            new_zero = [z and r == ZERO for z, r in zip(zero, results)]
            new_sources = [s | r.sources for s, r in zip(sources, results)]
            if (new_zero, new_sources) == (zero, sources):
                return carried, results
            zero, sources = new_zero, new_sources

    def _looped(
        self, name: tuple, carry: list, carried: list, new: list, ys: list
    ) -> list[Value]:
        """The results of a loop, known by everything in it that is not zero."""
        nonzero = [i for i, v in enumerate(carried) if v != ZERO]
        loop = (*name, tuple((carry[i].expression, new[i].expression) for i in nonzero))
        out = [ZERO] * len(carried)
        for place, i in enumerate(nonzero):
            sources = carry[i].sources | new[i].sources
            out[i] = self.source("loop", loop, place, sources=sources)
        return out + [self._derived(("loop", loop), y) for y in ys]

    def _derived(self, how: Any, value: Value) -> Value:
        if value == ZERO:
            return value
        return self.source("derived", how, value.expression, sources=value.sources)

    def _cond(self, params: Any, values: list[Value], context: Context) -> list[Value]:
        index, *operands = values
        branches = [self._closed(b, operands, context) for b in params["branches"]]
        results = []
        for choices in zip(*branches, strict=True):
            if all(c == ZERO for c in choices):
                results.append(ZERO)
                continue
            sources = index.sources & self.tracked | all_sources(choices)
            parts = "cond", index.expression, tuple(c.expression for c in choices)
            results.append(self.source(*parts, sources=sources))
        return results


# The names in these tables are those of JAX's primitives; a test asks whether it still
# has them. These make zeros of zeros.
_ZERO_OF_ZEROS = frozenset(
    "abs add add_any all_gather broadcast_in_dim concatenate convert_element_type copy "
    "copy_p cumsum dot_general dynamic_slice dynamic_update_slice expand_dims gather "
    "integer_pow max min mul neg optimization_barrier pad pcast psum pvary "
    "reduce_max reduce_min reduce_precision reduce_sum reshape reshard rev scatter-add "
    "scatter_add select_n sharding_constraint sign slice split sqrt square squeeze "
    "stop_gradient sub transpose".split()
)
# These do so entry by entry.
_KEEPS_ZEROS = frozenset(
    "abs convert_element_type copy integer_pow mul neg sign sqrt square".split()
)
# These have no derivative.
_FLAT = frozenset("stop_gradient sign floor ceil round".split())
# These are zero if the first operand is: the others only say where.
_LOOKUPS = frozenset("gather dynamic_slice".split())


def _is_zero(name: str, zero: list[bool]) -> bool:
    """Whether the results of an operation are, given which of its operands are."""
    if all(zero) and name in _ZERO_OF_ZEROS:
        return True
    if name in ("mul", "dot_general", "conv_general_dilated"):
        return any(zero)
    return zero[0] and name in ("div", "integer_pow", *_LOOKUPS)


def scan_counts(eqn: Equation) -> tuple[int, int]:
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
