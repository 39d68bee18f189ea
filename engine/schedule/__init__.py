"""What runs in the next step: the order of those who wait, who is let in, who has to make room.

This room knows sequences and block counts. It may not know tensors, text, or models.
"""
