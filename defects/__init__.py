"""Planted defects of all families: changes of text, a table of kinds, and wrappers in Python."""
