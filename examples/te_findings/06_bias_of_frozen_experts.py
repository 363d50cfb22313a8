"""Finding 6: a bias whose weight wants no gradient gets no gradient of its own."""

import sys

import torch

try:
    import transformer_engine.pytorch as te
    from transformer_engine import __version__ as version
except Exception as error:  # its libraries fail in their own ways
    print(f"This script needs transformer_engine and a GPU: {error}")
    sys.exit(2)

layer = te.GroupedLinear(2, 16, 16, bias=True, params_dtype=torch.bfloat16, device="cuda")
for expert in range(2):
    getattr(layer, f"weight{expert}").requires_grad_(False)
rows = torch.ones(5, 16, dtype=torch.bfloat16, device="cuda", requires_grad=True)
layer(rows, [2, 3]).sum().backward()
got = [getattr(layer, f"bias{expert}").grad for expert in range(2)]
got = [None if x is None else x[0].item() for x in got]
has_defect = got != [2, 3]

print(f"transformer_engine {version}, torch {torch.__version__}, {torch.cuda.get_device_name()}")
print(
    f"the biases of 2 and 3 rows have gradients {got}; right is [2, 3]"
    if has_defect
    else "biases of frozen experts train"
)
sys.exit(int(has_defect))
