"""What all tests share."""

import torch

# The tensors are small, and each core has a worker of its own.
torch.set_num_threads(1)
