"""What every launch of a kernel needs: the backend, block sizes, arithmetic, and operators for
torch.compile.
"""
