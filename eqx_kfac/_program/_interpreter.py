"""An abstract interpreter of jaxprs, which runs two analyses at once.

*Value numbering*: every value has the number of the expression that it is. Two values
with the same number are the same expression of the same inputs, so that two traces of a
function can be compared.

*Dependence analysis*: every value has the set of sources that it depends on, as the bits
of an integer. Only dependences through which a gradient flows count, except for a few
sources that are *tracked*: on these, even the result of a comparison depends.

*Zeros.* The arrays that a tag holds while it collects are zeros, and a loss must not
change with them. So every value that is certainly zero has the same number, and an
expression does not contain the zeros that are added in it.

*Padding.* A loss may concatenate all arrays of a model, and take a norm of the result.
The zeros of tags among its entries are padding: a sum does not change with them, but a
mean does. A concatenation with zeros is therefore the *padded* expression of the
concatenation without them. A sum over a padded expression is an expression like any
other; nearly every other operation notices how much padding there is, and so the array's
shape becomes a part of its expression.

*Carries.* While a loop is interpreted, the values that it carries have no expression yet.
Each is known by its position among those that are not zero, and by nothing else, so that
the carries of nested loops share their numbers. This can make two different expressions
equal, but not two equal ones different; and since two traces of one function have the
same loops, it happens in both. Only a change which puts one carry in the place of
another would go unnoticed, and tags with more zeros do not cause such a change.
"""

import functools as ft
import itertools
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from .._jax import Equation, Literal, Tracer
from ._jaxpr import is_call, is_program, jaxprs, opened, scan_counts, SCATTERS


class Value(NamedTuple):
    """What is known of a value: the number of its expression, and the bits of the sources
    that it depends on."""

    expression: int
    sources: int = 0


# The value that is certainly zero. There are zeros with sources, too, such as a statistic
# that is zero: operations on arrays recognise these by their number, and drop the
# sources, except for those that are sticky; loops and branches compare with `ZERO`
# itself, and keep the sources.
ZERO = Value(0)


def all_sources(values: Iterable[Value]) -> int:
    """The sources on which any of some values depends."""
    return ft.reduce(operator.or_, (v.sources for v in values), 0)


class Context(NamedTuple):
    """What surrounds an operation.

    **Fields:**

    - `loops`: the numbers of rounds of the loops around it, from the outermost; `None`
        for a loop whose number of rounds is not known.
    - `sliced`: for each of these loops, the sources of the arrays of which every round
        gets a slice. Arrays that depend on tracked sources, such as data, are left out: a
        loop over data is no loop along a stack of layers.
    - `custom_derivative`: whether it is in a function with a `custom_vjp`, whose
        derivative need not be that of its operations.
    - `in_custom_jvp`: whether it is in a function with a `custom_jvp`.
    """

    loops: tuple[int | None, ...] = ()
    sliced: tuple[int, ...] = ()
    custom_derivative: bool = False
    in_custom_jvp: bool = False

    def within(self, length: int | None, sliced: int) -> "Context":
        """The context inside one more loop."""
        return self._replace(loops=(*self.loops, length), sliced=(*self.sliced, sliced))


class Expressions:
    """The numbers of all expressions so far.

    **Fields:**

    - `numbers`: the number of each expression, by what the expression is made of.
    - `nonnegative`: the numbers of expressions that are known not to be negative.
    - `padded`: the numbers of expressions that are padded with zeros of tags.
    """

    def __init__(self):
        self.numbers = {}
        self.nonnegative = set()
        self.padded = set()

    def stopped(self, number: int) -> int | None:
        """The number of an expression in a `stop_gradient`, if there is one."""
        return self.numbers.get(("of", "stop_gradient", (number,), (), (), 0))


