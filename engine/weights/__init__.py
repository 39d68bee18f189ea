"""Reads model files: sharded safetensors and GGUF, memory mapped, never pickle.

Knows names, shapes and dtypes. It may not know what a weight is for; that is engine/models.
"""
