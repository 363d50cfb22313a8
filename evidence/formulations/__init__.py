"""Every function of the reference a second time, by another formulation in float64.

Where the reference moves rows, a formulation is dense or walks over tokens; where it computes all
at once, a formulation goes one by one; gradients that it derives by hand are autograd's here. Of
the reference it shares settings and results (`moe_ref.config`), no code.

    python -m evidence.formulations --cases 1000            # of each function; also --function NAME
"""
