"""Defective implementations that the suite must detect: planted ones, and changes of source."""
