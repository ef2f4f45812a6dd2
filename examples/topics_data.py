# SPDX-License-Identifier: Apache-2.0
"""A retrieval task made of the help texts that ship with Python (``pydoc_data.topics``).

Given a paragraph, find the help topic that it was taken from. A topic is known by its *card*: its
heading and its opening paragraph. Paragraphs that stand on a card are neither trained on nor asked
for, and a paragraph that several topics repeat is used once, so that nothing that is asked after
training was seen in training.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

MIN_WORDS = 8
"""Blocks with fewer words are headings, signatures and lead-ins, which name no topic."""
MIN_PARAGRAPHS = 4
"""Topics with fewer paragraphs are trained on whole: holding one out would leave too little."""


@dataclass(frozen=True)
class Pair:
    """A paragraph and the index of its topic."""

    paragraph: str
    topic: int


@dataclass(frozen=True)
class TopicsData:
    """Topics, as ``names[i]`` and ``cards[i]``, and the two parts of their paragraphs."""

    names: tuple[str, ...]
    cards: tuple[str, ...]
    train: tuple[Pair, ...]
    held_out: tuple[Pair, ...]


def python_help_topics() -> Mapping[str, str]:
    """Return Python's own help texts by topic name; their wording depends on the Python version."""
    from pydoc_data.topics import topics

    return topics


def split_paragraphs(text: str) -> list[str]:
    """Split at blank lines, put each paragraph on one line, and drop what has too few words."""
    blocks = (" ".join(block.split()) for block in re.split(r"\n\s*\n", text))
    return [block for block in blocks if len(re.findall(r"[A-Za-z]{2,}", block)) >= MIN_WORDS]


def heading(text: str) -> str:
    """Return the first line of a help text without its quotation marks."""
    return re.sub(r'["“”`]', "", text.strip().splitlines()[0])


def opening(text: str) -> str:
    """Return the first paragraph that is prose (not grammar rules), or "" if there is none."""
    return next((paragraph for paragraph in split_paragraphs(text) if "::=" not in paragraph), "")


def build_dataset(topics: Mapping[str, str], held_out_share: float = 0.2, seed: int = 0) -> TopicsData:
    """Make the task from help texts by topic name.

    Topics with the same text become one. A paragraph that occurs in several topics belongs to the one
    with the shortest text, since long ones repeat the short ones. Of each topic with at least
    ``MIN_PARAGRAPHS`` paragraphs, ``held_out_share`` of them (at least one) are held out.

    Raises:
        ValueError: ``held_out_share`` is not between 0 and 1.
    """
    if not 0.0 < held_out_share < 1.0:
        raise ValueError(f"held_out_share is {held_out_share}, but must lie between 0 and 1")
    texts: dict[str, str] = {}  # text -> name: topics with one text are one topic
    for name in sorted(topics):
        texts.setdefault(topics[name], name)
    used = {opening(text) for text in texts}
    paragraphs: dict[str, list[str]] = {}
    for text in sorted(texts, key=lambda text: (len(text), texts[text])):
        own = [p for p in dict.fromkeys(split_paragraphs(text)) if p not in used]
        paragraphs[texts[text]] = own
        used.update(own)

    names = tuple(sorted(texts.values()))
    cards = tuple(f"{heading(topics[name])}. {opening(topics[name])}" for name in names)
    train: list[Pair] = []
    held_out: list[Pair] = []
    rng = random.Random(seed)
    for index, name in enumerate(names):
        pairs = [Pair(paragraph, index) for paragraph in paragraphs[name]]
        rng.shuffle(pairs)
        count = max(1, int(len(pairs) * held_out_share)) if len(pairs) >= MIN_PARAGRAPHS else 0
        held_out += pairs[:count]
        train += pairs[count:]
    return TopicsData(names, cards, tuple(train), tuple(held_out))


def candidate_topics(batch: Sequence[Pair], topic_count: int, size: int, rng: random.Random) -> list[int]:
    """Return the distinct topics of a batch, filled up with random others to ``size`` topics.

    The others are the negatives of the contrastive loss besides those in the batch. No topic occurs
    twice, so that no right answer counts as a wrong one.
    """
    topics = sorted({pair.topic for pair in batch})
    others = sorted(set(range(topic_count)) - set(topics))
    return topics + rng.sample(others, min(len(others), max(0, size - len(topics))))


class Batches:
    """Endless batches in shuffled order; each pair comes once before any comes again."""

    def __init__(self, pairs: Sequence[Pair], size: int, rng: random.Random) -> None:
        if not pairs:
            raise ValueError("there are no pairs to make batches of")
        self._pairs, self._size, self._rng = pairs, size, rng
        self._pool: list[Pair] = []

    def next(self) -> list[Pair]:
        """Return the next batch."""
        while len(self._pool) < self._size:
            self._pool += self._rng.sample(self._pairs, len(self._pairs))
        batch, self._pool = self._pool[: self._size], self._pool[self._size :]
        return batch
