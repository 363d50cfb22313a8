"""Permutation: rows by expert, chunks, and forms of the routing map."""
