"""The interface of the reference through a Transformer Engine, whatever its release.

features      what a release can do: one table, probed by signatures
adapter       our names, signatures and results through `transformer_engine`
"""

from conformance.peers.te.adapter import Adapter as Adapter
