"""The router: logits, choice, capacity, balancing losses, and one routing step."""
