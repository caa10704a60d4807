"""Encoders turn keys into vectors: choose one by name, build one, or let the keys decide."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from qkv.database.encoders.arrays import Arrays
from qkv.database.encoders.base import Encoder, EncoderArrays, EncoderSettings
from qkv.database.encoders.characters import Characters
from qkv.database.encoders.custom import Custom
from qkv.database.encoders.exact import Exact
from qkv.database.encoders.heads import Columns, Heads
from qkv.database.encoders.learned import Learned
from qkv.database.encoders.lexical import Lexical
from qkv.database.encoders.numbers import Numbers
from qkv.database.encoders.sentences import Sentences
from qkv.database.encoders.text import Text
from qkv.database.encoders.vectors import Vectors
from qkv.database.encoders.words import Words, is_installed
from qkv.database.table import cells
from qkv.errors import ArgumentError, DtypeError, QkvError, unknown_name_error
from qkv.frameworks import is_array
from qkv.util.registry import ClassRegistry

ENCODERS = ClassRegistry(
    "encoders",
    Encoder,  # type: ignore[type-abstract]
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
register = ENCODERS.register

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


def load(
    settings: EncoderSettings, arrays: EncoderArrays, user_encoder: Encoder | None = None
) -> Encoder:
    """Build the encoder of a stored database; `user_encoder` is the `encoder=` of the caller.

    >>> load(Characters(128).settings(), {})
    Characters(width=128, n=(2, 3), sounds=0.5, idf=False)
    """
    advice = " Register it by encoders.register, or open the database with encoder=."
    try:
        if user_encoder is not None and user_encoder.kind == settings["kind"]:
            return user_encoder.restore(settings, arrays, user_encoder)
        return ENCODERS.find_class(settings["kind"], advice).restore(settings, arrays, user_encoder)
    except QkvError:
        raise
    except Exception as error:  # the settings may be damaged or untrusted
        raise ArgumentError(
            f"the settings of the encoder make none ({type(error).__name__}: {error}): encode the "
            "keys again, D.encode(encoder)"
        ) from error


def resolve(encoder: Any) -> Encoder:
    """Return the encoder for a name, an encoder, a function, "module:function" or a list of heads.

    >>> resolve("exact")
    Exact(width=256)
    """
    if isinstance(encoder, str) and ":" in encoder:
        return Custom(_import_function(encoder))
    resolved = ENCODERS.resolve(encoder)
    if resolved is not None:
        return resolved
    if isinstance(encoder, list | tuple | Mapping):
        return Heads(encoder)
    if callable(encoder):
        return Custom(encoder)
    raise DtypeError(f"encoder must be a name, an encoder or a function, not {encoder!r}")


def resolve_name(name: Any) -> Encoder:
    """Return the encoder of a registered name from an untrusted client.

    "module:function" is not accepted, because it would import and call any function.

    >>> resolve_name("exact")
    Exact(width=256)
    """
    if not isinstance(name, str) or name not in ENCODERS:
        raise unknown_name_error("encoder", name, ENCODERS)
    return resolve(name)


def _import_function(path: str) -> Any:
    module, _, name = path.partition(":")
    try:
        target: Any = importlib.import_module(module)
        for part in name.split("."):
            target = getattr(target, part)
    except (ImportError, AttributeError, ValueError) as error:
        raise ArgumentError(f"encoder {path!r} cannot be imported: {error}") from None
    return target


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
    Numbers(bandwidth=None, units=None, mean=None, unit=None, spread=None)
    """
    if is_array(keys):
        columns = len(keys.shape)  # type: ignore[attr-defined]
        return Numbers() if columns == 1 else Arrays()
    if not len(keys):
        raise ArgumentError("no keys: an encoder cannot be chosen by their type")
    kind = cells.common_kind(keys)
    if kind == "text":
        return Text() if is_installed() else Characters()
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
    widths = {len(key) for key in keys}
    if len(widths) > 1:
        return Exact()
    columns = list(zip(*keys, strict=True))
    # The encoder of a column rejects missing values later, with their row.
    heads = [default([x for x in column if x is not None] or column) for column in columns]
    if all(isinstance(head, Numbers) for head in heads):
        return Numbers()
    if len(names) != len(heads):
        return Columns(heads)
    return Columns(dict(zip(names, heads, strict=True)))


def _is_vector(key: Any) -> bool:
    return isinstance(key, list) and bool(key) and cells.common_kind(key) == "number"
