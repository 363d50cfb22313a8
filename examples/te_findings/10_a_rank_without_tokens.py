"""Finding 10: a rank to which nothing is routed raises in moe_permute."""

import sys

import torch

try:
    import transformer_engine.pytorch as te
    from transformer_engine import __version__ as version
except Exception as error:  # its libraries fail in their own ways
    print(f"This script needs transformer_engine and a GPU: {error}")
    sys.exit(2)

tokens, nothing = torch.ones(4, 16, device="cuda"), torch.zeros(4, 3, dtype=torch.bool, device="cuda")
raised = []
for name, call in {
    "moe_permute": lambda: te.moe_permute(tokens, nothing, num_out_tokens=0),
    "moe_permute_with_probs": lambda: te.moe_permute_with_probs(tokens, nothing.float(), nothing, num_out_tokens=0),
}.items():
    try:
        call()
    except Exception as error:
        raised.append(f"{name}: {type(error).__name__}: {str(error)[:60]}")
has_defect = bool(raised)

print(f"transformer_engine {version}, torch {torch.__version__}, {torch.cuda.get_device_name()}")
print("an empty rank raises in " + "; ".join(raised) if has_defect else "an empty rank gets no rows")
sys.exit(int(has_defect))
