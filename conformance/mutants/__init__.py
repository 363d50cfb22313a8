"""Defective implementations that the suite must find: planted, or made from source."""
