# SPDX-License-Identifier: Apache-2.0
"""English text as token ids without a tokenizer's files: words hashed into a vocabulary of any size."""

from __future__ import annotations

import random
import re
import zlib
from collections.abc import Mapping, Sequence


def word_ids(texts: Mapping[str, str], vocabulary: int) -> list[int]:
    """Return the words and punctuation marks of all texts, in the order of their names, as ids.

    Words that share a hash share an id. The ids depend on nothing but the texts and ``vocabulary``.
    """
    words = (word for name in sorted(texts) for word in re.findall(r"\w+|[^\w\s]", texts[name].lower()))
    return [zlib.crc32(word.encode()) % vocabulary for word in words]


class Windows:
    """Endless batches of ``tokens`` consecutive ids from random places; the text is taken as a ring."""

    def __init__(self, ids: Sequence[int], tokens: int, batch: int, rng: random.Random) -> None:
        if not ids:
            raise ValueError("there are no ids to make batches of")
        self._ids, self._tokens, self._batch, self._rng = ids, tokens, batch, rng

    def next(self) -> list[list[int]]:
        """Return the next batch."""
        starts = [self._rng.randrange(len(self._ids)) for _ in range(self._batch)]
        length = len(self._ids)
        return [[self._ids[(start + i) % length] for i in range(self._tokens)] for start in starts]
