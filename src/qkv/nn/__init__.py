"""PyTorch layers: attention heads, blocks and models with any score and any weighting."""

from __future__ import annotations

import importlib.util

from qkv.errors import missing_extra_error

if importlib.util.find_spec("torch") is None:
    raise missing_extra_error("qkv.nn needs PyTorch", "torch")

from qkv.nn.attention import Attention, SelfAttention
from qkv.nn.blocks import (
    Transformer,
    TransformerBlock,
    TransformerDecoder,
    TransformerEncoder,
)
from qkv.nn.cache import Cache
from qkv.nn.captured_attention import CapturedAttention, capture
from qkv.nn.description import Description, describe
from qkv.nn.feedforward import FeedForward
from qkv.nn.heads import MultiHeadAttention
from qkv.nn.latent import LatentAttention
from qkv.nn.memory import Memory
from qkv.nn.mixed_heads import DifferentialAttention, TalkingHeadsAttention
from qkv.nn.models import BahdanauDecoder, KernelRegression, SqueezeExcitation
from qkv.nn.paged_cache import PagedCache
from qkv.nn.rotary import Rotary
from qkv.nn.scores import (
    AdditiveScore,
    GatedScore,
    GaussianScore,
    LearnedScore,
    MultiplicativeScore,
)

__all__ = [
    "AdditiveScore",
    "Attention",
    "BahdanauDecoder",
    "Cache",
    "Description",
    "DifferentialAttention",
    "FeedForward",
    "GatedScore",
    "GaussianScore",
    "KernelRegression",
    "LatentAttention",
    "LearnedScore",
    "Memory",
    "MultiHeadAttention",
    "MultiplicativeScore",
    "PagedCache",
    "Rotary",
    "CapturedAttention",
    "SelfAttention",
    "SqueezeExcitation",
    "TalkingHeadsAttention",
    "Transformer",
    "TransformerBlock",
    "TransformerDecoder",
    "TransformerEncoder",
    "capture",
    "describe",
]
