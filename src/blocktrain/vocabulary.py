"""The tokens of a run: how many there are, how they are stored, and the marks beside them."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class Vocabulary:
    size: int  # tokens a model predicts: ids 0 to size - 1
    dtype: npt.DTypeLike  # number type that stored text holds tokens in
    bos: int  # the id before the first token; marks stand in the context alone
    mask: int  # the id of a token that is not known yet
    digest: str  # the same for the same tokens, whichever machine has them
    bytes_per_token: float  # of the run's text, on average: scores are in bits per byte

    @property
    def ids(self) -> int:
        """Ids a model reads: tokens and marks."""
        return max(self.size - 1, self.bos, self.mask) + 1

    @property
    def id_dtype(self) -> npt.DTypeLike:
        """The smallest number type for a context; signed, as torch wants it."""
        return np.min_scalar_type(-self.ids)


BYTE_VOCABULARY = Vocabulary(
    size=256, dtype=np.uint8, bos=256, mask=257, digest="bytes", bytes_per_token=1.0
)
BYTES, IDS = BYTE_VOCABULARY.size, BYTE_VOCABULARY.ids
BOS, MASK = BYTE_VOCABULARY.bos, BYTE_VOCABULARY.mask
