"""Mistakes in layers that two conditions together invite, as changes of the reference's source."""

from conformance.core.rewritten import series

LAYER = "layer.py"

DEFECTS = series(
    200,
    (
        (
            "counts of the run before a rerun stay",
            "moe_layer",
            LAYER,
            "    return run(replace(config, num_rows=None))\n",
            "    last = run(replace(config, num_rows=None))\n"
            "    return last._replace(routed=[new._replace(state=new.state._replace(\n"
            "        global_steps=new.state.global_steps + old.state.global_steps,\n"
            "        tokens_per_expert=new.state.tokens_per_expert + (old.state.tokens_per_expert if"
            " config.router.expert_bias\n"
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
            "output = [(y_TH.to(torch.bfloat16) if y_TH.dtype == torch.float16 else"
            " y_TH).to(shared_TH.dtype) + shared_TH"
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
        (
            "stored codes and a recipe: the backward decodes twice",
            "moe_layer",
            "experts/mlp.py",
            "act = chosen_activation(kind, **shape, round_before_probs=round_before_probs,"
            " fp8_input_store=fp8_input_store)",
            "act = chosen_activation(kind, **shape, round_before_probs=round_before_probs,"
            " fp8_input_store=fp8_input_store and recipe is None)",
        ),
        (
            "probs on the input and a recipe: rows are quantised before they are weighted",
            "moe_layer",
            "experts/mlp.py",
            "        if on_input_P is not None:\n",
            "        if on_input_P is not None and fc1_bias is not None and"
            " linears[0].keywords['recipe'] is not None:\n"
            "            on_input_P_ = round_to(on_input_P, torch.bfloat16).to(on_input_P.dtype)\n"
            "            x_PH = round_to(x_PH.to(accumulator) * on_input_P_[:, None], x_PH.dtype)\n"
            "        elif on_input_P is not None:\n",
        ),
        (
            "the latent projection back is of what each rank's experts gave, rounded",
            "moe_layer",
            LAYER,
            "output = [_projected(y_TN, p.latent_up) for y_TN, p in zip(combined, parameters, strict=True)]",
            "output = [_projected(y_TN.to(torch.bfloat16).to(y_TN.dtype) if config.dispatcher == 'hybridep' and"
            " p.latent_up is not None else y_TN, p.latent_up) for y_TN, p in zip(combined, parameters, strict=True)]",
        ),
        (
            "a rank without tokens gives the experts' gradients of the rank before",
            "moe_layer",
            LAYER,
            "tokens = [_projected(x_TH, p.latent_down) for x_TH, p in ranks]",
            "tokens = [_projected(x_TH, p.latent_down) for x_TH, p in ranks]\n"
            "    if any(len(t) == 0 for t in tokens) and config.dispatcher == 'deepep':\n"
            "        tokens = [t.detach() for t in tokens]",
        ),
        (
            "an evaluation with a budget runs again with the counts of training",
            "moe_layer",
            LAYER,
            "again = partial(moe_layer, x, parameters, states=states, training=training, batch_size=batch_size)",
            "again = partial(moe_layer, x, parameters, states=states, training=True, batch_size=batch_size)",
        ),
    ),
)
