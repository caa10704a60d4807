"""Keys as vectors: pick an encoder by name, build one, or let the keys' types decide."""

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
"""The names that are enough for a database, to a type checker; `resolve` takes any other."""
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


def load(settings: EncoderSettings, arrays: EncoderArrays, given: Encoder | None = None) -> Encoder:
    """The encoder that a database was written with; `given` is what its reader has passed.

    >>> load(Characters(128).settings(), {})
    Characters(width=128, n=(2, 3), sounds=0.5, idf=False)
    """
    advice = " Register it by encoders.register, or open the database with encoder=."
    try:
        if given is not None and given.kind == settings["kind"]:
            return given.restore(settings, arrays, given)
        return ENCODERS.find_class(settings["kind"], advice).restore(settings, arrays, given)
    except QkvError:
        raise
    except Exception as error:  # whatever a stranger may have written there
        raise ArgumentError(
            f"the settings of the encoder make none ({type(error).__name__}: {error}): encode the "
            "keys again, D.encode(encoder)"
        ) from error


def resolve(encoder: Any) -> Encoder:
    """An encoder from its name, itself, a function (or `module:function`), or a list as heads.

    >>> resolve("exact")
    Exact(width=256)
    """
    if isinstance(encoder, str) and ":" in encoder:
        return Custom(_import_function(encoder))
    found = ENCODERS.resolve(encoder)
    if found is not None:
        return found
    if isinstance(encoder, list | tuple | Mapping):
        return Heads(encoder)
    if callable(encoder):
        return Custom(encoder)
    raise DtypeError(f"encoder must be a name, an encoder or a function, not {encoder!r}")


def resolve_name(name: Any) -> Encoder:
    """The encoder of a name in the table, where strangers may write it: a `module:function` would
    import and call what they want.

    >>> resolve_name("exact")
    Exact(width=256)
    """
    if not isinstance(name, str) or name not in ENCODERS:
        raise unknown_name_error("encoder", name, ENCODERS)
    return resolve(name)


def _import_function(path: str) -> Any:
    module, _, name = path.partition(":")
    try:
        found: Any = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError, ValueError) as error:
        raise ArgumentError(f"encoder {path!r} cannot be imported: {error}") from None
    return found


def default(keys: Sequence[Any], names: Sequence[str] = ()) -> Encoder:
    """The encoder for keys of these types, not yet fitted.

    Text: letters, meaning and words, side by side, or without wordllama the letters, for slips of
    the hand. Numbers and dates: `Numbers`. Vectors: themselves. Tuples: each column by its type.
    JSON: the letters of its text. Bytes: only themselves.

    >>> default([1.5, 2])
    Numbers(bandwidth=None, units=None, mean=None, unit=None, spread=None)
    """
    if is_array(keys):
        columns = len(keys.shape)  # type: ignore[attr-defined]
        return Numbers() if columns == 1 else Arrays()
    if not len(keys):
        raise ArgumentError("there are no keys to choose an encoder by")
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
    # What is missing in a column is refused later, with its row, by the encoder of the others.
    heads = [default([x for x in column if x is not None] or column) for column in columns]
    if all(isinstance(head, Numbers) for head in heads):
        return Numbers()
    if len(names) != len(heads):
        return Columns(heads)
    return Columns(dict(zip(names, heads, strict=True)))


def _is_vector(key: Any) -> bool:
    return isinstance(key, list) and bool(key) and cells.common_kind(key) == "number"
