"""Finding 19: Fp8Padding and Fp8Unpadding read strided rows as if they were contiguous."""

import sys

import torch

try:
    import transformer_engine.pytorch as te
    from transformer_engine import __version__ as version
except Exception as error:  # its libraries fail in their own ways
    print(f"This script needs transformer_engine and a GPU: {error}")
    sys.exit(2)

rows = torch.arange(256.0, device="cuda").view(8, 32)[:, ::2]  # row i is 32 i, 32 i + 2, …
results = {}
for name, call in {
    "Fp8Padding": lambda: te.Fp8Padding(1, align_size=8)(rows[:5], [5])[0][:5],
    "Fp8Unpadding": lambda: te.Fp8Unpadding(1, align_size=8)(rows, [5]),
}.items():
    try:
        results[name] = torch.equal(call(), rows[:5])
    except Exception:
        results[name] = True  # refused, which is not silent
has_defect = not all(results.values())

print(f"transformer_engine {version}, torch {torch.__version__}, {torch.cuda.get_device_name()}")
print(
    f"of five strided rows none may change; they stay in {results}"
    if has_defect
    else "strided rows are padded by their strides, or refused"
)
sys.exit(int(has_defect))
