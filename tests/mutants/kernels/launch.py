"""Mistakes in what all launches share: numbers, gradients, checked calls."""

from tests.mutants.kernels import series

DEFECTS = series(
    "A",
    (
        (
            "rounding to bfloat16 carries the bits of a NaN into another number",
            "unpermute",
            "launch/_rounding.py",
            "nearest = tl.where(x != x, 0x7FC0, nearest)",
            "nearest = tl.where(x != x, nearest, nearest)",
        ),
        (
            "ties round away from zero in bfloat16",
            "unpermute",
            "launch/_rounding.py",
            "nearest = (word + 0x7FFF + ((word >> 16) & 1)) >> 16",
            "nearest = (word + 0x8000) >> 16",
        ),
        (
            "a score √ln(1+exp x) is 0 where 1+exp x rounds to 1",
            "topk_routing aux_loss_scores",
            "launch/_rounding.py",
            "ratio = tl.where(lost, 1.0, tl.log(u))",
            "ratio = tl.where(lost, 0.0, tl.log(u))",
        ),
        (
            "a large logit's slope of √ln(1+exp x) is that of a negative one",
            "topk_routing aux_loss_scores",
            "launch/_rounding.py",
            "lift = tl.where(x < 0, half, 1.0)",
            "lift = half",
        ),
        (
            "a second derivative lacks the kernels' part, without an error",
            "unpermute grouped_linear",
            "launch/autograd.py",
            "if not torch.is_grad_enabled():",
            "if True:",
        ),
        (
            "a call is told from a checked one without its dtypes",
            "moe_layer",
            "launch/legal.py",
            "(x.shape, x.dtype, x.device, x.requires_grad)",
            "(x.shape, x.device, x.requires_grad)",
        ),
        (
            "a call that was refused is legal the second time",
            "moe_layer",
            "launch/legal.py",
            "        _known.reset(token)\n",
            "        _known.reset(token)\n        _passed[key] = settings\n",
        ),
        (
            "settings are told by an identity that others take over",
            "moe_layer",
            "launch/legal.py",
            "_passed[key] = settings  # kept, so that no other has its identity",
            "_passed[key] = None",
        ),
        (
            "after a call that is known to be legal no check runs any more",
            "moe_layer",
            "launch/legal.py",
            "        _known.reset(token)\n",
            "        _known.set(known)\n",
        ),
        (
            "bits are copied without a pending minus",
            "permute sort_chunks",
            "launch/backend.py",
            "return tensor.resolve_conj().resolve_neg().view(",
            "return (torch._neg_view(tensor) if tensor.is_neg() else tensor).view(",
        ),
        (
            "numbers are summed without a pending minus",
            "unpermute activation",
            "launch/backend.py",
            "    tensor = tensor.resolve_neg()\n    return tensor, *tensor.stride()",
            "    tensor = torch._neg_view(tensor) if tensor.is_neg() else tensor\n    return tensor, *tensor.stride()",
        ),
        (
            "settings reach kernels as float32 also where they compute in float64",
            "topk_routing activation load_balancing_loss",
            "launch/arithmetic.py",
            'struct.pack("<d", x)',
            'struct.pack("<d", struct.unpack("<f", struct.pack("<f", x))[0])',
        ),
        (
            "sums are float64 only where the first of their factors is",
            "unpermute activation",
            "launch/arithmetic.py",
            "any(x is not None and x.dtype == torch.float64 for x in tensors)",
            "(tensors[0] is not None and tensors[0].dtype == torch.float64)",
        ),
    ),
)
