"""Adapters: real packages offered under the interface, and a template for one of your own.

    moe-conformance run --impl conformance.peers.megatron --waivers conformance/peers/megatron.waivers.toml
    moe-conformance run --impl conformance.peers.template

An adapter translates names, orders and the shapes of results. It never corrects what the package does: what differs must
show, and is then judged in docs/findings.md and listed as a waiver.
"""
