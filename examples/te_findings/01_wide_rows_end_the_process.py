"""Finding 1: a map whose last row is 2^31 elements from its first ends the process."""

import subprocess
import sys

import torch

try:
    import transformer_engine.pytorch as te
    from transformer_engine import __version__ as version
except Exception as error:  # its libraries fail in their own ways
    print(f"This script needs transformer_engine and a GPU: {error}")
    sys.exit(2)

if len(sys.argv) > 1:  # the call itself, in a process of its own
    chosen = torch.tensor([[1, 0, 1], [0, 1, 0], [1, 1, 1]], dtype=torch.bool, device="cuda")
    far = torch.empty(2**31 + 64, dtype=torch.bool, device="cuda").as_strided((3, 3), (2**30 + 8, 1))
    far.copy_(chosen)
    tokens = torch.arange(48.0, device="cuda").view(3, 16)
    out, expected = (te.moe_permute(tokens, x, num_out_tokens=6)[0] for x in (far, chosen))
    sys.exit(0 if torch.equal(out, expected) else 3)
done = subprocess.run([sys.executable, __file__, "call"], capture_output=True, text=True)
has_defect, message = done.returncode != 0, (done.stderr.strip() or "the rows are wrong").splitlines()[-1][:90]
if "OutOfMemoryError" in done.stderr:
    print("This script needs 3 GB of GPU memory")
    sys.exit(2)

print(f"transformer_engine {version}, torch {torch.__version__}, {torch.cuda.get_device_name()}")
print(
    f"moe_permute of such a map: the process ends with {done.returncode}: {message}"
    if has_defect
    else "moe_permute reads maps of any strides"
)
sys.exit(int(has_defect))
