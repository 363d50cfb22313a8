r"""Adapters: real packages offered under the interface, and a template for new ones.

    moe-conformance run --impl conformance.peers.megatron \
        --waivers conformance/peers/megatron.waivers.toml
    moe-conformance run --impl conformance.peers.transformer_engine
    moe-conformance run --impl conformance.peers.template

An adapter translates names, orders and result shapes. It never corrects results: differences must
show; docs/findings.md judges them, and a waiver lists them.
"""
