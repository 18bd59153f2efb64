"""Do the tests notice? Mutants of the library, each with one mistake; for each, the tests
that must fail.

    python -m tests.mutants                 # all of them: 40 minutes of one core
    python -m tests.mutants --only _tag     # those in files whose path contains this
    python -m tests.mutants --part 0/2      # every second one

Every mutant is a copy of the library in a folder of its own: what is installed stays as
it is. A mutant that survives is a mistake that nobody would see.
"""

import argparse
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time
from typing import NamedTuple


ROOT = pathlib.Path(__file__).parent.parent


class Mutant(NamedTuple):
    path: str  # Below `eqx_kfac/`.
    old: str  # Occurs once in the file.
    new: str
    tests: str  # The files, without `tests/test_` and `.py`.


M = Mutant
# fmt: off
MUTANTS = [
    # Complex parameters.
    M("_complex.py", "jnp.conj(g) if is_complex(g) else g", "g", "complex"),
    M("_complex.py", "return as_complex(fn(as_real(vector)))", "return as_complex(fn(as_real(jtu.tree_map(jnp.conj, vector))))", "complex"),
    M("analysis/_model_operator.py", "parameters = steepest(as_complex(parameters))", "parameters = as_complex(parameters)", "complex"),
    M("_optimizer/_state.py", "dtype = p.dtype if jnp.iscomplexobj(p) else accumulator(p.dtype)", "dtype = accumulator(p.dtype)", "complex"),
    M("_optimizer/_optax.py", "steepest(updates), state.fallback", "updates, state.fallback", "complex"),
    # Layers without curvature so far.
    M("_inverse/_precondition.py", "jnp.where(still, 0, solution)", "solution", "run"),
    M("_optimizer/_trial.py", "return unknown & jnp.logical_not(self.averaged.zero)", "return unknown", "run"),
    M("_optimizer/_collect.py", "zero & fresh)", "zero)", "run"),
    M("_optimizer/_collect.py", "weight = jnp.where(zero, 0, weight)", "pass", "run"),
    M("_optimizer/_trial.py", "if self.linearised is None:\n            return unknown", "if False:\n            return unknown", "run"),
    M("_optimizer/_after.py", "(state.refactorise | (rules.damping is not None))", "(rules.damping is not None)", "reliability"),
    M("_optimizer/_kfac.py", "again = state.refactorise | newly_known", "again = state.refactorise", "run"),
    M("_optimizer/_trial.py", "unseen = without & self.averaged.fresh", "unseen = without", "run"),
    M("_optimizer/_collect.py", "jnp.full_like(first, whole)", "jnp.full_like(first, True)", "run"),
    M("_optimizer/_optax.py", "due = Due.of(state, self.inverse_period, again=average.first)", "due = Due.of(state, self.inverse_period)", "run"),
    # What JAX has for finding mistakes.
    M("_optimizer/_trial.py", "jnp.full_like(self.value, jnp.inf))", "jnp.full_like(self.value, jnp.nan))", "debugging"),
    M("_devices.py", 'jax.transfer_guard_host_to_device("allow")', 'jax.transfer_guard_host_to_device("disallow")', "debugging"),
    M("_program/_run.py", "if not any(tag.block.weighted for _, tag, _ in layers):", "if not all(tag.block.weighted for _, tag, _ in layers):", "several_losses"),
    M("analysis/_laplace.py", "size = len(out), self.curvature.in_size()", "size = len(out), 1", "laplace"),
    # After training.
    M("analysis/_laplace.py", "self.num_examples / (self.sigma_noise**2 * self.temperature)", "self.num_examples / self.sigma_noise**2", "laplace"),
    M("analysis/_laplace.py", "whole.without_l2().spectral()", "whole.spectral()", "laplace"),
    M("analysis/_laplace.py", "step = self.precision().power(-0.5)", "step = self.precision().power(-1)", "laplace"),
    M("analysis/_laplace.py", "jnp.sum(size * jnp.log(d) - d * square)", "jnp.sum(jnp.log(d) - d * square)", "laplace"),
    M("analysis/_laplace.py", "noise = self.sigma_noise.astype(variance.dtype) ** 2", "noise = self.sigma_noise.astype(variance.dtype)", "laplace"),
    M("analysis/_block_diagonal.py", "return jnp.sum(values / (values + number))", "return jnp.sum(values / number)", "laplace"),
    M("analysis/_laplace.py", "math.pi / 8", "math.pi / 4", "laplace"),
    M("analysis/_laplace.py", "jnp.sqrt(jnp.maximum(values, 0))", "jnp.maximum(values, 0)", "laplace"),
    M("analysis/_influence.py", "if by_rows and n * m", "if n * m", "influence"),
    M("analysis/_influence.py", "products = matmul(right(left, factor), other.T)", "products = matmul(left, other.T)", "influence"),
    M("analysis/_influence.py", "by_rows = by_rows and operator.in_structure().shape == (d_out, d_in)", "pass", "influence"),
    M("analysis/_influence.py", "axes = captured.stack + captured.form.groups", "axes = captured.stack", "influence"),
    M("analysis/_influence.py", "directions = _times(operator, _gradients(test))", "directions = _gradients(test)", "influence"),
    M("analysis/_spectra.py", "v = v - matmul(matmul(basis, v), basis)", "pass", "spectra"),
    M("analysis/_spectra.py", "jnp.where(ended, 0, beside)", "beside + 1", "spectra"),
    M("analysis/_spectra.py", "unit(orthogonal(other, basis))", "orthogonal(other, basis)", "spectra"),
    M("analysis/_spectra.py", "residuals=beside[-1] * jnp.abs(vectors[-1])", "residuals=beside[-1] * jnp.abs(vectors[0])", "spectra"),
    M("analysis/_spectra.py", "jnp.std(each, ddof=1) / len(each) ** 0.5", "jnp.std(each, ddof=1)", "spectra"),
    M("analysis/_block_diagonal.py", "block, block.shift + number)", "block, number)", "block_diagonal laplace"),
    M("analysis/_block_diagonal.py", "            values = _values(op, shift)", "            values = eigenvalues(op)", "spectra"),
    M("analysis/_block_diagonal.py", "return spectral(op).map(lambda x: (x + shift) * jnp", "return spectral(op).map(lambda x: x * jnp", "spectra"),
    M("_operator/_symmetric.py", "jnp.log(values + jnp.asarray(damping, values.dtype))", "jnp.log(values)", "spectra"),
    # What is seen of it.
    M("debug/_fold.py", "same = (len(parts), *others, of_group[0].kind)", "same = (len(parts), *others)", "verify"),
    M("debug/_summary.py", "(number,) * (number > 1)", "()", "verify"),
    M("debug/_summary.py", "megabytes=size / 1e6", "megabytes=size / 1e3", "verify"),
    M("debug/_summary.py", "largest / smallest, np.inf", "largest, np.inf", "verify"),
    M("debug/_summary.py", "values = spectrum.values + number", "values = spectrum.values", "verify"),
    M("plot/_history.py", "steps = every * np.arange", "steps = np.arange", "plot"),
    M("plot/_history.py", '(seen["rejected"] > 0) & (seen[name] > 0)', "seen[name] > 0", "plot"),
    M("plot/_spectra.py", "axis.axhline(dampings[0][0]", "axis.axhline(0.0", "plot"),
    M("plot/_spectra.py", "axis.hlines(own, 1", "axis.hlines(dampings[0], 1", "plot"),
    # What is kept of a layer's curvature.
    M("_block/_kronecker.py", "input_factor = second * trailing(inverse_or_zero(inputs.rows), second)", "input_factor = second", "scaling identities"),
    M("_block/_kronecker.py", "            output_factor = outputs.second / count\n", "            output_factor = outputs.second / inputs.rows\n", "scaling"),
    M("_block/_kronecker.py", "input_factor = second + outputs.transposed", "input_factor = second", "tensor_normal"),
    M("_block/_kronecker.py", "G, A = G + trailing(trace(a), g) * g, A + trailing(trace(g), a) * a", "G, A = G + g, A + a", "layers"),
    M("_block/_kronecker.py", "(transposed * per_transposed, outputs.transposed / count)", "(transposed / count, outputs.transposed * per_transposed)", "layers"),
    M("_block/_kronecker.py", "return inputs, self.diagonal_output or sizes.d_out > self.widest", "return inputs, self.diagonal_output", "blocks"),
    M("_curvature/_batch.py", "linearise(part.model, bases, program=part.program)", "linearise(part.model, bases)", "verify"),
    M("debug/_check.py", "is_beyond = self.ratio > (10 / self.tolerance) ** 3", "is_beyond = self.ratio > np.inf", "verify"),
    M("debug/_verify.py", "norms[0] <= rounding", "norms[0] == 0", "verify"),
    M("_block/_kronecker.py", "jnp.where(is_last[..., :, None], last[..., None, :], rows)", "rows", "blocks"),
    M("_block/_kronecker.py", "if wanted.ones is not None and not rows.derivative:", "if wanted.ones is not None:", "derivatives"),
    M("_block/_kronecker.py", "moves = jnp.any(rows.x.vectors() != 0, axis=-1)", "moves = jnp.any(rows.x.vectors() == rows.x.vectors(), axis=-1)", "derivatives"),
    M("_block/_kronecker.py", "return squared_x * squared_g, squared_g, squared_x", "return squared_x * squared_g, squared_x, squared_g", "tensor_normal"),
    M("_block/_kronecker.py", "rows.derivative else squares + ones", "rows.derivative else squares", "tensor_normal"),
    M("_block/_kronecker.py", "share = count**2 * inverse", "share = count * inverse", "energy"),
    M("_block/_kronecker.py", "of_mean = jnp.sum(mean**2, axis=-1)", "of_mean = jnp.sum(mean, axis=-1) ** 2", "energy"),
    M("_block/_kronecker.py", "return not (self.tied or self.sharing.balanced or self.sharing.mixes_positions)", "return not (self.tied or self.sharing.balanced)", "energy"),
    M("_block/_gradients.py", "one = (jnp.sqrt(count) * mean)", "one = (count * mean)", "energy"),
    M("_block/_gradients.py", "constant = 0 if rows.derivative else 1", "constant = 1", "derivatives"),
    M("_curvature/_linearise.py", "return tag.block.minus_mean(statistics, total / count, count)", "return tag.block.minus_mean(statistics, total, count)", "energy"),
    M("_loss/_energy.py", "return self.fisher_root(2 * (v - self._mean(v)))", "return self.fisher_root(2 * v)", "energy"),
    M("_loss/_energy.py", "away = away - self._mean(away)", "pass", "energy"),
    M("_loss/_energy.py", "return sum_over(total, axes) / sum_over(count, axes)", "return total / count", "energy"),
    M("_block/_sums.py", "number = math.prod(g.shape[stack:-1])", "number = g.shape[stack]", "transformations"),
    M("_block/_gradients.py", "return matmul(g.mT, x)", "return matmul(g.mT, x) / x.shape[-2]", "blocks"),
    M("_block/_gradients.py", "math.prod(g.shape[stack + batch_axes : -1]) > 1", "math.prod(g.shape[stack + batch_axes : -1]) > 2", "blocks"),
    M("_block/_gradients.py", "moments = self.moments(gradients, gradients.ndim - 3, like)", "moments = self.moments(gradients, gradients.ndim - 3, like)\n        moments = jtu.tree_map(lambda m: m / 2, moments)", "program"),
    M("_block/_diagonal.py", "moment(g**2, x**2, stack", "moment(g**2, x, stack", "blocks"),
    M("_block/_full.py", "matrix = total / count.astype(total.dtype)", "matrix = total", "blocks"),
    M("_block/_identity.py", "/ math.prod(shape)", "/ shape[0]", "blocks"),
    M("_block/_tnt.py", "right=moment(x * g_norm, x, stack", "right=moment(x, x, stack", "blocks"),
    M("_block/_sharing.py", "g = jnp.sum(g, axis=shared)", "g = jnp.mean(g, axis=shared)", "scaling"),
    M("debug/_parts.py", "made = 1 if isinstance(operator, lx.MatrixLinearOperator) else _STEPS", "made = 1", "series"),
    M("_block/_series.py", "cross=moment(after, g, stack", "cross=moment(g, after, stack", "series"),
    M("_block/_series.py", "length=jnp.where(x.rows == 0, 1, x.rows", "length=jnp.where(x.rows == 0, 1, 2 * x.rows", "series"),
    # How a layer is linear.
    M("form/_dense.py", "matrix, column = matrix[..., :-1], matrix[..., -1]", "matrix, column = matrix[..., 1:], matrix[..., 0]", "forms"),
    M("form/_inputs.py", "return jnp.sum(weighted(self.x, weights), axis=axes, dtype=like.dtype)", "return jnp.sum(self.x, axis=axes, dtype=like.dtype)", "forms blocks"),
    M("_misc.py", "return jtu.tree_map(jnp.add, total, fn(*part)), None", "return fn(*part), None", "forms"),
    M("form/_inputs.py", "= 2**18, 2**24", "= 2**18, 2**18", "forms"),
    M("form/_inputs.py", "cpu=of(cpu), default=of(elsewhere)", "cpu=of(elsewhere), default=of(cpu)", "forms"),
    M("form/_inputs.py", "for offset in range(0, k * d, d):", "for offset in reversed(range(0, k * d, d)):", "forms"),
    M("form/_convolution.py", "x = jnp.pad(x, [*none, *widths], _modes[self.mode])", "x = jnp.pad(x, [*none, *widths])", "forms"),
    M("form/_lookup.py", "jnp.where(x < 0, x + self.number, x)", "x", "forms"),
    M("form/_gates.py", "start += leaf.shape[-1]\n", "start += 0\n", "forms layers"),
    M("form/_parameters.py", "start += size", "start += 0", "forms"),
    # Operators.
    M("_operator/_kronecker.py", "return left(self.output_factor, right(vector, self.input_factor))", "return left(self.output_factor.T, right(vector, 2 * self.input_factor))", "inverses"),
    M("_operator/_kronecker.py", "return jnp.outer(values(self.output_factor), values(self.input_factor))", "return jnp.outer(values(self.output_factor), 1 + values(self.input_factor))", "inverses"),
    M("_operator/_factor.py", "return applied(x, x, (0, 0))", "return x", "factorise"),
    M("_operator/_factor.py", "corner = first + contraction(below, beside, (0, 0))", "corner = first", "factorise"),
    M("_operator/_factor.py", "schur = factor[half:, half:] - contraction(below, below, (1, 1))", "schur = factor[half:, half:]", "factorise"),
    M("_operator/_products.py", "[b1, b2, b1]", "[b1, b1, b2]", "products"),
    M("_operator/_products.py", "[a1, a1, a2]", "[a1, a1, a1]", "products"),
    M("_operator/_products.py", "(x - high)", "(x - x)", "products"),
    M("_operator/_products.py", "default = jax.lax.Precision.DEFAULT", "default = None", "products"),
    M("_operator/_products.py", "-size % _ALIGNED", "0 * size", "products"),
    M("_operator/_products.py", "or default_precision() in _FULL", "", "products"),
    M("_operator/_products.py", "tpu=product(jax.lax.Precision.HIGH)", "tpu=product(None)", "products"),
    M("_operator/_spectral.py", "return v if right is None else applied(v, right.T)", "return v if right is None else applied(v, right)", "inverses"),
    M("_operator/_series.py", "gains.reshape(-1)[None, :], basis.T)", "gains.reshape(-1)[None, :] ** 2, basis.T)", "series"),
    M("_operator/_symmetric.py", "return product + jnp.asarray(self.damping, v.dtype) * v", "return product", "operators block_diagonal"),
    # Solvers.
    M("_solver/_damped.py", "jnp.sqrt(damping) * pi, units_in", "jnp.sqrt(damping) / pi, units_in", "inverses"),
    M("_solver/_damped.py", "jnp.maximum(by, rounding), by)", "by, by)", "inverses"),
    M("_solver/_damped.py", "jnp.maximum(by, rounding), by)", "by + 1e8 * rounding, by)", "inverses"),
    M("_solver/_damped.py", "by = jnp.where(by > 0, jnp.maximum(by, rounding), by)", "by = jnp.maximum(by, rounding)", "reliability"),
    M("_solver/_damped.py", "eye / unit, eye", "eye * unit, eye", "inverses"),
    M("_solver/_damped.py", "jnp.minimum(1, _LARGER * others)", "_LARGER * others", "inverses"),
    M("_solver/_damped.py", "known, eye = others > 0,", "known, eye = others >= 0,", "inverses"),
    M("_solver/_factored.py", "scaled = bias and self.scaled_bias", "scaled = self.scaled_bias", "inverses"),
    M("_solver/_damped.py", "diagonal(factor)[:-1]", "diagonal(factor)[1:]", "inverses layer_damping"),
    M("_solver/_eigh.py", ".power(-1, damping)", ".power(-1, 2 * damping)", "inverses"),
    M("_solver/_newton_schulz.py", "return jnp.where(norm < _LARGE, x, jnp.nan)", "return x", "blocks"),
    M("_solver/_subspace.py", "return jnp.maximum(values, 0), vectors", "return values * 0, vectors", "blocks"),
    M("_solver/_series.py", "v = v / state.gains\n        v = v - matmul(psi_out.T", "v = v - matmul(psi_out.T", "series"),
    # Losses and the Fisher.
    M("_loss/_softmax.py", "out = sv - p * jnp.sum(sv, axis=-1, keepdims=True)", "out = sv", "losses"),
    M("_loss/_softmax.py", "targets = jnp.where(known, targets, jnp.nan)", "pass", "losses"),
    M("_loss/_squared.py", "return 0.5 * jnp.sum((y", "return jnp.sum((y", "losses"),
    M("_loss/_normal.py", "(0.5**0.5 * v_s)", "(0.5 * v_s)", "losses normal"),
    M("_loss/_sigmoid.py", "deviation = jnp.exp(-0.5 *", "deviation = jnp.exp(-1.0 *", "losses"),
    M("_loss/_poisson.py", "jnp.sqrt(rate) * noise", "rate * noise", "losses"),
    M("_loss/_l2.py", "0.5 *", "1.0 *", "losses"),
    M("_loss/_density.py", "return -targets.astype(log_p.dtype) * log_p", "return -log_p", "densities"),
    M("_loss/_density.py", "return self.fisher_product(v)", "return super().hessian_product(v)", "densities"),
    M("_loss/_density.py", "return ones * draw(jax.random.rademacher, key, ones.shape, ones.dtype)", "return draw(jax.random.normal, key, ones.shape, ones.dtype)", "densities"),
    M("_loss/_huber.py", "near * (size - near / 2)", "near * (size - near)", "likelihoods"),
    M("_loss/_huber.py", "2 * jnp.exp(-(delta**2) / 2) / delta", "jnp.exp(-(delta**2) / 2) / delta", "likelihoods"),
    M("_loss/_huber.py", "jnp.log((1 - u) / (1 - central)) / delta", "jnp.log((1 - u) / (1 - central))", "likelihoods"),
    M("_loss/_huber.py", "near = size <= jnp.asarray", "near = size > jnp.asarray", "normal"),
    M("_loss/_quantile.py", "jnp.sqrt(q * (1 - q))", "jnp.sqrt(q)", "likelihoods"),
    M("_loss/_quantile.py", "y + above / q - below / (1 - q)", "y + above / (1 - q) - below / q", "likelihoods"),
    M("_loss/_student_t.py", "(nu + 1) / (nu + 3)", "nu / (nu + 3)", "likelihoods"),
    M("_loss/_student_t.py", "jnp.expm1(-2 / nu *", "jnp.expm1(-1 / nu *", "likelihoods"),
    M("_loss/_student_t.py", " + jnp.log(s)", "", "likelihoods"),
    M("_loss/_ordinal.py", "return (below - above).astype", "return (below + above).astype", "likelihoods"),
    M("_loss/_ordinal.py", "0.5 / jnp.sinh(gap / 2)", "0.5 / jnp.sinh(gap)", "likelihoods"),
    M("_loss/_ordinal.py", "_padded(below, 0, 1) + _padded(above, 1, 0)", "_padded(below, 1, 0) + _padded(above, 0, 1)", "likelihoods"),
    M("_loss/_ordinal.py", "jnp.argmax(log_p + noise, axis=-1)", "jnp.argmax(log_p - noise, axis=-1)", "likelihoods"),
    M("_loss/_ordinal.py", "return (targets >= 0) & (targets < self.root_shape[-1])", "return targets >= 0", "losses"),
    M("_fisher/_sampled.py", "s * self.num_samples**-0.5", "s * 1.0", "estimators"),
    M("_fisher/_sampled.py", "keys = own(index * number + jnp.arange(number))", "keys = own(0 * index + jnp.arange(number))", "estimators"),
    # The tag.
    M("_tag/_primitive.py", "axis = 0 if stacked else stack + examples * directions", "axis = 0", "transformations tag"),
    M("_tag/_primitive.py", "stack + examples * directions", "stack", "derivatives"),
    M("_tag/_primitive.py", "primals[layout.num_rows - 1], *shared", "y_dot, *shared", "derivatives"),
    M("_tag/_primitive.py", "derivatives = y * factorial, x * factorial", "derivatives = y, x", "derivatives"),
    M("_tag/_primitive.py", "return [unseen_p.bind(ct, number=label.number), marks, *nothing]", "return [ct, None, *nothing]", "derivatives program"),
    M("_tag/_primitive.py", "return y_dot + _unseen_zero(x_dot, aval_of(y_dot), label)", "return y_dot", "derivatives"),
    M("_tag/_primitive.py", "stack=stack + stacked,", "stack=stack,", "tag transformations"),
    M("_tag/_primitive.py", "    if not isinstance(layout.collector, RowCollector):", "    if False:", "tag"),
    M("_tag/_tagged.py", "changed = fn(node.tag, node, node, *rest_of_tags)", "changed = node", "tag layers"),
    # What is linearised.
    M("_curvature/_linearise.py", "ratio = 1.0 if len(terms) == 1 else total / count.astype(total.dtype)", "ratio = 1.0", "several_losses"),
    M("_curvature/_linearise.py", "key = jax.random.fold_in(key, jax.lax.axis_index(axis))", "pass", "sharding"),
    M("_curvature/_linearise.py", "coefficients.append(c * o.coefficient * self.share.fraction)", "coefficients.append(c * o.coefficient)", "batches"),
    M("_curvature/_average.py", "new_weight = ema * weight + 1", "new_weight = weight + 1", "optimizer"),
    M("_curvature/_average.py", "return old + (new - old) / new_weight.astype(old.dtype)", "return new", "optimizer"),
    M("_curvature/_batch.py", "piece_key = jax.random.fold_in(key, index)", "piece_key = key", "batches"),
    M("analysis/_accumulate.py", "alone = [a * (2 * a - sum(roots)) for a in roots]", "alone = [a * a for a in roots]", "several_losses"),
    M("_curvature/_gradient_rows.py", "return jnp.all(jnp.stack(jtu.tree_leaves(map_tags(same, grads, layers))))", "return jnp.array(True)", "through_rows"),
    M("analysis/_block_diagonal.py", "squared_norm(op) + 2 * shift * trace(op)", "squared_norm(op) + shift * trace(op)", "block_diagonal"),
    M("analysis/_block_diagonal.py", "return operator.mv(vector).reshape(matrix.shape) + shift * matrix", "return operator.mv(vector).reshape(matrix.shape)", "block_diagonal"),
    M("analysis/_model_operator.py", "scale = jnp.asarray(coefficient, count.dtype) / count", "scale = jnp.asarray(1, count.dtype) / count", "operators curvlinops models"),
    M("analysis/_model_operator.py", "return evaluate(objective, model, whole(objective, model))", "return evaluate(objective, model, whole(objective, model)) / 2", "operators models"),
    M("analysis/_capture.py", "return value * total.astype(value.dtype)", "return value", "capture"),
    M("_tag/_weights.py", "jnp.where(labelled, w, jnp.minimum(mean, sizes * relative))", "w", "masks"),
    M("_tag/_weights.py", "jnp.minimum(mean, sizes * relative)", "sizes * relative", "masks"),
    M("_tag/_weights.py", "within = tuple(range(stack + (w.ndim > stack + 1), w.ndim))", "within = tuple(range(stack, w.ndim))", "masks"),
    M("_curvature/_linearise.py", "inputs = statistics if probe is None else map_tags(_statistics, probe)", "inputs = statistics", "masks"),
    M("_tag/_weights.py", "return jnp.mean(weights, axis=tuple(extra))", "return jnp.max(weights, axis=tuple(extra))", "several_losses"),
    M("_tag/_partition.py", "return tagged, parameters_of(rest)", "return tagged, rest", "optimizer notebooks"),
    # What a loss function does with the tags.
    M("_program/_tracing.py", "sources=y.sources & ~covered | x.sources & covered", "sources=y.sources", "program verify"),
    M("_program/_tracing.py", "sources=y.sources & ~covered | x.sources & covered", "sources=y.sources & ~covered", "derivatives"),
    M("_program/_program.py", "if changed:", "if False:", "program run"),
    M("_program/_bypass.py", "        elif bypassing and not allowed:\n            bypassed", "        elif False:\n            bypassed", "program verify reach"),
    M("_program/_program.py", "if (outside and trace.is_constant(use)) or trace.has_few_rows(use):", "if False:", "program"),
    M("_program/_interpreter.py", "results = body(carried)", "results = carried + body(carried)[n:]", "program"),
    M("_program/_interpreter.py", "return any(zero)\n", "return all(zero)\n", "program"),
    M("_program/_jaxpr.py", "use._replace(number=np.asarray(next(numbers))) if known else use", "use._replace(number=1 + 0 * np.asarray(next(numbers))) if known else use", "capture"),
    # Inverses and preconditioning.
    M("_inverse/_factorise.py", "jnp.asarray(damping, factors.l2.dtype) + factors.l2\n\n\ndef for_each", "jnp.asarray(damping, factors.l2.dtype)\n\n\ndef for_each", "factorise optimizer"),
    M("_jobs.py", "part = slice(int(end) - math.prod(job.shape), int(end))", "part = slice(math.prod(job.shape))", "factorise"),
    M("_jobs.py", "me * n + jnp.arange", "n + jnp.arange", "distributed"),
    M("_jobs.py", "new = batch.some(batch.number - left_over[i] + places)", "new = batch.some(places)", "distributed"),
    M("_jobs.py", "least = min(free, key=lambda d: totals[d])", "least = free[0]", "distributed"),
    M("_devices.py", "axes = [a for a in mesh.manual_axes if a not in varying and _is_tracked(a)]", "axes = list(mesh.manual_axes)", "distributed sharding"),
    M("_tag/_tag.py", "return self.form.replace(new, tuple(placed))", "return new", "distributed"),
    M("_operator/_packed.py", "padded = _pad(whole, -rows % block, 0, 0)", "padded = whole", "distributed"),
    M("_optimizer/_step.py", "inverse=still_sharded(new.inverse)", "inverse=new.inverse", "distributed"),
    M("_inverse/_precondition.py", "*unpacked((factors, state)), damping_of(factors, damping)", "*unpacked((factors, state)), damping", "optimizer block_diagonal"),
    M("_inverse/_precondition.py", "if has_sharded((curvature, inverse)):", "if False:", "distributed"),
    M("_inverse/_through_rows.py", "ones = None if bias is None else jnp.ones_like(x[:, :1])", "ones = None if bias is None else 2 * jnp.ones_like(x[:, :1])", "through_rows"),
    # The optimizer.
    M("_optimizer/_proposal.py", "momentum.astype(v.dtype) * v - scale", "v - scale", "optimizer"),
    M("_optimizer/_bounds.py", "previous = jnp.maximum(extent.squared_length, slope**2 / _positive(norm))", "previous = extent.squared_length", "trust"),
    M("_optimizer/_bounds.py", "return jnp.clip(2 - 2 * cosine, 0, 1)", "return jnp.ones_like(cosine)", "trust"),
    M("_optimizer/_trial.py", "increase=finite_update & self._risen(found.new_loss)", "increase=finite_update & False", "adaptive reliability"),
    M("_optimizer/_bounds.py", "rate = _at_most(most, rate**2 * norm) * rate", "rate = _at_most(most, rate * norm) * rate", "trust"),
    M("_optimizer/_bounds.py", "if self.start.is_natural:", "if True:", "trust"),
    M("_optimizer/_bounds.py", "scale = jnp.minimum(scale, _at_most(most, coupling * length))", "scale = jnp.minimum(scale, _at_most(most, length))", "trust"),
    M("_optimizer/_bounds.py", "Extent(length, momentum * slope, coupling, growth)", "Extent(length, momentum * slope - rate * norm, coupling, growth)", "trust"),
    M("_optimizer/_extent.py", "ratio = (slope - self.slope) /", "ratio = (slope + self.slope) /", "trust"),
    M("_optimizer/_extent.py", "jnp.where(known, jnp.maximum(ratio, 1), self.coupling)", "jnp.where(known, ratio, self.coupling)", "trust"),
    M("_optimizer/_extent.py", "known = moving & jnp.isfinite(ratio)", "known = moving", "trust"),
    M("_optimizer/_extent.py", "jnp.where(moving, self.squared_length, 1)", "self.squared_length", "debugging"),
    M("_optimizer/_extent.py", "times(factor**2, self.squared_length)", "times(factor, self.squared_length)", "trust"),
    M("_optimizer/_extent.py", "slope = times(factor, self.slope)", "slope = self.slope", "trust"),
    M("_block/_joint.py", "moment(matmul(matmul(b, b.mT), a), a, stack, like)", "moment(a, a, stack, like)", "joint"),
    M("_block/_joint.py", "input_factor=trailing(trace, a) * a", "input_factor=a", "joint"),
    M("_block/_joint.py", "return {**moments, **sums}", "return {**moments, **{n: 2 * a for n, a in sums.items()}, 'left': 2 * moments['left']}", "joint"),
    M("_program/_program.py", "if not isinstance(tag.block, AbstractJointBlock) or len(uses) != 1:", "if not isinstance(tag.block, AbstractJointBlock) or not uses:", "joint"),
    M("_program/_program.py", "if trace.repeats(use) or trace.splits_examples(use) or trace.is_constant(use):\n        return False\n    if use.derivative", "if use.derivative", "joint"),
    M("_block/_kronecker.py", "return self.sharing.joint and has_matrices and not self.tied", "return self.sharing.joint and has_matrices", "joint shared"),
    M("_optimizer/_trust.py", "jnp.maximum(self.measured_radius, jnp.abs(value) / 10)", "jnp.abs(value) / 10", "trust"),
    M("_loss/_base.py", "if got != wanted:", "if False:", "losses"),
    M("_loss/_base.py", "if losses.shape != self.leading:", "if False:", "losses"),
    M("_tag/_primitive.py", "if first_difference is not None:", "if False:", "tag"),
    M("_fisher/_base.py", "if fisher is not None:\n        check_instance", "if False:\n        check_instance", "estimators"),
    M("_optimizer/_trust.py", "length = step.astype(float) * self.fraction", "length = step.astype(float)", "trust"),
    M("_optimizer/_trust.py", "most = jnp.where(share < squared_radius, share, squared_radius)", "most = squared_radius", "trust"),
    M("_optimizer/_trust.py", "jnp.minimum(wanted, _FASTER * before), 1)", "wanted, 1)", "trust"),
    M("_optimizer/_trust.py", "jnp.where(wanted > 1, ", "jnp.where(wanted > 0, ", "trust"),
    M("_optimizer/_bounds.py", "jnp.where(start.teaches, growth, extent.growth)", "growth", "trust"),
    M("_optimizer/_bounds.py", "if start.squares == 0:", "if False:", "trust"),
    M("_loss/_base.py", "if not alone or not all(", "if not all(", "trust"),
    M("_loss/_base.py", "not all(loss.sum_of_squares for", "not any(loss.sum_of_squares for", "trust"),
    M("_loss/_base.py", "sum(loss.root_shape[-1] for loss in self.losses)", "self.losses[0].root_shape[-1]", "trust"),
    M("_optimizer/_trust.py", "large = self.large_loss * max(1.0, squares / _FEW)", "large = self.large_loss", "trust"),
    M("_optimizer/_extent.py", "jnp.where(factor > 0, factor * a, 0)", "factor * a", "trust"),
    M("_optimizer/_trust.py", "return min(1.0, full) * most, most * self", "return most, most * self", "trust"),
    M("_optimizer/_trust.py", "self.loss_fraction * min(max(1.0, full), _MANY)", "self.loss_fraction * max(1.0, full)", "trust"),
    M("_optimizer/_trust.py", "self.loss_fraction * min(max(1.0, full), _MANY)", "self.loss_fraction", "trust"),
    M("_optimizer/_damping.py", "jnp.where(trusted, damping * factor, damping)", "jnp.where(trusted, damping, damping)", "adaptive"),
    M("_optimizer/_damping.py", "jnp.maximum(new, same), new)", "new, new)", "adaptive"),
    M("_optimizer/_damping.py", "(2 * jnp.where(descends, promised, 1))", "jnp.where(descends, promised, 1)", "adaptive"),
    M("_optimizer/_layer_damping.py", "lower = jnp.minimum(first, self.stiffness * jnp.sqrt(m.weights) / norm)", "lower = first", "layer_damping"),
    M("_optimizer/_layer_damping.py", "most_of_all = jnp.minimum(damping * size, share", "most_of_all = jnp.minimum(damping, share", "layer_damping"),
    M("_optimizer/_layer_damping.py", "number = -1 if has_bias(tag.form, layer) else None", "number = None", "layer_damping"),
    M("_optimizer/_layer_damping.py", "few / max(few, terms)", "few / max(1, terms)", "layer_damping"),
    M("_optimizer/_layer_damping.py", "fraction = self.curvature_fraction * part", "fraction = self.curvature_fraction", "layer_damping"),
    M("_optimizer/_trial.py", "ft.partial(rule, *arguments, self.start.terms)", "ft.partial(rule, *arguments, None)", "layer_damping"),
    M("_optimizer/_quadratic.py", "independent = sine_squared > 8 * jnp.finfo(b.dtype).eps", "independent = sine_squared > -1", "adaptive"),
    M("_optimizer/_schedule.py", "(step & (step - 1) == 0) & (step < period)", "(step < 0) & (step < period)", "trust optimizer"),
    M("_optimizer/_state.py", "weight = decay.astype(self.weight.dtype) * self.weight + 1", "weight = self.weight + 1", "optimizer trust"),
    M("_optimizer/_schedule.py", "return (self.weight == 0) | self.again", "return self.weight < 0", "factorise"),
    M("_optimizer/_after.py", "velocity_after(info.rejected, uphill)", "velocity_after(info.rejected, back)", "run reliability"),
    M("_optimizer/_proposal.py", "jnp.where(jnp.isfinite(a), a, 0)", "a", "reliability optimizer"),
    M("_optimizer/_proposal.py", "jtu.tree_map(finite, (self.natural, self.before))", "jtu.tree_map(finite, self.natural), self.before", "reliability"),
    M("_optimizer/_state.py", "moves = taken & (p != mean)", "moves = p != mean", "adaptive"),
    M("_optimizer/_state.py", "share = jnp.where(taken, 1 / weight, 0)", "share = 1 / weight", "adaptive reliability"),
    M("_optimizer/_after.py", "weight=jnp.where(back, 0, state.weight)", "weight=state.weight", "divergence"),
    M("_optimizer/_after.py", "iterates = tree_where(back, iterates.at(rollback.params), iterates)", "pass", "divergence"),
    M("_optimizer/_after.py", "info.faults.increase | back", "info.faults.increase", "divergence"),
    M("_optimizer/_rollback.py", "raises = jnp.where(finite, self.raises + 1, self.raises)", "raises = self.raises + 1", "divergence"),
    M("_optimizer/_rollback.py", "good = ~bad & finite & (value.astype(level.dtype) <= level)", "good = finite", "divergence"),
    M("_optimizer/_rollback.py", "level = jnp.where(accepted | ~began, size, level)", "level = jnp.where(~began, size, level)", "divergence"),
    M("_optimizer/_rollback.py", "jnp.where(bad | ~finite, self.loss, value.astype(self.loss.dtype))", "value.astype(self.loss.dtype)", "typing"),
    M("_optimizer/_rollback.py", "d * self.caution.astype(d.dtype)", "d", "divergence"),
    M("_optimizer/_rollback.py", "return bound / self.caution.astype(bound.dtype)", "return bound", "divergence"),
    M("_optimizer/_rollback.py", "return self.due | (not is_bounded)", "return self.due | True", "divergence"),
    M("_optimizer/_after.py", "bad = info.faults.loss | info.faults.gradient | rollback.diverged(info.loss)", "bad = info.faults.loss | info.faults.gradient | info.faults.divergence", "divergence"),
    M("_optimizer/_bounds.py", "extent.coupling_given(slope), extent.coupling\n", "extent.coupling_given(slope), extent.coupling_given(slope)\n", "divergence"),
    M("_optimizer/_trial.py", "learns = self.finite & self.start.teaches", "learns = self.finite", "divergence"),
    M("_optimizer/_start.py", "~(diverged | empty)", "~diverged", "divergence"),
    M("_optimizer/_start.py", "teaches=(state.weight == 0) | ", "teaches=", "divergence"),
    M("_optimizer/_collect.py", "return due.when(compute, before, taken)", "return due.when(compute, before)", "divergence"),
    M("_optimizer/_collect.py", "include(*self[:2], model, new, ema, self.fine & taken)", "include(*self[:2], model, new, ema, self.fine)", "divergence"),
    M("_optimizer/_collect.py", "fine = took | (self.fine & jnp.logical_not(taken))", "fine = took", "divergence"),
    M("_optimizer/_rollback.py", "_RAISED ** self.raises", "_RAISED ** (0 * self.raises)", "divergence"),
    M("_optimizer/_rollback.py", "level = jnp.where(bad, _RAISED * self.level, level)", "level = jnp.where(bad, self.level, level)", "divergence"),
    M("_optimizer/_rollback.py", "again = jnp.where(self.caution > 1, _RAISED, 1.0)", "again = jnp.where(self.caution > 1, 1.0, 1.0)", "divergence"),
    M("_optimizer/_rollback.py", "less = jnp.where(number == _PATIENCE + 1, self.caution / _MORE, less)", "pass", "divergence"),
    M("_optimizer/_rollback.py", "tree_where(good | (finite & ~began), by_path", "tree_where(good, by_path", "divergence"),
    M("_optimizer/_bounds.py", "most = state.rollback.narrowed(state.norm_constraint)", "most = state.norm_constraint", "divergence"),
    M("_optimizer/_bounds.py", "most, most_of_velocity = map(state.rollback.narrowed, bounds)", "most, most_of_velocity = bounds[0], state.rollback.narrowed(bounds[1])", "divergence"),
    M("_optimizer/_layer_damping.py", "trace=jnp.maximum(trace(operator), whole)", "trace=trace(operator)", "layer_damping"),
    M("_optimizer/_layer_damping.py", "weights=jnp.maximum(total(weights), part)", "weights=total(weights)", "layer_damping divergence"),
    M("_optimizer/_collect.py", "index_key = None if key is None else jax.random.fold_in(key, index)", "index_key = key", "optimizer"),
    M("_optimizer/_after.py", "params = masked(params, choice.mask if isinstance(choice, WeightDecay) else None)", "pass", "adaptive"),
    M("_optimizer/_after.py", "proposal.learning_rate * weight_decay", "weight_decay", "adaptive"),
    M("_optimizer/_collect.py", "number = jnp.where(first, 1 + burn_in, 1)", "number = 1 + burn_in", "optimizer run"),
    M("_optimizer/_guard.py", "return (new_value - value).astype(tolerance.dtype) > tolerance", "return new_value > tolerance", "adaptive"),
    M("_optimizer/_hyperparameters.py", "return at(source if scheduled else value, step)", "return at(value, step)", "adaptive optimizer"),
    M("_optimizer/_hyperparameters.py", "return jnp.all((stacked >= 0) & (stacked <= jnp.array(most, float)))", "return jnp.all(stacked >= 0)", "reliability"),
    M("_optimizer/_trial.py", "return bad & self._looks", "return bad", "adaptive"),
    M("_curvature/_batch.py", "part = self.first(fisher.examples)", "part = self", "batches"),
    M("_program/_program.py", "regularised=trace.regularised", "regularised=False", "through_rows"),
    M("_optimizer/_optax.py", "natural = jtu.tree_map(lambda n: jnp.where(ready, n, 0), natural)", "pass", "optax run"),
    M("_optimizer/_fallback.py", "return fallback.update(grads, state, params)", "return grads, state", "optimizer optax"),
    # Devices, layers, and what is said of a model.
    M("_devices.py", "axes |= varying(jax.typeof(leaf))", "pass", "sharding"),
    M("_misc.py", "small, large = _by_size(leaves, _SMALL)", "small, large = _by_size(leaves[:1], _SMALL)", "reliability"),
    M("_module.py", "if first not in fields:", "if False:", "tag"),
    M("_module.py", "value = replaced(old, rest, value) if rest else value", "pass", "tag"),
    M("_module.py", "vars(new).update({**fields, first: value})", "vars(new).update({first: value})", "tag"),
    M("_tag/_primitive.py", " or not any(map(is_linear_operand, slots))", "", "tag"),
    M("_tag/_tag.py", "empty.contents._replace(row_slots=self.contents.row_slots)", "empty.contents", "through_rows"),
    M("_block/_collector.py", "zeros_of(slot) if new is None else new", "new", "derivatives layers"),
    M("_tag/_tagged.py", "        _check_once(where, layer)\n", "        pass\n", "errors"),
    M("_tag/_tagged.py", "        _check_field(where, tag, layer)\n", "        pass\n", "errors"),
    M("_tag/_tagged.py", "if p is not None and id(p) not in leaves:", "if False:", "errors"),
    M("_program/_program.py", "    check_tracked()\n", "    pass\n", "distributed"),
    M("_jax.py", "x, mapped.size, axis, mapped.explicit_mesh_axis", "x, mapped.size, axis, None", "sharding"),
    M("_misc.py", "jax.lax.select(pred, t, f) if alike", "jax.lax.select(pred, f, t) if alike", "optimizer"),
    M("nn/_linear.py", "y = y if self.bias is None else y + self.bias", "pass", "layers"),
    M("nn/_shared.py", "tied=True", "tied=False", "layers"),
    # Arrays of any module.
    M("_program/_interpreter.py", 'padded = self.value_of("padded", value.expression, sources=value.sources)', "padded = value", "program"),
    M("_program/_jaxpr.py", "if eqn.primitive.name in SCATTERS:", "if False:", "program"),
    M("_program/_interpreter.py", "tracked, self.tracked = self.tracked, _ALL", "tracked = self.tracked", "program"),
    M("_program/_interpreter.py", "if any(map(is_program, eqn.params.values())):", "if True:", "program"),
    M("_program/_tracing.py", "c.ndim > 0 or jnp.issubdtype(c.dtype, jax.dtypes.prng_key)", "c.ndim > 0", "program"),
    M("_program/_trace.py", "            or not self.has_example_axis(use)\n        )", "        )", "program reach"),
    M("_program/_tracing.py", "if sources & parameter_bit(number) and not may_bypass(uses, number, covered)", "if sources & parameter_bit(number)", "raw_advice"),
    M("_program/_program.py", "self._replace(joint=frozenset()) if fisher.joins_positions else self", "self", "joint estimators"),
    M("_raw/_facts.py", "or term.stack in term.axes.flips", "", "raw"),
    M("_raw/_facts.py", "is_whole = term.axes.lengths[term.stack] == size", "is_whole = True", "raw"),
    M("_raw/_sites.py", "if [*rows] != sorted(rows, key=lambda f: (f.axis, -f.stride)):", "if False:", "raw"),
    M("_raw/_watched.py", "if bound.bias is not None and bias is None:", "if False:", "raw"),
    M("form/_lookup.py", "        x = x.astype(int)\n", "", "layers"),
    M("_optimizer/_trial.py", "model(jnp.stack([n.astype(best.dtype) for n in lengths]))", "model(best)", "adaptive"),
    M("_optimizer/_trial.py", "due = (state.weight == 0) & self.finite & jnp.any(self.averaged.known)", "due = (state.weight == 0) & self.finite", "run"),
    M("_optimizer/_trial.py", "share_of(proposal.damping, jnp.sqrt(proposal.squares), tagged)", "share_of(proposal.damping, proposal.norm, tagged)", "adaptive"),
    M("_optimizer/_choices.py", "if momentum is not None and rules.norm_constraint is not None:", "if False:", "adaptive"),
    M("_optimizer/_said.py", "if one_rule and choices", "if choices", "adaptive"),
    M("_program/_interpreter.py", "return zero[0] and not zero[1]", "return zero[0]", "program"),
    M("_program/_interpreter.py", 'return zero[0] and eqn.params["y"] > 0', "return zero[0]", "program"),
    M("_program/_interpreter.py", 'name in _ENTRYWISE or (name == "integer_pow" and eqn.params["y"] > 0)', 'name in _ENTRYWISE or name == "integer_pow"', "program"),
    M("_program/_interpreter.py", "return [other._replace(sources=other.sources | marks)]", "return [other]", "derivatives"),
    M("_program/_interpreter.py", "return [ZERO._replace(sources=marks)] * len(eqn.outvars)", "return [ZERO] * len(eqn.outvars)", "derivatives"),
    M("_program/_trace.py", "if use.example_shape != () or len(self.examples) > 1 or self.examples == (1,):", "if use.example_shape != () or self.examples == (1,):", "program"),
    M("_program/_trace.py", "return all(self._becomes_examples(use, bits) is False for bits in axes or (0,))", "return False", "reach"),
    M("_program/_trace.py", "        if self.counts_examples(use) is False:\n            return False\n", "", "reach"),
    M("_program/_trace.py", "        if self.counts_examples(use):\n            return False\n", "", "reach"),
    M("_program/_trace.py", "self.examples and self.may_be_examples(use, 0)", "self.examples", "reach"),
    M("_program/_reach.py", "        for axis in summed:\n            axes[axis] = out.known << SUMMED\n", "", "reach"),
    M("_program/_reach.py", "repeated = length == 1 and call.name in _REPEATING", "repeated = False", "reach"),
    M("_program/_backwards.py", "reach._replace(loops=(*outer, 0)).doubting(rounds)", "reach", "reach"),
    M("_program/_backwards.py", "if others or any(map(is_program, params.values())):", "if others:", "reach"),
    M("_program/_tracing.py", "[value._replace(sources=value.sources & ~covered)], []", "[value], []", "reach"),
    M("_program/_program.py", "if self.shared and not fisher.separates_examples:", "if False:", "reach"),
    M("_program/_program.py", 'if use.example_shape == () or trace.counts_examples(use):', 'if use.example_shape == ():', "reach"),
    M("_program/_trace.py", "return False if becomes is None and any(others) else becomes", "return becomes", "reach"),
    M("_program/_trace.py", "first = 1 << use.stack if in_front else 1", "first = 1 | 1 << use.stack", "reach"),
    M("_program/_program.py", "if old.example_shape != new.example_shape and knowing.counts_examples(new)", "if old.example_shape != new.example_shape", "reach"),
    M("_program/_program.py", "trace.lacking | _found_lacking(trace, trace_with)", "trace.lacking", "reach"),
    M("_program/_reach.py", '    "stop_gradient": _stopped,\n', "", "reach"),
    M("_program/_backwards.py", "first = [_after_loop(_other_rounds(reach)) for reach in carry]", "first = [_after_loop(reach) for reach in carry]", "reach"),
    M("debug/_plan.py", "if costs.program.shared:", "if False:", "reach"),
    M("_tag/_primitive.py", "skipped=(*layout.skipped, mapped.size)", "skipped=()", "program reach"),
    M("_program/_tracing.py", 'convolves=contains(closed.jaxpr, "conv_general_dilated")', "convolves=False", "channels"),
    M("_curvature/_channels.py", 'set_lowering(convolution_p, _with_channels_last, "cpu")', "pass", "channels"),
    M("_curvature/_channels.py", "return convolution_p.bind(*primals, **params), tangent", "return _convolution(*primals, **params), tangent", "channels"),
    M("_curvature/_channels.py", "axes[there] = here", "axes[here] = there", "channels"),
    M("nn/_rnn.py", "return {n: tag.cover(getattr(cell, n)) for", "return {n: getattr(cell, n) for", "reach"),
    M("_tag/_primitive.py", "set_transpose(unseen_p, _transpose_unseen)", "pass", "derivatives"),
    M("_tag/_primitive.py", "marks = _unseen_zero(ct, aval_of(x_dot), label) if is_linear_operand(x_dot) else None", "marks = None", "derivatives"),
    M("_raw/_notes.py", "return not isinstance(site.use.form, Lookup)", "return True", "raw"),
    M("_raw/_notes.py", 'name = "others" if "others" not in names else "other arrays"', 'name = "others"', "raw"),
    M("_raw/_notes.py", "return not part.tied or block is None or isinstance(block, Kronecker)", "return True", "raw"),
    M("_raw/_axes.py", "axes = tuple(self.axes[i] for i in permutation)", "axes = self.axes", "raw"),
    M("_raw/_axes.py", "window[original] = first + start * stride, first + stop * stride", "window[original] = start * stride, stop * stride", "raw"),
    M("_raw/_axes.py", "flips ^= {original}", "pass", "raw"),
    M("_raw/_sites.py", "last = sorted([i for i in there if is_feature[i]], key=key)", "last = [i for i in there if is_feature[i]]", "raw"),
    M("_raw/_sites.py", "mapped = x.shape[0] > 1", "mapped = False", "raw"),
    M("_raw/_moves.py", "axes.window != there.window or ", "", "raw_programs"),
    M("_raw/_moves.py", "or axes.flips or axes.copied", "or axes.copied", "raw_programs"),
    M("_raw/_covered.py", "if not modules:", "if modules:", "raw_advice"),
    M("_raw/_covered.py", 'all(name and "." not in name for name in keys)', "all(keys)", "raw_advice"),
    M("_raw/_convert.py", 'f"{array.module}.tag[', 'f"{array.module}[', "raw_advice"),
    M("nn/_convert.py", "return not (isinstance(layer, Derived) or type(layer) in _untagged)", "return False", "raw_advice"),
    M("_raw/_moves.py", 'minus = eqn.primitive.name == "sub"', "minus = False", "raw"),
    M("_raw/_moves.py", 'number = 1 / number if name == "div" else number', "pass", "raw"),
    M("_raw/_moves.py", "if order is None or not frame.used_once(eqn.invars[i]):", "if order is None:", "raw"),
    M("_raw/_facts.py", "term = term._replace(scale=sum(scales))", "pass", "raw_programs"),
    M("_raw/_walk.py", "self.visitor.otherwise(term)  # In later rounds, the carry is another value.", "pass", "raw_programs"),
    M("_raw/_moves.py", "frame.settle(eqn.invars)  # What it is multiplied by may be a result.", "pass", "raw_programs"),
    M("_raw/_notes.py", "{*notes.other_uses, *biases}", "notes.other_uses", "raw_programs"),
    M("_raw/_notes.py", "if bias in notes.other_uses or bias in notes.uses:", "if False:", "raw"),
    M("_raw/_notes.py", "if sum(map(size_of, leaves)) != size or not _are_apart", "if not _are_apart", "raw_programs"),
    M("_raw/_watched.py", "if key == tag_key or (tied and transposed_key(key) == tag_key):", "if True:", "raw"),
    M("_raw/_watched.py", "model = joined(treedef.unflatten(filled[: len(leaves)]))", "model = treedef.unflatten(filled[: len(leaves)])", "raw_complex"),
    M("_raw/_watched.py", "if _has_complex_fields(self):", "if False:", "raw_complex"),
    M("_raw/_watched.py", "return any(type(node)._complex_fields for node in watched_within(module))", "return bool(type(module)._complex_fields)", "raw_complex"),
    M("nn/_convert.py", 'return all(hasattr(p, "shape") and not is_complex(p) for p in arrays)', 'return all(hasattr(p, "shape") for p in arrays)', "raw_complex"),
    M("_fisher/_centred.py", "p is not None and p.dtype.itemsize < 4", "False", "energy"),
    M("_raw/_parts.py", "return HeldParts(jnp.real(array), jnp.imag(array))", "return HeldParts(jnp.imag(array), jnp.real(array))", "raw_complex"),
    M("_raw/_parts.py", "accumulator(part.dtype)", "part.dtype", "raw_complex"),
    M("_raw/_parts.py", "if node.real is None and node.imag is None:", "if False:", "raw_complex"),
    M("_raw/_convert.py", 'if isinstance(parts, HeldParts) and f"{name}.real" not in trained:', "if False:", "raw_complex"),
    M("_raw/_convert.py", "return joined(map_watched(plain, model))", "return map_watched(plain, model)", "raw_complex"),
    M("_raw/_watched.py", '    if "tag" in vars(module):', "    if False:", "raw_transformations"),
    M("_raw/_watched.py", "        if _is_called_later(out, model):", "        if False:", "raw_programs"),
    M("form/_view.py", "back = sorted(range(len(self.order)), key=self.order.__getitem__)", "back = self.order", "raw"),
    M("form/_view.py", "return array.at[self._index].set(part)", "return array.at[self._index].set(0 * part)", "raw"),
    M("_tag/_tagged.py", "layers += tagged_layers(_untagged(node), path)", "pass", "raw_programs"),
    M("debug/_verify.py", "norms = [jnp.linalg.norm(a, axis=(-2, -1)) for a in (gradient - seen, gradient)]", "norms = [jnp.linalg.norm(a, axis=(-2, -1)) for a in (seen - seen, gradient)]", "verify"),
    M("debug/_plan.py", "jnp.sqrt(coefficient * loss.term_weights / loss.count)", "jnp.sqrt(loss.term_weights / loss.count)", "verify"),
    M("debug/_compare.py", "[a * (1 - np.eye(n)) for a in squares]", "squares", "verify"),
    M("debug/_compare.py", "kernel = matmul(right(x, operator.input_factor), x.T)", "kernel = matmul(x, x.T)", "verify_rows"),
    M("debug/_compare.py", "jax.lax.map(lambda own: matmul(kernel, own), g)", "g", "verify_rows"),
    M("debug/_rows.py", "if use is None or use.derivative:", "if use is None:", "verify_rows"),
    M("debug/_compare.py", "np.sqrt((k - 1) * np.var(a, -1))", "np.sqrt(np.var(a, -1))", "verify"),
    M("debug/_plan.py", "index, jax.random.key(2))", "0, jax.random.key(2))", "verify"),
    M("debug/_plan.py", "return a * trailing(signs[: len(a)].astype(a.dtype), a)", "return a", "verify"),
    M("debug/_verify.py", "if size.bytes <= problem.memory]", "]", "verify"),
    M("debug/_verify.py", "rows > every.examples", "rows > every.terms", "verify"),
    M("debug/_verify.py", "if i in every.work.called else", "if i not in every.work.called else", "verify"),
    M("debug/_check.py", "if self.is_off(1e3) and np.any(np.isnan(self.alone)):", "if self.is_off(1e3):", "verify"),
    M("debug/_spectra.py", "for factor in factors if factor.ndim == 2", "for factor in factors", "verify"),
    # Surrogates.
    M("_loss/_base.py", "return _has_targets(objective) or not self.is_surrogate", "return True", "surrogate"),
    M("_optimizer/_trial.py", "lengths = part.astype(lengths.dtype) * lengths", "pass", "surrogate"),
    M("_optimizer/_bounds.py", "return jnp.minimum(*parts)", "return parts[0]", "surrogate"),
    M("_optimizer/_start.py", "remaining=jnp.full_like(value, jnp.inf) if is_surrogate else value,", "remaining=value,", "surrogate"),
    M("_optimizer/_start.py", "watched = watched and not is_surrogate", "pass", "surrogate"),
    M("_optimizer/_trust.py", "return squared_radius, 0.5 * jnp.abs(value)", "return squared_radius, 5.0 * jnp.abs(value)", "surrogate"),
    M("_curvature/_linearise.py", "lengths[has_value].append((c / count,", "lengths[has_value].append((c,", "surrogate"),
    M("_loss/_base.py", "if not isinstance(weights, Tracer) and _any_negative(weights):", "if False:", "surrogate"),
]
# fmt: on


