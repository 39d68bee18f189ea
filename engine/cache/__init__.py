"""Key-value memory in blocks of 16 tokens: who holds which block, and whose contents can be used again.

blocks.py and prefix.py know numbers only; storage.py alone holds tensors.
"""
