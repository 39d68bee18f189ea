"""Proof on a machine with a GPU: kernels right, the engine exact, and how near both come to its limits.

Needs torch, triton, transformers and what these bring. It may import pagemill's kernels and engine, whose
names `house.py` makes from a folder of links, and nothing else of ours; torch comes after `__main__.py` has
chosen whether kernels are interpreted.
"""
