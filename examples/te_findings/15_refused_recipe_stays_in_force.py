"""Finding 15: NVFP4 that the GPU cannot run is refused, and stays in force outside its context."""

import sys

import torch

try:
    import transformer_engine.pytorch as te
    from transformer_engine import __version__ as version
    from transformer_engine.common.recipe import NVFP4BlockScaling
except Exception as error:  # its libraries fail in their own ways
    print(f"This script needs transformer_engine and a GPU: {error}")
    sys.exit(2)

layer = te.Linear(64, 64, bias=False, params_dtype=torch.bfloat16, device="cuda")
rows = torch.ones(32, 64, dtype=torch.bfloat16, device="cuda")
expected = layer(rows)
refused = False
try:
    with te.autocast(enabled=True, recipe=NVFP4BlockScaling()):
        pass
except AssertionError:
    refused = True
try:
    message = "" if torch.equal(layer(rows), expected) else "gives other numbers"
except Exception as error:
    message = f"raises {type(error).__name__}: {str(error).splitlines()[0][-60:]}"
if not refused:
    print("This script needs a GPU without NVFP4, as Hopper")
    sys.exit(2)
has_defect = bool(message)

print(f"transformer_engine {version}, torch {torch.__version__}, {torch.cuda.get_device_name()}")
print(
    f"after the refusal a layer outside any context {message}"
    if has_defect
    else "a refused recipe leaves nothing behind"
)
sys.exit(int(has_defect))
