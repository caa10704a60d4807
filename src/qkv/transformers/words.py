"""Sub-tokens as the words that they are parts of."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np

from qkv.errors import ShapeError

# Tokenizers mark where words begin, where they go on, or where they end.
MARKS = {"begins": ("▁", "Ġ"), "goes on": ("##",), "ends": ("</w>",)}


def token_ids(tokenizer: Any, text: Any) -> list[int]:
    if isinstance(text, str):
        text = tokenizer(text)["input_ids"]
    ids = np.asarray(text.tolist() if hasattr(text, "tolist") else text)
    if ids.ndim == 2 and len(ids) == 1:
        ids = ids[0]
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise ShapeError(f"text must be a string or the ids of one, not of shape {ids.shape}")
    return ids.tolist()  # type: ignore[no-any-return]


def words_of(tokenizer: Any, ids: list[int]) -> tuple[list[str], list[int]]:
    """The words, and for each token the number of its word."""
    counts = Counter[str]()
    for token in tokenizer.get_vocab():
        for mark, signs in MARKS.items():
            if token.startswith(signs) or (mark == "ends" and token.endswith(signs)):
                counts[mark] += 1
    mark = max(counts, key=counts.__getitem__, default="")
    special = set(tokenizer.all_special_ids)
    tokens = tokenizer.convert_ids_to_tokens(ids)
    words: list[list[str]] = []
    groups: list[int] = []
    closed = True
    for at, token in zip(ids, tokens, strict=True):
        alone = at in special
        joins = not (alone or closed)
        if joins and mark == "begins":
            joins = not token.startswith(MARKS[mark])
            # Punctuation has no mark of its own.
            joins = joins and _is_sign(tokenizer, token) == _is_sign(tokenizer, words[-1][-1])
        elif joins:
            joins = mark == "ends" or (mark == "goes on" and token.startswith(MARKS[mark]))
        if joins:
            words[-1].append(token)
        else:
            words.append([token])
        groups.append(len(words) - 1)
        closed = alone or (mark == "ends" and token.endswith(MARKS[mark]))
    return [tokenizer.convert_tokens_to_string(word).strip() or word[0] for word in words], groups


def _is_sign(tokenizer: Any, token: str) -> bool:
    if token in MARKS["begins"]:
        return False
    text = tokenizer.convert_tokens_to_string([token])
    # Half a letter, as bytes have it, is shown as �.
    return not any(letter.isalnum() or letter == "�" for letter in text)
