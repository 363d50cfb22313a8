"""The interface through Transformer Engine, and Transformer Engine's names through our kernels.

features      what an installed release can do: one table, probed by signatures
adapter       our names, signatures and results through `transformer_engine`
shim          its names, signatures and results through `moe_fast`
"""

from moe_fast.te.adapter import Adapter as Adapter
