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
from jaxtyping import install_import_hook


jax.config.update("jax_enable_x64", True)
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")


_checked = beartype(conf=BeartypeConf(strategy=BeartypeStrategy.On))


# The functions whose types are checked, and those of them that were called.
checked, called = set(), set()


def typechecked(fn):
    """Checks types and shapes where there are any annotations: functions within functions
    mostly have none, and would be decorated at every call."""
    name = f"{fn.__module__}.{fn.__qualname__}"
    checked.add(name)
    hints = [hint for hint in fn.__annotations__.values() if hint is not Any]
    check = _checked(fn) if hints else fn

    def noted(*args, **kwargs):
        called.add(name)
        return check(*args, **kwargs)

    return noted


# All functions check the types of their arguments, for which tests take twice as long: in
# the interpreter that `test_types.py` starts.
if os.environ.get("CHECK_TYPES") == "1":
    install_import_hook("eqx_kfac", "tests.conftest.typechecked")


@pytest.fixture
def getkey():
    """A function that returns a new key on every call, the same ones in every run."""
    counter = iter(range(10_000))
    return lambda: jax.random.key(next(counter))


def _memory_maps() -> int:
    maps = Path("/proc/self/maps")
    return len(maps.read_bytes().splitlines()) if maps.exists() else 10**9


@pytest.fixture(scope="module", autouse=True)
def forget_compiled_functions():
    """Every compiled function holds memory maps, of which a process may have only so
    many (65,530 on Linux); one that runs hundreds of tests would crash in the end."""
    yield
    if _memory_maps() > 25_000:
        jax.clear_caches()
