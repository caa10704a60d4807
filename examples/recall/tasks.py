"""The tasks: a table is written into the sequence, and the second half of the sequence asks for it.

Each task returns a `Batch` of sequences of any length that is a multiple of 8. The first half holds
the rows of the table, the second half the queries, so the table grows with the length. All symbols
are drawn anew for each sequence: nothing can be learned by heart.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Generator, Tensor

SYMBOLS = 2048
"""Symbols of keys, enough for 64 times the training length."""
VALUES = 64
SEPARATOR = SYMBOLS + VALUES
"""The last token of the vocabulary: it separates, or fills positions without a query."""
VOCABULARY = SEPARATOR + 1
NO_TARGET = -1
LETTERS, NOISY_LETTERS, SIMILAR_LETTERS, NUMBERS = 64, 256, 128, 32


class Batch(NamedTuple):
    """Sequences, and what the second half of their positions must predict."""

    tokens: Tensor
    """(batch, length)"""
    targets: Tensor
    """(batch, length / 2): the token to predict, or NO_TARGET."""
    is_scored: Tensor
    """(batch, length / 2): whether the accuracy counts this position."""
    answer_rows: Tensor
    """(batch, length / 2): the position of the row that holds the answer, or NO_TARGET."""


def draw_distinct(batch: int, count: int, total: int, generator: Generator) -> Tensor:
    """Return (batch, count) different numbers below `total` in random order."""
    keys = torch.rand(batch, total, generator=generator, device=generator.device)
    return keys.argsort(-1)[:, :count]


def draw_numbers(batch: int, count: int, total: int, generator: Generator) -> Tensor:
    """Return (batch, count) numbers below `total`, which may repeat."""
    return torch.randint(total, (batch, count), generator=generator, device=generator.device)


def make_recall(batch: int, length: int, generator: Generator) -> Batch:
    """Multi-query associative recall: k₁ v₁ k₂ v₂ … then keys, each of which asks for its value."""
    rows = length // 4
    key = draw_distinct(batch, rows, SYMBOLS, generator)
    value = draw_numbers(batch, rows, VALUES, generator) + SYMBOLS
    asked = draw_numbers(batch, length // 2, rows, generator)
    tokens = torch.cat([interleave(key, value), key.gather(1, asked)], 1)
    return build_batch(tokens, value.gather(1, asked), 2 * asked + 1)


def make_hops(batch: int, length: int, generator: Generator) -> Batch:
    """Two hops: the value of a key is another key, and a query asks for the value of the value.

    A query has two positions. The first one must predict the value, which is a hint for the
    training, and the second one the value of the value. The accuracy counts the second one only.
    Each row begins with a separator, because keys and values are the same symbols.
    """
    half = length // 2
    rows, queries = half // 3, half // 2
    key = draw_distinct(batch, rows, SYMBOLS, generator)
    follower = draw_distinct(batch, rows, rows, generator)
    value = key.gather(1, follower)
    table = interleave(torch.full_like(key, SEPARATOR), key, value)
    padding = torch.full_like(table[:, : half % 3], SEPARATOR)
    first = draw_numbers(batch, queries, rows, generator)
    second = follower.gather(1, first)
    asked = key.gather(1, first)
    drawn = build_batch(
        torch.cat([padding, table, interleave(asked, torch.full_like(asked, SEPARATOR))], 1),
        interleave(value.gather(1, first), value.gather(1, second)),
        half % 3 + 2 + 3 * interleave(first, second),
    )
    is_second = torch.arange(half, device=key.device) % 2 == 1
    return drawn._replace(is_scored=is_second.expand(batch, -1))


def make_token_recall(batch: int, length: int, generator: Generator) -> Batch:
    """Multi-query multi-token recall: keys and values are words of two letters."""
    rows, queries = length // 8, length // 6
    code = draw_distinct(batch, rows, LETTERS**2, generator)
    key = [code // LETTERS, code % LETTERS + LETTERS]
    value = [draw_numbers(batch, rows, LETTERS, generator) + at * LETTERS for at in (2, 3)]
    asked = draw_numbers(batch, queries, rows, generator)
    query = [x.gather(1, asked) for x in (*key, *value)]
    nothing = torch.full_like(asked, NO_TARGET)
    return append_queries(
        interleave(*key, *value),
        interleave(*query[:3]),
        interleave(nothing, query[2], query[3]),
        interleave(nothing, 4 * asked + 2, 4 * asked + 3),
    )


def make_noisy_recall(batch: int, length: int, generator: Generator) -> Batch:
    """Keys of three letters, of which one is wrong in each query."""
    rows, queries = length // 8, length // 6
    key = draw_numbers(batch, 3 * rows, NOISY_LETTERS, generator).view(batch, 3, rows)
    asked = draw_numbers(batch, queries, rows, generator)
    query = key.gather(2, asked[:, None].expand(-1, 3, -1))
    wrong = draw_numbers(batch, queries, 3, generator)[:, None]
    shift = draw_numbers(batch, queries, NOISY_LETTERS - 1, generator)[:, None] + 1
    is_wrong = torch.arange(3, device=key.device)[:, None] == wrong
    query = torch.where(is_wrong, (query + shift) % NOISY_LETTERS, query)
    return build_word_recall(key, query, asked, NOISY_LETTERS, generator)


def make_similar_recall(batch: int, length: int, generator: Generator) -> Batch:
    """Keys of three letters in groups of four, which differ in one letter only."""
    rows, queries = length // 8, length // 6
    group = draw_numbers(batch, 3 * rows, SIMILAR_LETTERS, generator).view(batch, 3, rows)
    member = torch.arange(rows, device=group.device)
    key = group[:, :, member // 4 * 4]
    differs = draw_numbers(batch, rows, 3, generator)[:, None, member // 4 * 4]
    is_different = torch.arange(3, device=group.device)[:, None] == differs
    own = (key + member % 4 * (SIMILAR_LETTERS // 4)) % SIMILAR_LETTERS
    key = torch.where(is_different, own, key)
    order = draw_distinct(batch, rows, rows, generator)
    key = key.gather(2, order[:, None].expand(-1, 3, -1))
    asked = draw_numbers(batch, queries, rows, generator)
    query = key.gather(2, asked[:, None].expand(-1, 3, -1))
    return build_word_recall(key, query, asked, SIMILAR_LETTERS, generator)


def make_copy(batch: int, length: int, generator: Generator) -> Batch:
    """Different symbols, then the same symbols again: each asks for the symbol behind it."""
    half = length // 2
    source = draw_distinct(batch, half, SYMBOLS, generator)
    row = torch.arange(half, device=source.device).expand(batch, -1)
    return build_batch(append_answers(source, source), source, row)


def make_reverse(batch: int, length: int, generator: Generator) -> Batch:
    """Different symbols, then the same backwards: each asks for the symbol before it."""
    half = length // 2
    source = draw_distinct(batch, half, SYMBOLS, generator)
    row = torch.arange(half, 0, -1, device=source.device).expand(batch, -1)
    answers = source.flip(1)
    # The row that knows a symbol and the one before it is that of the symbol.
    return build_batch(append_answers(source, answers), answers, row)


def make_sort(batch: int, length: int, generator: Generator) -> Batch:
    """32 numbers that repeat, then the same in order.

    To repeat the last number is nearly always right in a long sequence. So the accuracy counts the
    last number of each run and the one before it: whoever repeats always has half of these right.
    """
    source = draw_numbers(batch, length // 2, NUMBERS, generator)
    answers = source.sort(-1).values
    goes_on = torch.zeros_like(answers, dtype=torch.bool)
    goes_on[:, 1:] = answers[:, 1:] == answers[:, :-1]
    ends_here = ~goes_on
    before_end = torch.zeros_like(goes_on)
    before_end[:, :-1] = goes_on[:, :-1] & ends_here[:, 1:]
    rows = torch.full_like(answers, NO_TARGET)
    return Batch(append_answers(source, answers), answers, ends_here | before_end, rows)


TASKS: dict[str, Callable[[int, int, Generator], Batch]] = {
    "mqar": make_recall,
    "copy": make_copy,
    "reverse": make_reverse,
    "sort": make_sort,
    "mqmtar": make_token_recall,
    "noisy": make_noisy_recall,
    "similar": make_similar_recall,
    "hops": make_hops,
}
LAYERS = dict.fromkeys(TASKS, 2) | {"hops": 3}
"""Layers of the models of a task: one to join key and value, one for each look-up."""


def interleave(*parts: Tensor) -> Tensor:
    """Return the columns of the parts (batch, n) in turn, (batch, n · parts)."""
    return torch.stack(parts, -1).flatten(1)


def append_answers(source: Tensor, answers: Tensor) -> Tensor:
    """Return the source, a separator, and all answers but the last."""
    separator = torch.full_like(source[:, :1], SEPARATOR)
    return torch.cat([source, separator, answers[:, :-1]], 1)


def append_queries(table: Tensor, query: Tensor, targets: Tensor, answer_rows: Tensor) -> Batch:
    """Return the table, separators where the second half is longer than the queries, and these."""
    missing = table.shape[1] - query.shape[1]
    padding = torch.full_like(table[:, :missing], SEPARATOR)
    nothing = torch.full_like(padding, NO_TARGET)
    return build_batch(
        torch.cat([table, padding, query], 1),
        torch.cat([nothing, targets], 1),
        torch.cat([nothing, answer_rows], 1),
    )


def build_batch(tokens: Tensor, targets: Tensor, answer_rows: Tensor) -> Batch:
    """Return a batch in which all targets count."""
    return Batch(tokens, targets, targets >= 0, answer_rows)


def build_word_recall(
    key: Tensor, query: Tensor, asked: Tensor, letters: int, generator: Generator
) -> Batch:
    """Return recall for keys and queries of three letters (batch, 3, …): the last one asks."""
    first = torch.arange(3, device=key.device)[:, None] * letters
    value = draw_numbers(len(key), key.shape[2], VALUES, generator) + SYMBOLS
    nothing = torch.full_like(asked, NO_TARGET)
    return append_queries(
        interleave(*(key + first).unbind(1), value),
        interleave(*(query + first).unbind(1)),
        interleave(nothing, nothing, value.gather(1, asked)),
        interleave(nothing, nothing, 4 * asked + 3),
    )
