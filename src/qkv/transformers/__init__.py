"""Hugging Face models: run their attention with `attend`, and record their attention weights.

    register()                          # then attn_implementation="qkv" works
    with capture(model) as captured:    # records the weights of each layer
        model(**inputs)
    captured.words(tokenizer, text).plot()

`capture` also works for models that were loaded with another implementation.
"""

from qkv.errors import missing_extra_error

try:
    import torch as _torch  # noqa: F401
    from transformers import AttentionMaskInterface as _  # noqa: F401
except ImportError as error:
    raise missing_extra_error(
        f"qkv.transformers needs torch and transformers 5 ({error})", "transformers"
    ) from None

from qkv.transformers.captured_attention import CapturedAttention, CapturedLayer
from qkv.transformers.implementation import register
from qkv.transformers.recording import capture

__all__ = ["CapturedAttention", "CapturedLayer", "capture", "register"]
