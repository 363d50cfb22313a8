"""Run before any test module: without a GPU, moe_fast chooses Triton's interpreter before triton is loaded."""

import torch

import moe_fast as moe_fast
from conformance.engine.child import interpreting

interpreting.install()
torch.set_num_threads(1)  # small tensors are quicker without threads to wait for
