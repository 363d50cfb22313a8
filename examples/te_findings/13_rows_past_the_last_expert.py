"""Finding 13: rows past the last expert's raise in GroupedLinear."""

import sys

import torch

try:
    import transformer_engine.pytorch as te
    from transformer_engine import __version__ as version
except Exception as error:  # its libraries fail in their own ways
    print(f"This script needs transformer_engine and a GPU: {error}")
    sys.exit(2)

layer = te.GroupedLinear(2, 16, 16, bias=False, params_dtype=torch.bfloat16, device="cuda")
rows = torch.ones(8, 16, dtype=torch.bfloat16, device="cuda")  # a buffer with room for three more
expected = layer(rows[:5].contiguous(), [2, 3])
try:
    has_defect, message = not torch.equal(layer(rows, [2, 3])[:5], expected), "other rows"
except Exception as error:
    has_defect, message = True, f"{type(error).__name__}: {str(error).splitlines()[0][:90]}"

print(f"transformer_engine {version}, torch {torch.__version__}, {torch.cuda.get_device_name()}")
print(
    f"a buffer of 8 rows with splits 2 and 3: {message}" if has_defect else "rows past the last expert's are left alone"
)
sys.exit(int(has_defect))
