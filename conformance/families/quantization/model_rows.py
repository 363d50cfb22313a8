"""Options of a quantiser that choose a kernel together, for cases at the sizes of models.

The error of four over six over many groups, whose search has more lanes; a format and the rounding
of scales; squares, whose tiles differ between 16 bits and 32.
"""

from conformance.core.axes import Changes
from conformance.families.quantization.cases import RECIPES

MODEL_ROWS: tuple[Changes, ...] = (
    *(
        {"scaling": "nvfp4", "variant": variant, "direction": "rowwise", "experts": 128}
        for variant in range(len(RECIPES["nvfp4"]))
    ),
    {"scaling": "nvfp4", "variant": 0, "direction": "columnwise", "role": "weight", "experts": 128},
    {"scaling": "nvfp4", "variant": 8, "direction": "columnwise", "role": "input", "experts": 128},
    {"scaling": "nvfp4", "variant": 7, "direction": "columnwise", "role": "weight", "experts": 128},
    {"scaling": "mxfp8", "variant": 0, "direction": "columnwise", "experts": 128},
    {"scaling": "mxfp8", "variant": 3, "direction": "columnwise", "role": "weight", "experts": 128},
    *(
        {"scaling": "block", "variant": variant, "direction": direction, "role": role, "dtype": dtype}
        for variant, role in ((1, "grad_output"), (2, "grad_output"), (0, "weight"), (4, "weight"))
        for direction in ("rowwise", "both")
        for dtype in ("bfloat16", "float32")
    ),
    {"scaling": "block", "variant": 4, "direction": "rowwise", "role": "input"},
    {"scaling": "current", "variant": 4, "direction": "both", "role": "grad_output", "experts": 128},
)
