"""Causal transformers whose attention is one call of `qkv.attend`, many of them in one stack.

A `Stack` trains independent models of one kind of attention together: parameters have a first axis
of runs (one for each task and seed), so a step takes few large kernels where separate models would
take many small ones. Runs share nothing: each has its own parameters, data and gradient norm.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import qkv
from examples.recall.tasks import VOCABULARY
from qkv import masks, scores, weightings
from qkv.nn import Rotary

WIDTH, HEADS, HIDDEN = 64, 4, 256
SLOPES = {
    "mixed": (0.0, 0.0, 0.5, 1.0),
    "alibi": (2.0**-8, 2.0**-4, 0.25, 1.0),
    "rotary": (0.0,) * 4,
    "half rotary": (0.0,) * 4,
    "none": (0.0,) * 4,
}
"""The slopes of ALiBi for each head. In "mixed" half of the heads have no position."""
EMBEDDING_SCALE = 10.0
"""Parameters of the embedding are multiplied by it, so that it learns as much faster under Adam."""
TEMPERATURE = 0.1
"""The first temperature of the cosine score, which is learned."""


@dataclass(frozen=True)
class Attention:
    """A kind of attention: the arguments of `qkv.attend`, with what each head learns besides."""

    score: str = "scaled_dot"
    weighting: str = "softmax"
    position: str = "mixed"
    learns: str | None = None
    """What a head learns: "scale" (of scores by log n), "adaptive scale" (of each query), "sink",
    "alpha", "temperature"."""
    taps: int = 4
    """Positions that the short convolution of queries, keys and values reads; 1: none."""


ATTENTIONS = {
    "softmax": Attention(),
    "softmax-logn": Attention(learns="scale"),
    "softmax-sink": Attention(learns="sink"),
    "sparsemax": Attention(weighting="sparsemax"),
    "entmax15": Attention(weighting="entmax15"),
    "entmax15-logn": Attention(weighting="entmax15", learns="scale"),
    "asentmax": Attention(weighting="entmax15", learns="adaptive scale"),
    "alpha": Attention(weighting="entmax", learns="alpha"),
    "top8": Attention(weighting="top8"),
    "hard": Attention(weighting="hard"),
    "sigmoid": Attention(weighting="sigmoid"),
    "linear": Attention("elu", "normalized"),
    "softmax/rotary": Attention(position="rotary"),
    "softmax/alibi": Attention(position="alibi"),
    "softmax/none": Attention(position="none"),
    "entmax15/rotary": Attention(weighting="entmax15", position="rotary"),
    "entmax15/alibi": Attention(weighting="entmax15", position="alibi"),
    "entmax15/none": Attention(weighting="entmax15", position="none"),
    "softmax/half-rotary": Attention(position="half rotary"),
    "entmax15/half-rotary": Attention(weighting="entmax15", position="half rotary"),
    "cosine": Attention("cosine", learns="temperature"),
    "gaussian": Attention("gaussian"),
    "additive": Attention("additive"),
    "softmax/no-convolution": Attention(taps=1),
    "softmax/rotary/no-convolution": Attention(position="rotary", taps=1),
    "softmax/none/no-convolution": Attention(position="none", taps=1),
}
"""In the order of their training: weightings, then positions, then scores."""
FIRST_NUMBER = {"scale": 0.3, "sink": 0.0, "alpha": 1.5, "temperature": TEMPERATURE}


def attend_heads(
    kind: Attention,
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    learned: Tensor | None,
    slopes: Tensor,
    engine: Any = None,
) -> Tensor:
    """Return the attention of the last queries (…, h, n, d) over keys (…, h, m, d).

    `learned` is one number for each head, (…, h, 1, 1), or a scale for each query, (…, h, n, 1).
    Without values, return the weights.
    """
    count = key.shape[-2]
    before = count - query.shape[-2]
    if "rotary" in kind.position:
        width = query.shape[-1] // (2 if kind.position == "half rotary" else 1)
        query, key = rotate_columns(query, width, before), rotate_columns(key, width)
    if kind.learns == "scale":
        query = query * (learned * log_lengths(before, count, query)[:, None])
    elif kind.learns == "adaptive scale":
        query = query * learned
    score = build_score(kind, slopes, before, query, learned)
    options: dict[str, Any] = {
        "score": score,
        "weighting": build_weighting(kind, learned),
        "mask": masks.causal(align="bottom_right") if before else masks.causal,
    }
    if value is None:
        return qkv.weights(query, key, **options)
    return qkv.attend(query, key, value, **options, engine=engine)


def rotate_columns(x: Tensor, width: int, offset: int = 0) -> Tensor:
    """Return rows whose first columns, `width` of them, are rotated by their position."""
    rotated, others = x[..., :width], x[..., width:]
    return torch.cat([Rotary(width)(rotated, offset), others], -1)


def log_lengths(start: int, stop: int, like: Tensor) -> Tensor:
    """Return log(1 + keys) for queries from start to stop: each sees itself and all before it."""
    return torch.arange(start + 1, stop + 1, device=like.device, dtype=like.dtype).log1p()


def build_score(
    kind: Attention, slopes: Tensor, before: int, query: Tensor, learned: Tensor | None
) -> Any:
    """Return the score with its positions; `before` keys precede the first query."""
    align = "bottom_right" if before else "top_left"
    if kind.score == "elu":
        return scores.Decay(slopes, scores.FeatureMap("elu"), align=align)
    score: Any = kind.score
    if score == "additive":
        width = query.shape[-1]
        one = torch.ones(width, device=query.device, dtype=query.dtype)
        score = scores.Additive(one.diag(), None, one)
    elif score == "cosine":
        score = scores.Cosine(learned)
    elif score == "gaussian":  # −‖q − k‖² / 2σ² has q·k / √d in it, as the dot product
        score = scores.Gaussian(query.shape[-1] ** 0.25)
    if kind.position in ("mixed", "alibi"):
        score = scores.Relative(scores.Alibi(slopes), score, align=align)
    if kind.weighting == "sigmoid":  # the weights of a head without slope sum to about 1 at first
        logs = log_lengths(before, before + query.shape[-2], query)
        score = scores.Modified(score, lambda s, batch, head, i, j: s - logs[i])
    return score


def build_weighting(kind: Attention, learned: Tensor | None) -> Any:
    if kind.learns == "sink":
        return weightings.Softmax(sink=learned)
    if kind.learns == "alpha":
        return weightings.Entmax(learned)
    named = {"top8": weightings.TopK(8), "hard": weightings.Hard(straight_through=True)}
    return named.get(kind.weighting, kind.weighting)


class Stack(nn.Module):
    """Independent causal transformers of one kind of attention: one for each seed in `seeds`."""

    def __init__(self, kind: Attention, seeds: list[int], layers: int = 2) -> None:
        super().__init__()
        self.kind, self.runs, self.layers = kind, len(seeds), layers
        self.shapes = list_shapes(kind, layers)
        numbers = [draw_parameters(self.shapes, kind, seed) for seed in seeds]
        # One tensor: the optimizer and the gradient's norm need one kernel each.
        self.numbers = nn.Parameter(torch.stack(numbers))
        self.register_buffer("slopes", torch.tensor(SLOPES[kind.position]), persistent=False)

    @property
    def parameter_count(self) -> int:
        """The number of parameters of one model."""
        return self.numbers.shape[1]

    def forward(
        self, tokens: Tensor, probed: int = 0, engine: Any = None
    ) -> tuple[Tensor, list[Tensor]]:
        """Return logits (runs, batch, n / 2, vocabulary) for the second half of the tokens.

        The second result has the weights of each layer for the last `probed` queries, (runs, batch,
        heads, probed, n).
        """
        runs, batch, length = tokens.shape
        parts = self.numbers.split([math.prod(shape) for shape in self.shapes.values()], 1)
        own = {
            name: part.unflatten(1, shape)
            for (name, shape), part in zip(self.shapes.items(), parts, strict=True)
        }
        first = torch.arange(runs, device=tokens.device)[:, None, None] * VOCABULARY
        own["embedding"] = own["embedding"] * EMBEDDING_SCALE
        table = own["embedding"].reshape(-1, WIDTH)
        x = nn.functional.embedding(tokens + first, table).flatten(1, 2)
        probes = []
        for layer in range(self.layers):
            mine = {name.partition(".")[2]: p for name, p in own.items() if name[0] == str(layer)}
            rows, weights = normalize_rows(x), mine["norm_1"].mT * mine["projection"]
            if self.kind.taps > 1:
                rows = join_earlier_rows(rows.view(runs, batch, length, WIDTH), self.kind.taps)
                weights = (weights[:, None] * mine["taps"][:, :, None]).flatten(1, 2)
            qkv_rows = rows @ weights
            heads = qkv_rows.view(runs * batch, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
            query, key, value = heads.unbind()
            learned = mine.get("learned")
            if self.kind.learns == "adaptive scale":
                projection = mine["norm_1"].mT * mine["scale_projection"]
                learned = normalize_rows(x) @ projection + mine["scale_bias"]
                learned = scale_queries(learned.view(runs * batch, length, 2, HEADS))
            elif learned is not None:
                learned = learned.view(runs, 1, HEADS, 1, 1).expand(-1, batch, -1, -1, -1)
                learned = learned.flatten(0, 1)
                if self.kind.learns in ("alpha", "temperature"):
                    learned = learned.clamp_min(0.02)
            if probed:
                last = query[..., -probed:, :]
                known = learned
                if self.kind.learns == "adaptive scale":
                    known = learned[..., -probed:, :]
                weights = attend_heads(self.kind, last, key, None, known, self.slopes)
                probes.append(weights.unflatten(0, (runs, batch)))
            out = attend_heads(self.kind, query, key, value, learned, self.slopes, engine)
            out = out.transpose(1, 2).reshape(runs, batch * length, WIDTH)
            x = torch.baddbmm(x, out, mine["output"])
            hidden = nn.functional.gelu(normalize_rows(x) @ (mine["norm_2"].mT * mine["up"]))
            x = torch.baddbmm(x, hidden, mine["down"])
        x = x.view(runs, batch, length, WIDTH)[:, :, length // 2 :].flatten(1, 2)
        # The embedding is also the head: what a head copies is a symbol at once.
        logits = normalize_rows(x) @ (own["norm"] * own["embedding"]).mT
        return logits.view(runs, batch, -1, VOCABULARY), probes


def normalize_rows(x: Tensor) -> Tensor:
    return nn.functional.rms_norm(x, x.shape[-1:])


def join_earlier_rows(x: Tensor, count: int) -> Tensor:
    """Return each row beside the ones before it, (runs, batch · n, count · width).

    Its product with (taps[j] · projection) for each j is the convolution Σⱼ taps[j] y[t − j] of the
    projected rows y. It is one matrix product, and so faster than to add up count arrays.
    """
    moved = [nn.functional.pad(x, (0, 0, j, 0))[:, :, : x.shape[2]] for j in range(count)]
    return torch.cat(moved, -1).flatten(1, 2)


def scale_queries(numbers: Tensor) -> Tensor:
    """Return the factors (batch, heads, n, 1) of ASEntmax: 1 + softplus(β) · (log n) ^ tanh(γ).

    `numbers` has β and γ for each position and head, (batch, n, 2, heads).
    """
    beta, gamma = numbers.permute(2, 0, 3, 1)
    logs = log_lengths(0, beta.shape[-1], beta)
    return (1 + nn.functional.softplus(beta) * logs ** gamma.tanh())[..., None]


def list_shapes(kind: Attention, layers: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the parameters of one model."""
    shapes: dict[str, tuple[int, ...]] = {"embedding": (VOCABULARY, WIDTH)}
    for layer in range(layers):
        block = {
            "norm_1": (1, WIDTH),
            "projection": (WIDTH, 3 * WIDTH),
            "output": (WIDTH, WIDTH),
            "norm_2": (1, WIDTH),
            "up": (WIDTH, HIDDEN),
            "down": (HIDDEN, WIDTH),
        }
        if kind.taps > 1:
            block["taps"] = (kind.taps, 3 * WIDTH)
        if kind.learns == "adaptive scale":
            block |= {"scale_projection": (WIDTH, 2 * HEADS), "scale_bias": (1, 2 * HEADS)}
        elif kind.learns:
            block["learned"] = (HEADS,)
        shapes |= {f"{layer}.{name}": shape for name, shape in block.items()}
    return shapes | {"norm": (1, WIDTH)}


def draw_parameters(shapes: dict[str, tuple[int, ...]], kind: Attention, seed: int) -> Tensor:
    """Return the first parameters of one model, the same for each attention."""
    generator = torch.Generator().manual_seed(seed)
    parts = []
    for name, shape in shapes.items():
        if "norm" in name:
            part = torch.full(shape, WIDTH**-0.5 if name == "norm" else 1.0)
        elif name.endswith("learned"):
            part = torch.full(shape, FIRST_NUMBER[kind.learns or ""])
        elif name.endswith("taps"):
            part = 0.3 * torch.randn(shape, generator=torch.Generator().manual_seed(seed))
            part[0] = 1.0
        elif ".scale_" in name:
            part = torch.zeros(shape)
        else:
            spread = 1 / EMBEDDING_SCALE if name == "embedding" else shape[0] ** -0.5
            part = torch.randn(shape, generator=generator) * spread
        parts.append(part.flatten())
    return torch.cat(parts)
