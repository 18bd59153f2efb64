"""What a step of K-FAC cannot do without: its matrix products, each at the rate at which
a product of its shape runs alone, in the same process."""

import math
import time
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
from problems import Layer, Problem, Product


COMPONENTS = (
    "gradient",
    "statistics",
    "preconditioning",
    "quadratic model",
    "factorisation",
)


def _of_layer(layer: Layer, through_rows: bool) -> dict[str, list[Product]]:
    rows, d_in, d_out, bias, first, count = layer
    a = d_in + bias
    forward = Product(rows, d_in, d_out, count)
    to_weight = Product(d_in, rows, d_out, count)
    to_input = [] if first else [Product(rows, d_out, d_in, count)]
    moments = [Product(a, rows, a, count), Product(d_out, rows, d_out, count)]
    # Of each of two directions, x dW and dx W.
    tangents = [forward._replace(count=2 * count * (1 if first else 2))]
    # A Cholesky decomposition, the inverse of the triangle and its square make d^3
    # operations, half those of a product.
    inverses = [Product(d, d, d, count / 2) for d in (a, d_out)]
    preconditioning = [
        [Product(d_out, d_out, a, count), Product(d_out, a, a, count)],
        [*moments, Product(d_out, rows, a, count)],  # g G and x A are of their shapes.
    ]
    return {
        "gradient": [forward, to_weight, *to_input],
        "statistics": [*to_input, *moments],
        "preconditioning": min(preconditioning[: 1 + through_rows], key=flops),
        "quadratic model": tangents,
        "factorisation": inverses,
    }


def products(problem: Problem) -> dict[str, list[Product]]:
    """By component; `factorisation` once, however often it is due."""
    found: dict[str, list[Product]] = {name: [] for name in COMPONENTS}
    for layer in problem.layers:
        # What an L2 term adds to a gradient has no rows.
        for name, some in _of_layer(layer, through_rows=problem.l2 == 0).items():
            found[name] += some
    for product in problem.others:  # Both factors vary: two products backwards.
        twice = product._replace(count=2 * product.count)
        found["gradient"] += [product, twice]
        found["statistics"] += [twice]
        found["quadratic model"] += [twice._replace(count=2 * twice.count)]
    return found


def flops(some: list[Product]) -> float:
    return sum(2.0 * p.m * p.k * p.n * p.count for p in some)


class Rates:
    """The seconds that products of some shapes take, as medians of several looks."""

    def __init__(self, some: list[Product]):
        # Products that differ in the order of their axes are one shape.
        self.looks: dict[tuple[int, ...], list[float]] = {
            key: [] for key in Counter(self._key(p) for p in some)
        }
        self._made: dict[tuple[int, ...], Any] = {}

    @staticmethod
    def _key(p: Product) -> tuple[int, ...]:
        return (p.m, p.k, p.n)

    def look(self) -> None:
        for key in self.looks:
            run, operands, number = self._make(key)
            seconds = []
            for _ in range(4):  # The quickest: caches are warm, threads awake.
                start = time.perf_counter()
                jax.block_until_ready(run(*operands))
                seconds.append(time.perf_counter() - start)
            self.looks[key].append(min(seconds) / number)

    def _make(self, key: tuple[int, ...]):
        if key not in self._made:
            m, k, n = key
            most = 2**22 // max(m * k, k * n, m * n)  # Numbers in an array.
            number = max(1, min(64, most, int(2e8 / (2 * m * k * n))))
            a = jnp.ones((number, m, k))
            b = jnp.ones((k, n))

            @jax.jit
            def run(a, b):
                if number == 1:
                    return a[0] @ b
                return jax.lax.scan(lambda _, x: (None, x @ b), None, a)[1]

            jax.block_until_ready(run(a, b))
            self._made[key] = run, (a, b), number
        return self._made[key]

    def seconds(self, some: list[Product]) -> float:
        total = 0.0
        for p in some:
            looks = sorted(self.looks[self._key(p)])
            total += p.count * looks[len(looks) // 2]
        return total

    def gflops(self, some: list[Product]) -> float:
        seconds = self.seconds(some)
        return flops(some) / seconds / 1e9 if seconds > 0 else math.nan
