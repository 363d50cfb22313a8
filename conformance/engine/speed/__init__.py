"""Clocks: how fast an implementation is, beside a rival and the memory of the device."""
