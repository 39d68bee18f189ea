"""Operations on tensors, and nothing else.

One public function an operation, which chooses an implementation by device; a plain torch reference
beside each. This room knows tensors and integers: it may not know requests, models, files or jobs.
"""
