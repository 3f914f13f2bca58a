"""What all tests share."""

import gc
from collections.abc import Iterator

import pytest
import torch
from backpack.context import CTX

# The tensors are small, and each core has a worker of its own.
torch.set_num_threads(1)


def pytest_collection_finish() -> None:
    """Leave what is imported by now out of later garbage collections, which tests ask for."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    """Let the interpreter free them when it ends, as libraries that look for leaks expect."""
    gc.unfreeze()


@pytest.fixture(autouse=True)
def _backpack_context_is_left() -> Iterator[None]:
    """A test must leave BackPACK's context, which is global, as a loop outside of one finds it."""
    yield
    left = CTX.get_active_exts(), CTX.get_retain_graph()
    CTX.set_active_exts(())
    CTX.set_retain_graph(False)
    assert left == ((), False)
