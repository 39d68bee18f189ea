"""What a model computes: one decoder driven by a frozen spec, and a small file a family.

A family turns a config into a DecoderSpec and names into names; it holds no arithmetic. This room may not
know files, tokenizers, requests or schedules.
"""
