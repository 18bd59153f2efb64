"""Types and shapes of arguments, as they are annotated: checked at run time, in an
interpreter of its own that goes through some of the tests once more."""

import inspect
import os
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import pytest

import eqx_kfac as kfac

from . import conftest


ROOT = Path(__file__).parent.parent
# Which of them: small ones that, together, call everything that is public.
PASS = [
    "tests/test_typing.py",
    "tests/test_layer_damping.py",
    "tests/test_operators.py",
    "tests/test_verify.py",
    "tests/test_series.py",
    "tests/test_capture.py::test_forms",
    "tests/test_types.py",
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
    operator = kfac.KroneckerOperator(jnp.eye(2), jnp.eye(3))
    assert operator.mv(jnp.ones((2, 3))).shape == (2, 3)
    with pytest.raises(Exception, match="mv"):
        operator.mv(jnp.ones(6))


@pytest.mark.skipif(not CHECKED, reason="Types are checked in another interpreter.")
def test_everything_public_was_called():
    """The last test of the pass."""
    public = [getattr(kfac, name) for name in dir(kfac) if not name.startswith("_")]
    names = set()
    for thing in public:
        own = f"{thing.__module__}." if hasattr(thing, "__module__") else "None."
        if inspect.isclass(thing):
            members = [n for n in vars(thing) if not n.startswith("_")]
            names |= {f"{own}{thing.__qualname__}.{member}" for member in members}
        elif inspect.isfunction(thing):
            names.add(f"{own}{thing.__qualname__}")
    missing = sorted((names & conftest.checked) - conftest.called)
    assert len(names & conftest.checked) > 100
    assert not missing, missing
