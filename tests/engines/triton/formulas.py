"""The kernel family's formula, literally, in float64."""

from __future__ import annotations

import math

import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

NAMES = ("query", "key", "value", "key_bias", "gate_query", "gate_key")


def scores(query, key, scale, key_bias=None, gate_query=None, gate_key=None):
    """s = (scale · φ·ψ + bias) · σ(a + b), (B, H, n, m)"""
    s = query @ shared(key, query).mT * scale
    if key_bias is not None:
        s = s + shared(key_bias, query)[:, :, None, :]
    if gate_key is not None:
        s = s * torch.sigmoid(gate_query[..., None] + shared(gate_key, query)[:, :, None, :])
    return s


def shared(x, query):
    return x.repeat_interleave(query.shape[1] // x.shape[1], 1)


def alive(shape, lower=None, upper=None, lengths=None, layout=None, layout_size=0, device=DEVICE):
    i = torch.arange(shape[2], device=device)[:, None]
    j = torch.arange(shape[3], device=device)[None, :]
    live = torch.ones(shape, dtype=torch.bool, device=device)
    if lower is not None:
        live = live & (j - i >= lower)
    if upper is not None:
        live = live & (j - i <= upper)
    if lengths is not None:
        live = live & (j < lengths[:, None, None, None])
    if layout is not None:
        live = live & (layout[i // layout_size, j // layout_size] != 0)
    return live


def entmax_threshold(s, live, alpha):
    """t with Σ max(0, (alpha − 1)s − t)^e = 1, by bisection; 0 for an empty row."""
    e = 1 / (alpha - 1)
    x = torch.where(live, (alpha - 1) * s.detach(), -math.inf)
    top = x.max(-1, keepdim=True).values
    has_keys = top > -math.inf
    lo, hi = torch.where(has_keys, top - 1, 0.0), torch.where(has_keys, top, 0.0)
    for _ in range(60):
        middle = (lo + hi) / 2
        big = (x - middle).clamp(min=0).pow(e).sum(-1, keepdim=True) > 1
        lo, hi = torch.where(big, middle, lo), torch.where(big, hi, middle)
    return ((lo + hi) / 2)[..., 0]


def topk_threshold(s, live, k):
    """A number between the k-th and the next largest live score, and the last position."""
    x = torch.where(live, s.detach(), -math.inf).sort(-1, descending=True).values
    x = torch.nn.functional.pad(x, (0, max(k + 1 - x.shape[-1], 0)), value=-math.inf)
    return (x[..., k - 1] + x[..., k].clamp(min=-1e9)) / 2, 2**31 - 1


def weigh(s, live, weighting, alpha=0.0, row_a=None):
    """α and the log-sum-exp (or its stand-in)"""
    zero = torch.zeros((), dtype=s.dtype, device=s.device)
    has_keys = live.any(-1, keepdim=True)
    if weighting == "average":
        count = live.sum(-1, keepdim=True)
        return live / count.clamp(min=1), count[..., 0].to(s.dtype)
    if weighting in ("softmax", "topk"):
        if weighting == "topk":
            live = live & (s.detach() > row_a[..., None])
            has_keys = live.any(-1, keepdim=True)
        s = torch.where(live, s, -math.inf)
        s = torch.where(has_keys, s, zero)
        lse = torch.where(has_keys[..., 0], s.logsumexp(-1), -math.inf)
        return torch.where(has_keys, s.softmax(-1), zero), lse
    if weighting == "entmax":
        e = 1 / (alpha - 1)

        def power(t, exponent):
            r = (alpha - 1) * s - t
            on = live & (r > 0)
            return torch.where(on, torch.where(on, r, 1.0).pow(exponent), zero)

        t = row_a[..., None]
        lean = e * power(t, e - 1).detach().sum(-1, keepdim=True)
        # A step of Newton, so that the threshold moves with the scores.
        t = (
            t
            + (power(t, e).sum(-1, keepdim=True) - 1) / torch.where(lean == 0, 1.0, lean) * has_keys
        )
        return power(t, e), torch.zeros_like(s[..., 0])
    if weighting == "sigmoid":
        return torch.where(live, s.sigmoid(), zero), torch.zeros_like(s[..., 0])
    s = torch.where(live, s, zero)
    if weighting == "raw":
        return s, torch.zeros_like(s[..., 0])
    total = s.sum(-1, keepdim=True)
    return s / torch.where(total == 0, 1.0, total), total[..., 0]


def reference(arrays, *, scale, weighting="softmax", alpha=0.0, row_a=None, row_b=None, **mask):
    """out, lse of float64 copies; `arrays` maps NAMES to arrays."""
    inputs = {name: arrays[name].double() for name in arrays}
    value = inputs.pop("value")
    s = scores(scale=scale, **inputs)
    live = alive(s.shape, device=s.device, **mask)
    weights, lse = weigh(s, live, weighting, alpha, None if row_a is None else row_a.double())
    return weights.to(value.dtype) @ shared(value, inputs["query"]), lse


def arrays_of(
    b=2, h=2, hk=1, n=21, m=37, w=16, d=16, dtype=torch.float32, bias=False, gate=False,
    device=DEVICE, seed=0, positive=False,
):  # fmt: skip
    """Random arguments by name; with `positive`, of scores that are."""
    make = torch.Generator(device=device).manual_seed(seed)

    def normal(*shape, dtype=dtype):
        return torch.randn(shape, generator=make, device=device, dtype=torch.float32).to(dtype)

    arrays = {"query": normal(b, h, n, w), "key": normal(b, hk, m, w), "value": normal(b, hk, m, d)}
    if positive:
        arrays |= {name: arrays[name].abs() for name in ("query", "key")}
    if bias:
        arrays["key_bias"] = normal(b, hk, m, dtype=torch.float32)
        if positive:
            arrays["key_bias"] = arrays["key_bias"].abs()
    if gate:
        arrays["gate_query"] = normal(b, h, n, dtype=torch.float32)
        arrays["gate_key"] = normal(b, hk, m, dtype=torch.float32)
    return arrays


def thresholds(arrays, scale, weighting, alpha, k, mask):
    """row_a and row_b of entmax and top-k, as `attend` takes them."""
    if weighting not in ("entmax", "topk"):
        return {}
    inputs = {name: x.double() for name, x in arrays.items() if name != "value"}
    s = scores(scale=scale, **inputs)
    live = alive(s.shape, device=s.device, **mask)
    if weighting == "entmax":
        return {"row_a": entmax_threshold(s, live, alpha).float()}
    least, last = topk_threshold(s, live, k)
    return {"row_a": least.float(), "row_b": torch.full_like(least, last, dtype=torch.int32)}


def attend(query, key, value, *, scale, **named):
    """The output and the log-sum-exp of `ops.pooled`, by names."""
    from qkv.engines.triton import attend_operator
    from qkv.engines.triton.launching.kernel_call import Numbers
    from qkv.engines.triton.tile_functions.records import Arrays

    kernel_arrays = {name: named.pop(name) for name in Arrays._fields if name in named}
    numbers = Numbers(scale, **named)._replace(hashed=query.shape[1])
    return attend_operator.attend(*Arrays(query, key, value, **kernel_arrays), *numbers)[:2]


def compare(attend, arrays, *, scale=0.3, weighting="softmax", alpha=0.0, k=5, **mask):
    """Largest errors of out, lse and each gradient against the reference, relative to its size."""
    rows = thresholds(arrays, scale, weighting, alpha, k, mask)
    options = {"scale": scale, "weighting": weighting, "alpha": alpha, **rows, **mask}
    with_lse = weighting in ("softmax", "topk")
    results = []
    for side in ("got", "want"):
        inputs = {name: x.detach().clone().requires_grad_() for name, x in arrays.items()}
        if side == "got":
            out, lse = attend(**inputs, **options)
        else:
            inputs = {name: x.detach().double().requires_grad_() for name, x in inputs.items()}
            out, lse = reference(inputs, **options)
        make = torch.Generator(device=out.device).manual_seed(7)
        along = torch.randn(out.shape, generator=make, device=out.device, dtype=torch.float32)
        along = along.to(arrays["value"].dtype).to(out.dtype)
        loss = (out * along).sum()
        if with_lse:
            tilt = torch.randn(lse.shape, generator=make, device=out.device, dtype=torch.float32)
            loss = loss + (torch.where(lse > -math.inf, lse, 0.0) * tilt).sum()
        grads = torch.autograd.grad(loss, tuple(inputs.values()), allow_unused=True)
        actual = {"out": out, "lse": lse} | {
            "d_" + name: torch.zeros_like(x) if g is None else g
            for (name, x), g in zip(inputs.items(), grads, strict=True)
        }
        results.append({name: x.detach() for name, x in actual.items()})
    got, want = results
    errors = {}
    for name, x in want.items():
        ours = got[name].double()
        same = ours == x  # infinities
        if not torch.isfinite(ours[~same]).all():
            errors[name] = math.inf
            continue
        size = x[torch.isfinite(x)].abs().max().clamp(min=1e-3) if x.numel() else 1.0
        errors[name] = float((torch.where(same, 0.0, (ours - x).abs()) / size).max())
    return errors
