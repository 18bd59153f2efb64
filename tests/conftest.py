import gc
import importlib.metadata
import os
from pathlib import Path
from typing import Any


# Before jax is imported. Several devices, for the sharding tests; and little
# optimization, for the tests compile far more than they compute. (The last flag saves
# half of the time of compilation; the newest JAX does not know it.)
os.environ["XLA_FLAGS"] = " ".join(
    [
        os.environ.get("XLA_FLAGS", ""),
        "--xla_force_host_platform_device_count=8",
        "--xla_backend_optimization_level=0",
        "--xla_llvm_disable_expensive_passes=true",
        "--xla_cpu_parallel_codegen_split_count=1",
        "--xla_cpu_use_fusion_emitters=false"
        if importlib.metadata.version("jaxlib").startswith("0.10.")
        else "",
    ]
)
# Two workers, two cores: LAPACK's own threads would only wait for each other.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import jax
import pytest
from beartype import beartype, BeartypeConf, BeartypeStrategy
from jax._src.lib import _jax
from jaxtyping import install_import_hook


# So that its assertions say what they saw, as those of the tests do.
pytest.register_assert_rewrite("tests.helpers")

# A tenth of the time would go to looking for garbage, of which there is little; and some
# more to remembering, of every operation, on which line of JAX it was traced.
gc.set_threshold(50_000, 20, 100)
if hasattr(_jax, "set_tracebacks_enabled"):
    _jax.set_tracebacks_enabled(False)

jax.config.update("jax_enable_x64", True)
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")


_checked = beartype(conf=BeartypeConf(strategy=BeartypeStrategy.On))


def typechecked(fn):
    """Checks types and shapes where there are any annotations: functions within functions
    mostly have none, and would be decorated at every call."""
    hints = [hint for hint in fn.__annotations__.values() if hint is not Any]
    return _checked(fn) if hints else fn


# Of these, every function is called without end while a loss function is looked at.
_HOT = {"_devices", "_misc", "_tagged"}


def check_types():
    """Everything else that is imported from now on checks the types of its arguments."""
    package = Path(__file__).parent.parent / "eqx_kfac"
    paths = [p for p in package.rglob("*.py") if p.stem not in {"__init__", *_HOT}]
    names = [".".join(p.relative_to(package).with_suffix("").parts) for p in paths]
    install_import_hook([f"eqx_kfac.{n}" for n in names], "tests.conftest.typechecked")


# For which tests take longer: in the interpreter that `test_types.py` starts.
if os.environ.get("CHECK_TYPES") == "1":
    check_types()


@pytest.fixture
def getkey():
    """A function that returns a new key on every call, the same ones in every run."""
    counter = iter(range(10_000))
    return lambda: jax.random.key(next(counter))


@pytest.fixture
def standard_promotion():
    """Optax's own transformations do not run under strict type promotion."""
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.fixture(scope="module", autouse=True)
def forget_compiled_functions():
    """Every compiled function holds memory maps, of which a process may have only so
    many; one that runs hundreds of tests would crash in the end."""
    yield
    jax.clear_caches()