def line_of(mutant: Mutant) -> int:
    """Where it differs. Raises unless the old text is there once."""
    text = (ROOT / "eqx_kfac" / mutant.path).read_text()
    if text.count(mutant.old) != 1 or mutant.old == mutant.new:
        raise ValueError(
            f"{mutant.path}: {mutant.old!r} is there {text.count(mutant.old)} times"
        )
    return text[: text.index(mutant.old)].count("\n") + 1


def outcome(mutant: Mutant, seconds: float = 900) -> str:
    """Runs its tests until one fails."""
    with tempfile.TemporaryDirectory() as folder:
        for name in ("eqx_kfac", "tests", "docs", "examples"):
            shutil.copytree(ROOT / name, pathlib.Path(folder, name))
        for name in ("README.md", "pyproject.toml"):
            shutil.copy(ROOT / name, folder)
        path = pathlib.Path(folder, "eqx_kfac", mutant.path)
        path.write_text(path.read_text().replace(mutant.old, mutant.new))
        files = [f"tests/test_{name}.py" for name in mutant.tests.split()]
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-x",
            "-q",
            "-n0",
            "-p",
            "no:cacheprovider",
        ]
        try:
            done = subprocess.run(
                [*command, *files],
                cwd=folder,
                env={**os.environ, "PYTHONPATH": folder},
                capture_output=True,
                text=True,
                timeout=seconds,
            )
        except subprocess.TimeoutExpired:
            return "killed (took too long)"
    failed = [line for line in done.stdout.splitlines() if line.startswith("FAILED")]
    if done.returncode == 0:
        return "SURVIVED"
    return f"killed by {failed[0].split()[1]}" if failed else "killed (does not load)"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="part of a path")
    parser.add_argument("--part", default="0/1", help="k/n: every n-th one, from k on")
    options = parser.parse_args()
    first, step = map(int, options.part.split("/"))
    chosen = [m for m in MUTANTS[first::step] if options.only in m.path]
    survived = 0
    for mutant in chosen:
        line, start = line_of(mutant), time.perf_counter()
        said = outcome(mutant)
        survived += said == "SURVIVED"
        spent = time.perf_counter() - start
        print(f"{mutant.path}:{line}: {said} ({spent:.0f} s)", flush=True)
    print(f"{len(chosen)} mutants, {survived} survived")


if __name__ == "__main__":
    main()
