"""Mistakes in layers that two conditions together invite, as changes of the reference's source."""

from conformance.core.rewritten import series

LAYER = "layer.py"

DEFECTS = series(
    221,
    (
        (
            "counts of the run before a rerun stay",
            "moe_layer",
            LAYER,
            "    return run(replace(config, num_rows=None))\n",
            "    last = run(replace(config, num_rows=None))\n"
            "    return last._replace(routed=[new._replace(state=new.state._replace(\n"
            "        global_steps=new.state.global_steps + old.state.global_steps,\n"
            "        tokens_per_expert=new.state.tokens_per_expert + (old.state.tokens_per_expert if config.router.expert_bias\n"
            "        else 0))) for new, old in zip(last.routed, out.routed, strict=True)])\n",
        ),
        (
            "in evaluation padding goes to experts",
            "moe_layer",
            LAYER,
            "return without_padding(routed, masks[rank])",
            "return without_padding(routed, masks[rank] if options['training'] else None)",
        ),
        (
            "evaluation has no jitter",
            "moe_layer",
            LAYER,
            "    inputs = [jittered(x_TH, config,",
            "    inputs = list(x) if not training else [jittered(x_TH, config,",
        ),
        (
            "padding under a capacity is left in the map where nothing is dropped",
            "moe_layer",
            LAYER,
            "    token_T1 = (padding_mask == 0)[:, None]\n",
            "    token_T1 = (padding_mask == 0)[:, None]\n"
            "    if len(token_T1) and not bool((padding_mask != 0)[:-1].any()):\n"
            "        token_T1 = torch.ones_like(token_T1)\n",
        ),
        (
            "with a latent space shared experts have no gradient to x where padding is masked",
            "moe_layer",
            LAYER,
            "shared = [_shared(x_TH, p, config) for x_TH, p in ranks]",
            "shared = [_shared(x_TH if p.latent_down is None or padding_mask is None else x_TH.detach(), p, config)"
            " for x_TH, p in ranks]",
        ),
        (
            "the last sum is in the dtype of the latent width",
            "moe_layer",
            LAYER,
            "output = [y_TH + shared_TH for y_TH, shared_TH in zip(output, shared, strict=True)]",
            "output = [(y_TH.to(torch.bfloat16) if y_TH.dtype == torch.float16 else y_TH).to(shared_TH.dtype) + shared_TH"
            " for y_TH, shared_TH in zip(output, shared, strict=True)]",
        ),
        (
            "a global batch's sequence loss has one sequence behind hybridep",
            "moe_layer",
            LAYER,
            'settings = {"training": training, "batch_size": batch_size}',
            'settings = {"training": training, "batch_size": batch_size if config.dispatcher != "hybridep" else 1}',
        ),
        (
            "with jitter the shared gate reads the jittered input",
            "moe_layer",
            LAYER,
            "shared = [_shared(x_TH, p, config) for x_TH, p in ranks]",
            "shared = [_shared(x_TH if p.shared_gate_weight is None else own, p, config)"
            " for (x_TH, p), own in zip(ranks, inputs, strict=True)]",
        ),
        (
            "the router's bias has the gradient of one rank alone where masks are given",
            "moe_layer",
            LAYER,
            "gates = [(x_TH, p.router_weight, p.router_bias) for",
            "gates = [(x_TH, p.router_weight, p.router_bias if padding_mask is None or p.router_bias is None else"
            " p.router_bias.detach()) for",
        ),
    ),
)
