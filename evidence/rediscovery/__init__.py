"""Defects of real releases, found again: the release that has one must fail, the one that mended it
must pass.
"""