class Interpreter:
    """Interprets jaxprs: values in, values out.

    **Fields:**

    - `expressions`: the numbers of expressions. Interpreters that share them give equal
        expressions the same number.
    - `visit`: special rules for some operations. `visit(eqn, values, context)` returns
        the values of an operation's results and a list of records; or `None`, if there is
        no special rule for the operation.
    - `tracked`: the bits of the sources that are tracked through operations without a
        derivative. (A comparison depends on data, but no gradient flows through it.)
    - `sticky`: the bits of the sources that are kept even where zeros are added or
        multiplied: marks of what must not happen, rather than dependences.
    - `cleared`: `cleared(records)` are the sources that the values which these records
        are of do not depend on any more.
    - `combined`: `combined(eqn, values)` are the sources on which the results of an
        operation on arrays depend.
    - `records`: what `visit` has recorded so far, such as uses of tags.
    - `opaque`: whether there was any operation whose inside could not be interpreted.
    """

    def __init__(
        self,
        expressions: Expressions,
        visit: Callable,
        cleared: Callable,
        tracked: int,
        sticky: int,
        combined: Callable,
    ):
        self.expressions = expressions
        self.visit = visit
        self.cleared = cleared
        self.tracked = tracked
        self.sticky = sticky
        self.combined = combined
        self.records = []
        self.opaque = False

    def value_of(self, *parts: Any, sources: int = 0) -> Value:
        """The value of the expression that is made of `parts`."""
        numbers = self.expressions.numbers
        return Value(numbers.setdefault(parts, len(numbers) + 1), sources)

    def interpret(
        self,
        jaxpr: Any,
        consts: Sequence[Value],
        inputs: Sequence[Value],
        context: Context = Context(),
    ) -> list[Value]:
        """The values that a jaxpr returns."""
        assigned = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *inputs]))

        def read(atom):
            return self._literal(atom) if isinstance(atom, Literal) else assigned[atom]

        for eqn in jaxpr.eqns:
            values = [read(atom) for atom in eqn.invars]
            results = self._results(eqn, values, context)
            assigned.update(zip(eqn.outvars, results, strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    def constant(self, value: Any, sources: int = 0) -> Value:
        """The value of a constant of a jaxpr. A small NumPy array is known by its
        entries. Any other array is known by its shape and type alone, because reading it
        might take longer than tracing; two traces of one function have the same
        constants. (A constant that is a tracer belongs to a trace around this one.)"""
        if isinstance(value, Tracer):
            return self.value_of("tracer", id(value), sources=sources)
        shape_and_type = np.shape(value), str(getattr(value, "dtype", type(value)))
        readable = isinstance(value, (np.ndarray, np.generic, int, float, bool))
        if not readable or np.size(value) > 2**16:
            return self.value_of("array", *shape_and_type, sources=sources)
        array = np.asarray(value)
        if not array.any() and array.dtype.kind in "fiubc":
            return ZERO
        entries = array.tobytes()
        return self.value_of("constant", *shape_and_type, entries, sources=sources)

    def _literal(self, atom: Any) -> Value:
        if np.ndim(atom.val) == 0 and not np.any(atom.val):
            return ZERO
        return self.value_of("literal", str(atom.aval), repr(atom.val))

    def _results(
        self, eqn: Equation, values: list[Value], context: Context
    ) -> list[Value]:
        visited = self.visit(eqn, values, context)
        if visited is not None:
            results, records = visited
            self.records += records
            return results
        name, params = eqn.primitive.name, eqn.params
        # Control flow has a rule for each of its primitives, known by their names.
        if name == "scan":
            return self._scan(eqn, values, context)
        if name == "while":
            return self._while(params, values, context)
        if name == "cond":
            return self._cond(params, values, context)
        inner = jaxprs(eqn)
        if is_call(eqn, inner):
            inside = context._replace(
                custom_derivative=context.custom_derivative or name == "custom_vjp_call",
                in_custom_jvp=context.in_custom_jvp or name == "custom_jvp_call",
            )
            if inside == context:
                return self._call(inner[0], values, inside)
            # A derivative of its own may flow where that of the operations is zero, as in
            # rounding with the derivative of the identity.
            tracked, self.tracked = self.tracked, _ALL
            results = self._call(inner[0], values, inside)
            self.tracked = tracked
            return results
        if inner or any(map(is_program, params.values())):
            return self._unknown(eqn, values, inner)
        return self._operation(eqn, values)

    def _call(self, jaxpr: Any, values: list[Value], context: Context) -> list[Value]:
        """The results of a jaxpr that has its constants with it, if there are any."""
        jaxpr, consts = opened(jaxpr)
        return self.interpret(jaxpr, list(map(self.constant, consts)), values, context)

    def _operation(self, eqn: Equation, values: list[Value]) -> list[Value]:
        """The results of an operation on arrays."""
        name, expressions = eqn.primitive.name, self.expressions
        zero = [v.expression == ZERO.expression for v in values]
        sources = self.combined(eqn, values)
        marks = sources & self.sticky
        if values and _is_zero(eqn, zero):
            return [ZERO._replace(sources=marks)] * len(eqn.outvars)
        # A sum with a zero is its other operand.
        if (name in ("add", "add_any") and any(zero)) or (name == "sub" and zero[1]):
            other = values[zero.index(False)]
            return [other._replace(sources=other.sources | marks)]
        operands = tuple(v.expression for v in values)
        nonzero = tuple(n for n, z in zip(operands, zero, strict=True) if not z)
        if name == "max" and any(zero) and nonzero[0] in expressions.nonnegative:
            return [values[zero.index(False)]]
        # See "Padding" above: zeros are left out of a concatenation, whose result is
        # padded instead, as is what an operation on every entry makes of padded arrays.
        padded = [n in expressions.padded for n in operands]
        joins = name == "concatenate" and (any(zero) or any(padded))
        is_padded = joins or (all(padded) and _keeps_zeros(eqn))
        forgets_padding = any(padded) and (
            name == "reduce_sum"
            or (name == "reduce_max" and operands[0] in expressions.nonnegative)
        )
        shapes = ()
        if is_padded or forgets_padding:
            operands = nonzero
        else:
            # Other operations notice how many zeros there are.
            noticed = [z or p for z, p in zip(zero, padded, strict=True)]
            pairs = zip(eqn.invars, noticed, strict=True)
            shapes = tuple(str(atom.aval) for atom, noticed in pairs if noticed)
        parts = "of", name, operands, shapes, _comparable(eqn.params)
        results = self._values_of(eqn, parts, sources)
        if is_padded:
            results = list(map(self._with_padding, results))
        if name in ("abs", "square") or (name == "max" and any(zero)):
            expressions.nonnegative |= {v.expression for v in results}
        return results

    def _with_padding(self, value: Value) -> Value:
        """The padded expression of one without padding."""
        padded = self.value_of("padded", value.expression, sources=value.sources)
        self.expressions.padded.add(padded.expression)
        return padded

    def _values_of(self, eqn: Equation, parts: tuple, sources: int) -> list[Value]:
        """The results of an operation that is made of `parts` and depends on `sources`. A
        result without a derivative depends on the tracked ones among them."""
        results = []
        avals: list[Any] = [out.aval for out in eqn.outvars]
        for i, aval in enumerate(avals):
            smooth = jnp.issubdtype(aval.dtype, jnp.inexact)
            smooth = smooth and eqn.primitive.name not in _FLAT
            kept = sources if smooth else sources & self.tracked
            results.append(self.value_of(*parts, i, sources=kept))
        return results

    def _unknown(self, eqn: Equation, values: list[Value], inner: list) -> list[Value]:
        """The results of an operation that cannot be interpreted, such as a call of
        Python. Its jaxprs, if it has any, are searched for tags all the same."""
        self.opaque = True
        # Whatever surrounds the operation, the worst is assumed: that tags in it are
        # called any number of times, in a function with a derivative of its own.
        worst = Context((None,), (0,), custom_derivative=True)
        start = len(self.records)
        for jaxpr in inner:
            # Only the records are of interest, so that the inputs of all such jaxprs may
            # be the same expressions.
            number = len(opened(jaxpr)[0].invars)
            self._call(jaxpr, [self.value_of("unknown", i) for i in range(number)], worst)
        operands = tuple(v.expression for v in values if v.expression != ZERO.expression)
        sources = self.combined(eqn, values)
        if any(map(is_program, eqn.params.values())):
            # Whatever tags there are in a function of Python, nobody can see here.
            sources &= self.tracked
        sources &= ~self.cleared(self.records[start:])
        return self._values_of(eqn, ("unknown", eqn.primitive.name, operands), sources)

    def _scan(self, eqn: Equation, values: list[Value], context: Context) -> list[Value]:
        params, length = eqn.params, eqn.params["length"]
        m, n = scan_counts(eqn)
        consts, carry, xs = values[:m], values[m : m + n], values[m + n :]
        xs = [self._derived("slice", x) for x in xs]
        sliced = all_sources([x for x in xs if not x.sources & self.tracked])
        inside = context.within(length, sliced)

        def body(carry):
            return self._call(params["jaxpr"], [*consts, *carry, *xs], inside)

        carried, results = self._carried(body, carry)
        name = "scan", length, params["reverse"]
        return self._looped(name, carry, carried, results[:n], results[n:])

    def _while(self, params: Any, values: list[Value], context: Context) -> list[Value]:
        m, n = params["cond_nconsts"], params["body_nconsts"]
        cond_consts, body_consts, carry = values[:m], values[m : m + n], values[m + n :]
        inside = context.within(None, 0)

        def body(carry):
            new = self._call(params["body_jaxpr"], [*body_consts, *carry], inside)
            condition = self._call(params["cond_jaxpr"], [*cond_consts, *carry], inside)
            return new + condition

        carried, (*new, condition) = self._carried(body, carry)
        return self._looped(("while", condition.expression), carry, carried, new, [])

    def _carried(self, body: Callable, carry: list[Value]) -> tuple[list, list]:
        """What a loop carries, at the start of any round, and what its body then returns:
        the carries after the round, and behind them anything else. `carry` is what the
        loop begins with.

        This is the least fixed point: a carry is zero if it is zero in the beginning and
        after every round, and it depends on all sources that it, or any carry that it is
        computed from, has ever depended on."""
        n = len(carry)
        zero = [v == ZERO for v in carry]
        sources = [v.sources for v in carry]
        start = len(self.records)
        while True:
            # An interpretation before the last one assumed too many zeros and too few
            # sources: its records are dropped.
            del self.records[start:]
            # Zeros are not counted, so that the slots of tags, which loops carry too, do
            # not change the numbers of other carries.
            count = itertools.count()
            carried = [
                ZERO if is_zero else self.value_of("carry", next(count), sources=bits)
                for is_zero, bits in zip(zero, sources, strict=True)
            ]
            results = body(carried)
            new = results[:n]
            new_zero = [z and r == ZERO for z, r in zip(zero, new, strict=True)]
            new_sources = [s | r.sources for s, r in zip(sources, new, strict=True)]
            if (new_zero, new_sources) == (zero, sources):
                return carried, results
            zero, sources = new_zero, new_sources

    def _looped(
        self, name: tuple, carry: list, carried: list, new: list, ys: list
    ) -> list[Value]:
        """The results of a loop: its last carries, and `ys`, which it stacks. Each is
        known by what all carries that are not zero begin with (`carry`) and become in a
        round (`new`)."""
        nonzero = [i for i, v in enumerate(carried) if v != ZERO]
        loop = (*name, tuple((carry[i].expression, new[i].expression) for i in nonzero))
        out = [ZERO] * len(carried)
        for position, i in enumerate(nonzero):
            sources = carry[i].sources | new[i].sources
            out[i] = self.value_of("loop", loop, position, sources=sources)
        return out + [self._derived(("loop", loop), y) for y in ys]

    def _derived(self, how: Any, value: Value) -> Value:
        """What a loop makes of a value, by slicing or stacking: a zero stays a zero."""
        if value == ZERO:
            return value
        return self.value_of("derived", how, value.expression, sources=value.sources)

    def _cond(self, params: Any, values: list[Value], context: Context) -> list[Value]:
        index, *operands = values
        branches = [self._call(b, operands, context) for b in params["branches"]]
        results = []
        for choices in zip(*branches, strict=True):
            if all(c == ZERO for c in choices):
                results.append(ZERO)
                continue
            sources = index.sources & self.tracked | all_sources(choices)
            parts = "cond", index.expression, tuple(c.expression for c in choices)
            results.append(self.value_of(*parts, sources=sources))
        return results


# All sources.
_ALL = -1

# The names in these tables are names of JAX's primitives; a test asks whether JAX still
# has them. First come the primitives whose results are zero if all operands are.
_ZERO_OF_ZEROS = frozenset(
    "abs add add_any all_gather broadcast_in_dim concatenate convert_element_type copy "
    "copy_p cumsum dot_general dynamic_slice dynamic_update_slice expand_dims gather "
    "max min mul neg optimization_barrier pad pcast psum pvary "
    "reduce_max reduce_min reduce_precision reduce_sum reshape reshard rev select_n "
    "sharding_constraint sign slice split sqrt square squeeze stop_gradient sub "
    "transpose".split()
)
# Those of them that act on every entry by itself, so that padding stays padding.
_ENTRYWISE = frozenset("abs convert_element_type copy mul neg sign sqrt square".split())
# Primitives whose derivative is zero.
_FLAT = frozenset("stop_gradient sign floor ceil round".split())
# Primitives that take entries of their first operand; the others say which entries.
_LOOKUPS = frozenset("gather dynamic_slice".split())


def _is_zero(eqn: Equation, zero: list[bool]) -> bool:
    """Whether the results of an operation are zero, given which of its operands are."""
    name = eqn.primitive.name
    if all(zero) and name in _ZERO_OF_ZEROS:
        return True
    if name in ("mul", "dot_general", "conv_general_dilated"):
        return any(zero)
    if name == "div":  # Zero over zero is no number.
        return zero[0] and not zero[1]
    if name in SCATTERS:
        return zero[0] and zero[2]
    if name == "integer_pow":
        return zero[0] and eqn.params["y"] > 0
    return zero[0] and name in _LOOKUPS


def _keeps_zeros(eqn: Equation) -> bool:
    """Whether an operation acts on every entry by itself, and makes zeros of zeros."""
    name = eqn.primitive.name
    return name in _ENTRYWISE or (name == "integer_pow" and eqn.params["y"] > 0)


def _comparable(value: Any) -> Any:
    """A parameter of an operation, as something that two traces can be compared by. A
    function is made anew in each trace, so that only its type can be compared."""
    if isinstance(value, dict):
        return tuple((k, _comparable(v)) for k, v in sorted(value.items()))
    if isinstance(value, (tuple, list)):
        return tuple(map(_comparable, value))
    if isinstance(value, (int, float, complex, str, bytes, type(None))):
        return value
    if isinstance(value, np.ndarray):
        return value.shape, value.tobytes()
    return type(value).__name__ if is_program(value) else str(value)
