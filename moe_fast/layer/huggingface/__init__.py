"""The layer of a model of Hugging Face transformers: its options, its weights, and presets.

Everything is read from plain data, so that transformers itself is not needed.
"""
