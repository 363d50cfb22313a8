"""One contract per function: its inputs from a case, its expected outputs, its illegal calls and
its hand-computed cases.
"""
