"""Types and shapes of arguments, as they are annotated: checked at run time, in an
interpreter of its own that goes through some of the tests once more."""

import os
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import pytest

import eqx_kfac as kfac


ROOT = Path(__file__).parent.parent
# Which of them: small ones with many layers, forms, blocks, operators and rules.
PASS = [
    "tests/test_typing.py",
    "tests/test_types.py",
    "tests/test_series.py::test_masked_sequences_count_for_nothing",
    "tests/test_series.py::test_training[symmetric-solver0]",
    "tests/test_series.py::test_training[stationary-solver1]",
    "tests/test_series.py::test_gru_has_three_chains",
    "tests/test_series.py::test_scan_cell_is_scan",
    "tests/test_series.py::test_inverse",
    "tests/test_series.py::test_where_nothing_passed_there_is_no_curvature",
    "tests/test_capture.py::test_forms",
    "tests/test_laplace.py::test_is_a_normal_distribution[stacked]",
    "tests/test_influence.py::test_in_batches",
    "tests/test_spectra.py::test_of_layers",
]
CHECKED = os.environ.get("CHECK_TYPES") == "1"


@pytest.mark.skipif(CHECKED, reason="This is the interpreter that it starts.")
def test_pass():
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-n0", *PASS],
        cwd=ROOT,
        env={**os.environ, "CHECK_TYPES": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-1000:]


@pytest.mark.skipif(not CHECKED, reason="Types are checked in another interpreter.")
def test_a_wrong_shape_is_noticed():
    operator = kfac.operators.KroneckerOperator(jnp.eye(2), jnp.eye(3))
    assert operator.mv(jnp.ones((2, 3))).shape == (2, 3)
    with pytest.raises(Exception, match="mv"):
        operator.mv(jnp.ones(6))
