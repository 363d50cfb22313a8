"""The functions of `moe_ref`, fused in Triton: compiled on a GPU, interpreted on a CPU.

Signatures, results, errors and gradients are the reference's; a dispatcher has one rank's part of
them and a process group. A family is a package that is an implementation of its own: `--impl
moe_fast.permutation` judges that family.

Read `permutation.row_map` first (where each token's rows are), then `permutation.permute`. `router`
stands by itself: `selection`, `balancing`, `capacity` and `gating` are the parts of `route`.
`quantization.quantized` defines codes and scales, which `quantize` computes with `group_scales` and
`nvfp4`. `experts.segments` and `linear` multiply each expert's rows, `scaled_linear` in low
precision; `mlp` combines them. `fused` quantises in the launch of the stage before, and
`dispatch` brings rows to other ranks. `layer` joins the stages, as a function and as a module;
`parameters` names, cuts and converts its weights in checkpoints.

A file without an underscore launches; `_name.py` next to it holds its kernels. `launch` holds what
all launches share: block sizes, and the operators that `torch.compile` sees; `compiled` has each
function in a graph of its own, for the suite. `te` offers these functions through Transformer
Engine, and its functions through these.
"""

from moe_fast.launch import backend as backend  # first: it chooses the interpreter before any kernel is decorated

# isort: split
from moe_fast import dispatch, experts, fused, layer, parameters, permutation, quantization, router
from moe_fast.declared import combine
from moe_fast.dispatch import *  # noqa: F403
from moe_fast.experts import *  # noqa: F403
from moe_fast.experts import weights_quantized_once as weights_quantized_once
from moe_fast.fused import *  # noqa: F403
from moe_fast.layer import *  # noqa: F403
from moe_fast.layer import MoELayer as MoELayer
from moe_fast.layer import within_budget as within_budget
from moe_fast.parameters import *  # noqa: F403
from moe_fast.permutation import *  # noqa: F403
from moe_fast.quantization import *  # noqa: F403
from moe_fast.router import *  # noqa: F403

declares, supports, __all__ = combine(permutation, router, quantization, experts, fused, dispatch, layer, parameters)
