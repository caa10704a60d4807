"""Encoders turn keys into vectors.

Choose one by its name, build one, or let the type of keys decide.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from qkv.database.encoders.arrays import Arrays
from qkv.database.encoders.base import Encoder, has_text_extra
from qkv.database.encoders.characters import Characters
from qkv.database.encoders.custom import Custom
from qkv.database.encoders.exact import Exact
from qkv.database.encoders.heads import Columns, Heads, resolve
from qkv.database.encoders.learned import Learned
from qkv.database.encoders.lexical import Lexical
from qkv.database.encoders.numbers import Numbers
from qkv.database.encoders.registry import ENCODERS, load, register
from qkv.database.encoders.sentences import Sentences
from qkv.database.encoders.text import Text
from qkv.database.encoders.vectors import Vectors
from qkv.database.encoders.words import Words
from qkv.database.table import cells
from qkv.errors import ArgumentError, unknown_name_error
from qkv.frameworks import is_array

ENCODERS.update(
    arrays=Arrays,
    characters=Characters,
    columns=Columns,
    custom=Custom,
    exact=Exact,
    heads=Heads,
    learned=Learned,
    lexical=Lexical,
    numbers=Numbers,
    sentences=Sentences,
    text=Text,
    vectors=Vectors,
    words=Words,
)

EncoderName = Literal[
    "arrays", "characters", "exact", "lexical", "numbers", "sentences", "text", "words"
]
"""The names of encoders with default fields, for type checkers; `resolve` also takes others."""
EncoderLike = EncoderName | Encoder | Callable[..., Any] | Sequence[Encoder] | Mapping[str, Encoder]

__all__ = [
    "ENCODERS",
    "Arrays",
    "Characters",
    "Columns",
    "Custom",
    "Encoder",
    "EncoderLike",
    "Exact",
    "Heads",
    "Learned",
    "Lexical",
    "EncoderName",
    "Numbers",
    "Sentences",
    "Text",
    "Vectors",
    "Words",
    "default",
    "load",
    "resolve_name",
    "register",
    "resolve",
]


def resolve_name(name: Any) -> Encoder:
    """Return the encoder for a registered name that an untrusted client sent.

    Names such as "module:function" are refused, because they would import and call any function.

    >>> resolve_name("exact")
    Exact(width=256)
    """
    if not isinstance(name, str) or name not in ENCODERS:
        meant = ENCODERS.find_alias(name) if isinstance(name, str) else None
        raise unknown_name_error("encoder", name, ENCODERS, meant=meant)
    return resolve(name)


def default(keys: Sequence[Any], names: Sequence[str] = ()) -> Encoder:
    """Return the default encoder for keys of these types, not yet fitted.

    | keys | encoder |
    |---|---|
    | text | `Text`; without wordllama `Characters` |
    | numbers, dates | `Numbers` |
    | vectors | `Arrays` |
    | tuples | `Columns`, one encoder per column |
    | JSON | `Characters` |
    | bytes | `Exact` |

    >>> default([1.5, 2])
    Numbers(bandwidth=None, units=None, mean=None, unit=None, spread=None, neighbour_distance=None)
    """
    if is_array(keys):
        columns = len(keys.shape)  # type: ignore[attr-defined]
        return Numbers() if columns == 1 else Arrays()
    if not len(keys):
        raise ArgumentError("there are no keys whose type could choose an encoder: pass encoder=")
    kind = cells.common_kind(keys)
    if kind == "text":
        return Text() if has_text_extra() else Characters()
    if kind in ("number", "date"):
        return Numbers()
    if kind == "vector" or (kind == "json" and all(map(_is_vector, keys))):
        return Arrays()
    if kind == "bytes":
        return Exact()
    if kind == "tuple":
        return _default_for_columns(keys, names)
    return Characters()


def _default_for_columns(keys: Sequence[tuple[Any, ...]], names: Sequence[str]) -> Encoder:
    """Return the default encoder for keys that are tuples: one encoder per column."""
    widths = {len(key) for key in keys}
    if len(widths) > 1:
        return Exact()
    columns = list(zip(*keys, strict=True))
    # The column's encoder rejects missing values later, in an error that names the row.
    heads = [default([x for x in column if x is not None] or column) for column in columns]
    if all(isinstance(head, Numbers) for head in heads):
        return Numbers()
    if len(names) != len(heads):
        return Columns(heads)
    return Columns(dict(zip(names, heads, strict=True)))


def _is_vector(key: Any) -> bool:
    return isinstance(key, list) and bool(key) and cells.common_kind(key) == "number"
