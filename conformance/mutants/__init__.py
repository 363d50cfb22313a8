"""Defective implementations that the suite must find: planted ones with their origin, and automatic ones made from source."""
