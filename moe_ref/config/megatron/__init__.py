"""Megatron's options, the rules that refuse them, and the settings of each stage made from them."""
