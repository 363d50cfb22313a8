"""The reference among real ranks computes on the CPU, and returns to its inputs' device."""

import torch

from conformance.peers.reference_world import _with_tensor
from moe_ref.config import Recipe
from moe_ref.quantization.quantize import amax, codes, dequantize, quantize, scales


def test_quantised_rows_go_to_the_device_of_their_source():
    quantized = quantize(torch.ones(4, 128), Recipe("block")).quantized
    there = _with_tensor(quantized, iter([torch.ones(4, 128, device="meta")]))
    assert {read(there).device.type for read in (codes, scales, amax, dequantize)} == {"meta"}
