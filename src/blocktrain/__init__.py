"""blocktrain: one model trained as independent blocks, composed into one at inference."""

__version__ = "0.1.0"
