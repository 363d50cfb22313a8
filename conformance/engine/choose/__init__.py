"""Draws cases: `draw` runs a hypothesis strategy from an explicit seed, `covering` makes covering
arrays over the finite axes.
"""
