"""The registry of encoders by name, and the functions that build an encoder from a name or
settings.

Encoders that contain other encoders import this module. `qkv.database.encoders` fills the registry.
"""

from __future__ import annotations

import importlib
from typing import Any

from qkv.database.encoders.base import Encoder, EncoderArrays, EncoderSettings
from qkv.database.encoders.custom import Custom
from qkv.errors import ArgumentError, DtypeError, QkvError
from qkv.util.registry import ClassRegistry

ENCODERS = ClassRegistry("encoders", Encoder)  # type: ignore[type-abstract]
register = ENCODERS.register


def load(
    settings: EncoderSettings, arrays: EncoderArrays, user_encoder: Encoder | None = None
) -> Encoder:
    """Build the encoder of a stored database. `user_encoder` is the `encoder=` of the caller.

    >>> from qkv.database.encoders import Characters
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
    except Exception as error:  # the settings may be damaged or made by an attacker
        raise ArgumentError(
            f"no encoder can be built from the stored settings ({type(error).__name__}: {error}): "
            "encode the keys again, D.encode(encoder)"
        ) from error


def resolve_single(encoder: Any) -> Encoder:
    """Return the encoder for a name, an encoder, a function or "module:function".

    >>> resolve_single("exact")
    Exact(width=256)
    """
    if isinstance(encoder, str) and ":" in encoder:
        return Custom(_import_function(encoder))
    resolved = ENCODERS.resolve(encoder)
    if resolved is not None:
        return resolved
    if callable(encoder):
        return Custom(encoder)
    raise DtypeError(f"encoder must be a name, an encoder or a function, not {encoder!r}")


def _import_function(path: str) -> Any:
    """Import the function that "module:function" names."""
    module, _, name = path.partition(":")
    try:
        target: Any = importlib.import_module(module)
        for part in name.split("."):
            target = getattr(target, part)
    except (ImportError, AttributeError, ValueError) as error:
        raise ArgumentError(f"encoder {path!r} cannot be imported: {error}") from None
    return target
