"""What all tests share."""

import atexit
import gc
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from backpack.context import CTX
from hypothesis import HealthCheck, settings

NEEDED = {
    "history/test_access.py": ("pandas",),
    "integrations": ("accelerate", "lightning", "peft", "skorch", "trl"),
    "report": ("bokeh",),
    "sinks": ("mlflow", "tensorboard", "trackio", "wandb"),
}
"""The libraries of the extra "frameworks" that tests need, which are left out without them.

Their newest versions need newer libraries than the oldest that gradlens itself works with.
"""

collect_ignore = [path for path, names in NEEDED.items() if None in map(find_spec, names)]

# A machine that others use, too, may be slow for a while, which is no failure.
settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")

# The tensors are small, and each core has a worker of its own.
torch.set_num_threads(1)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Don't import frameworks, which takes seconds, if slow tests are left out."""
    frameworks = Path(__file__).parent / "integrations"
    return True if collection_path == frameworks and config.option.markexpr == "not slow" else None


@pytest.hookimpl(tryfirst=True)  # before tests are selected by their marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark all cases of each test but the first fast one as slow.

    The fast tests are for each change; all cases of a test run with the tests of its folder.
    """
    seen: set[str] = set()
    for item in items:
        name = item.nodeid.partition("[")[0]
        if name in seen:
            item.add_marker(pytest.mark.slow)
        elif item.get_closest_marker("slow") is None:
            seen.add(name)


gc.disable()  # until all tests are collected, which stay


def pytest_collection_finish() -> None:
    """Leave what is imported by now out of later garbage collections, which tests ask for."""
    gc.enable()
    gc.collect()
    gc.freeze()


@pytest.fixture
def no_other_objects() -> None:
    """Leave what is alive before the test out of ``gc.get_objects``: it may die meanwhile."""
    gc.collect()
    gc.freeze()


# The interpreter frees them when it ends, as libraries that look for leaks expect.
atexit.register(gc.unfreeze)


@pytest.fixture(autouse=True)
def _backpack_context_is_left() -> Iterator[None]:
    """A test must leave BackPACK's context, which is global, as a loop outside of one finds it."""
    yield
    left = CTX.get_active_exts(), CTX.get_retain_graph()
    CTX.set_active_exts(())
    CTX.set_retain_graph(False)
    assert left == ((), False)
