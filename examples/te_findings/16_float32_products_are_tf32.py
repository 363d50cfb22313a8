"""Finding 16: float32 layers multiply in TF32, whatever torch is told."""

import sys

import torch

try:
    import transformer_engine.pytorch as te
    from transformer_engine import __version__ as version
except Exception as error:  # its libraries fail in their own ways
    print(f"This script needs transformer_engine and a GPU: {error}")
    sys.exit(2)

torch.backends.cuda.matmul.allow_tf32 = False  # torch's default
layer = te.GroupedLinear(1, 64, 64, bias=False, params_dtype=torch.float32, device="cuda")
rows = torch.randn(32, 64, device="cuda", generator=torch.Generator("cuda").manual_seed(0))
expected = rows.double() @ layer.weight0.double().T
errors = [
    ((x.double() - expected).abs().max() / expected.abs().max()).item()
    for x in (layer(rows, [32]), rows @ layer.weight0.T)
]
has_defect = errors[0] > 100 * errors[1]

print(f"transformer_engine {version}, torch {torch.__version__}, {torch.cuda.get_device_name()}")
print(
    f"largest error {errors[0]:.1e} of the largest result; of torch in float32 {errors[1]:.1e}"
    if has_defect
    else "float32 layers multiply in float32"
)
sys.exit(int(has_defect))
