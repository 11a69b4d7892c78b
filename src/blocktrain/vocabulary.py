"""The ids a model reads: the 256 bytes, and two marks that only ever stand in the context."""

BYTES = 256
BOS = 256  # stands before the first byte
MASK = 257  # stands where the context is not known yet
IDS = 258
