"""What all tests share."""

import gc

import torch

# The tensors are small, and each core has a worker of its own.
torch.set_num_threads(1)


def pytest_collection_finish() -> None:
    """Leave what is imported by now out of later garbage collections, which tests ask for."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    """Let the interpreter free them when it ends, as libraries that look for leaks expect."""
    gc.unfreeze()
