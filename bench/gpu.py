"""On a CUDA machine: is the native engine right, and as fast as the fastest of torch's backends?

Needs torch with CUDA; run it from a plain checkout with PYTHONPATH=src.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch.nn.functional import scaled_dot_product_attention as sdpa

sys.path.insert(0, str(Path(__file__).parent))

from _side_by_side import keep

import qkv
from qkv import masks, scores

B, H, N = 4, 16, 4096


def milliseconds(function, repeats: int = 30) -> float:
    """The median by device events, warm."""
    for _ in range(5):
        function()
    found = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        function()
        end.record()
        torch.cuda.synchronize()
        found.append(start.elapsed_time(end))
    return sorted(found)[len(found) // 2]


def there_and_back(attend, tensors):
    leaves = [x.detach().requires_grad_() for x in tensors]
    out = attend(*leaves)
    out.backward(out.detach())


def timed(attend, tensors, work: str) -> float:
    if work == "forward":
        return milliseconds(lambda: attend(*tensors))
    return milliseconds(lambda: there_and_back(attend, tensors))


def speed() -> list[dict]:
    rows = []
    for width in (64, 128):
        for mask in (None, masks.causal):
            tensors = [
                torch.randn(B, H, N, width, device="cuda", dtype=torch.bfloat16) for _ in range(3)
            ]
            sides = {
                "SDPA, torch's choice": lambda *x, m=mask: sdpa(*x, is_causal=m is not None),
                "qkv": lambda *x, m=mask: qkv.attend(*x, mask=m),
            }
            for work in ("forward", "forward + backward"):
                found = {name: timed(side, tensors, work) for name, side in sides.items()}
                rows.append(
                    {
                        "work": f"dot B{B} H{H} n{N} d{width} bf16, {mask or 'no mask'}, {work}",
                        **{f"{name} ms": t for name, t in found.items()},
                        "times SDPA's": found["qkv"] / found["SDPA, torch's choice"],
                    }
                )
    return rows


def errors() -> list[dict]:
    """Relative errors against float64 on the CPU, over scores, weightings and masks."""
    torch.manual_seed(0)
    shape, rows = (2, 4, 300, 32), []
    for dtype in (torch.float32, torch.bfloat16):
        q, k, v = (torch.randn(*shape, device="cuda", dtype=dtype) for _ in range(3))
        w = [torch.randn(16, 32, device="cuda", dtype=dtype) / 6 for _ in range(2)]
        u = torch.randn(16, device="cuda", dtype=dtype)
        additive = scores.Additive(*w, u)
        wide = scores.Additive(*(x.cpu().double() for x in (*w, u)))
        for score in ("scaled_dot", "gaussian", "cosine", additive):
            for weighting in ("softmax", "entmax15", "hard", "sigmoid"):
                for mask in (None, masks.causal & masks.window(20), masks.lengths([100, 0])):
                    how = {"score": score, "weighting": weighting, "mask": mask}
                    exact = how | ({"score": wide} if score is additive else {})
                    want = qkv.attend(*(x.cpu().double() for x in (q, k, v)), **exact)
                    for engine in ("dense", "streaming"):
                        got = qkv.attend(q, k, v, **how, engine=engine).cpu().double()
                        size = float((got - want).norm() / want.norm().clamp(min=1e-30))
                        rows.append({"engine": engine, "dtype": str(dtype), "error": size})
    return [
        {
            "work": f"{engine}, {dtype}: largest relative error",
            "error": max(r["error"] for r in rows if (r["engine"], r["dtype"]) == (engine, dtype)),
        }
        for engine in ("dense", "streaming")
        for dtype in ("torch.float32", "torch.bfloat16")
    ]


def main() -> None:
    found = [{"work": torch.cuda.get_device_name(), "torch": torch.__version__}]
    keep("gpu", found + errors() + speed())


if __name__ == "__main__":
    main()
