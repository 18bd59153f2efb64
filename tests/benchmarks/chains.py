"""Are the time steps of a recurrent network a chain? The GRU of the races, which reads
the rows of digits, by `KFAC()` with `kfac.Series` blocks, and with `kfac.Kronecker` and
`kfac.Expand`, for which steps are independent.

    python tests/benchmarks/chains.py
    python tests/benchmarks/chains.py --seconds 10    # instead of as many steps
    python tests/benchmarks/chains.py --toy           # does everything run?

Printed is the training loss of the averaged model, with the steps that were taken.
"""

import argparse

import equinox as eqx
import jax
import jax.numpy as jnp
import race_problems
import races
from race_problems import Race

import eqx_kfac as kfac


BLOCKS = {
    "`Kronecker(Expand())`": kfac.Kronecker(kfac.Expand()),
    '`Series("symmetric")`': kfac.Series("symmetric"),
    '`Series("stationary")`': kfac.Series("stationary"),
}


class Chain(eqx.Module):
    """The GRU of the races, run by `kfac.scan_cell`."""

    cell: eqx.nn.GRUCell
    out: eqx.nn.Linear

    def __call__(self, rows):
        start = jnp.zeros(self.cell.hidden_size)
        return self.out(kfac.scan_cell(self.cell, start, rows)[0])


def race(block: kfac.AbstractBlock, seed: int) -> Race:
    plain = race_problems.gru(jax.random.key(seed), None)
    model = Chain(kfac.convert(plain.model.cell, block), kfac.convert(plain.model.out))
    return plain._replace(model=model)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument(
        "--seconds", type=float, help="of steps, in the place of a number"
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--toy", action="store_true")
    options = parser.parse_args()
    if options.toy:
        options.steps, options.seeds = 3, 1
    budget = races.Budget(options.seconds or options.steps, steps=not options.seconds)
    method = races.Method("KFAC()", (None,), races.with_kfac(kfac.KFAC))
    print("| block | loss (steps), by seed |\n|---|---|")
    for name, block in BLOCKS.items():
        runs = [
            races.run(race(block, seed), method, None, seed, budget)
            for seed in range(options.seeds)
        ]
        shown = ", ".join(f"{run.train[-1]:.2g} ({run.steps})" for run in runs)
        print(f"| {name} | {shown} |", flush=True)


if __name__ == "__main__":
    main()
