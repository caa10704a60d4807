"""Hugging Face transformers: every model's attention by `attend`, and a look at what it weighs.

    register()                          # then attn_implementation="qkv" works; see `register`
    with capture(model) as seen:        # each layer's α during a normal forward pass
        model(**inputs)
    seen.words(tokenizer, text).plot()

`capture` records every model, loaded with "qkv" or not.
"""

from qkv.errors import MissingExtraError

try:
    import torch as _torch  # noqa: F401
    from transformers import AttentionMaskInterface as _  # noqa: F401
except ImportError as error:
    raise MissingExtraError(
        'qkv.transformers needs torch and transformers 5: pip install "qkv[transformers]" '
        f"({error})"
    ) from None

from qkv.transformers.captured_attention import CapturedAttention, CapturedLayer
from qkv.transformers.implementation import register
from qkv.transformers.recording import capture

__all__ = ["CapturedAttention", "CapturedLayer", "capture", "register"]
