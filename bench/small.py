"""What does a small call cost against the plain formula or the framework's own? CPU, f32.

python -m bench.small [numpy torch scores heads generate padding training jax database]

A ratio compares minimum times. Sides take turns in short bursts, because noise only adds time.
"""

from __future__ import annotations

import statistics
import sys
import time
from functools import partial

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention as sdpa

import qkv
from bench._formulas import Formula, additive, dot, entmax15, gaussian, there_and_back
from bench._results import show, show_goals
from bench._side_by_side import SMALL, peer, save_results
from qkv import masks, nn, scores

SECONDS = 0.05 if SMALL else 4.0
"""How long the turns of one row go on."""
BURST = 1e-3
"""How long one side runs in its turn, at least."""
ROUNDS = 2 if SMALL else 9


def take_turns(sides, given=()):
    """Return milliseconds of one call of each side: median and minimum."""

    def burst(side, count):
        begin = time.perf_counter()
        for _ in range(count):
            side(*given)
        return (time.perf_counter() - begin) / count

    counts = {}
    for name, side in sides.items():
        # The first calls compile, choose and import; the later ones are what is asked about.
        once = min(burst(side, 1) for _ in range(4))
        counts[name] = max(1, min(200, round(BURST / once)))
    found = {name: [] for name in sides}
    begin = time.perf_counter()
    while len(found["qkv"]) < ROUNDS or time.perf_counter() - begin < SECONDS:
        for name, side in sides.items():
            found[name].append(1e3 * burst(side, counts[name]))
    return {name: {"ms": statistics.median(x), "least": min(x)} for name, x in found.items()}


def compare_times(work, most, sides, given=()):
    """Return the row; the goal is at most `most` times the time of the first other side."""
    row = {"work": work, "sides": take_turns(sides, given), "goals": []}
    other = next(name for name in sides if name != "qkv")
    ratio = row["sides"]["qkv"]["least"] / row["sides"][other]["least"]
    return judged(row, f"≤ {most:g}× {other}", ratio, ratio <= most)


def judged(row, goal, found, met):
    row["goals"].append({"goal": goal, "found": found, "met": met})
    show(row)
    return row


def both_ways(work, most, ours, theirs, name, given):
    """Run forward, and with the gradients of all of `given`."""
    *inputs, _ = given
    yield compare_times(f"{work}, forward", most, {"qkv": ours, name: theirs}, inputs)
    back = {"qkv": there_and_back(ours), name: there_and_back(theirs)}
    yield compare_times(f"{work}, forward + backward", most, back, given)


def plain(q, k, v):
    s = q @ k.T / np.float32(np.sqrt(q.shape[-1]))
    e = np.exp(s - s.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True) @ v


def numpy_rows():
    given = np.random.default_rng(0).normal(size=(3, 8, 16)).astype("float32")
    yield compare_times("NumPy (8, 16)", 1.5, {"qkv": qkv.attend, "plain formula": plain}, given)


def torch_rows():
    given = torch.randn(4, 1, 8, 16, 64)
    yield from both_ways("dot (1, 8, 16, 64)", 1.2, qkv.attend, sdpa, "SDPA", given)
    ours, theirs = partial(qkv.attend, mask=masks.causal), partial(sdpa, is_causal=True)
    yield from both_ways("causal (1, 8, 16, 64)", 1.2, ours, theirs, "SDPA", given)


def score_rows():
    given = torch.randn(4, 1, 8, 16, 64)
    for name, ours, formula in (
        ("gaussian", partial(qkv.attend, score=scores.Gaussian(8.0)), Formula(gaussian(8.0))),
        ("entmax15", partial(qkv.attend, weighting="entmax15"), Formula(dot, entmax15)),
    ):
        work = f"{name} (1, 8, 16, 64)"
        yield from both_ways(work, 1.5, ours, formula, "plain formula", given)

    def ours(q, k, v, *parameters):
        return qkv.attend(q, k, v, score=scores.Additive(*parameters))

    *inputs, g = given
    parameters = torch.randn(32, 64) / 8, torch.randn(32, 64) / 8, torch.randn(32)
    work, given = "additive (1, 8, 16, 64), 32 units", (*inputs, *parameters, g)
    yield from both_ways(work, 1.5, ours, Formula(additive), "plain formula", given)


def pair(ours, theirs, training, *sizes, **options):
    """Return qkv's layer and torch's, with the same parameters."""
    layers = {"qkv": ours(*sizes, **options), "torch": theirs(*sizes, batch_first=True, **options)}
    layers["qkv"].load_state_dict(layers["torch"].state_dict())
    return {name: layer.train(training) for name, layer in layers.items()}


def layer_sides(layers, call, back):
    """Return calls of both layers, without gradients or with those of input and parameters."""

    def forward(layer, x):
        with torch.no_grad():
            call(layer, x)

    def both(layer, x):
        out = call(layer, x.requires_grad_())
        out = out if isinstance(out, tuple) else (out,)
        loss = sum(part.sum() for part in out if part is not None)
        torch.autograd.grad(loss, [x, *layer.parameters()])

    return {name: partial(both if back else forward, layer) for name, layer in layers.items()}


Heads = partial(nn.MultiHeadAttention, batch_first=True)


def heads_rows():
    x, hidden = torch.randn(1, 16, 512), torch.rand(16, 16) < 0.3
    hidden.fill_diagonal_(False)
    for training in False, True:
        layers = pair(Heads, torch.nn.MultiheadAttention, training, 512, 8)
        for label, rest in ("", {"need_weights": False}), (", with weights", {}):

            def call(layer, x, rest=rest):
                return layer(x, x, x, attn_mask=hidden, **rest)

            work = f"heads d512 h8 n16, a boolean mask, {'training' if training else 'eval'}{label}"
            yield compare_times(work, 1.0, layer_sides(layers, call, training), (x,))


def generate_rows():
    if peer("transformers") is None:
        return
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.utils import logging

    import qkv.transformers

    logging.set_verbosity_error()
    config = LlamaConfig(
        vocab_size=1000,
        hidden_size=256,
        intermediate_size=688,
        num_hidden_layers=6,
        num_attention_heads=4,
        eos_token_id=None,
        pad_token_id=0,
    )
    qkv.transformers.register()
    model, prompt = LlamaForCausalLM(config).eval(), torch.randint(1, 1000, (1, 16))
    tokens = 8 if SMALL else 128
    for cache in "dynamic", "static":

        def run(name, cache=cache):
            model.set_attn_implementation(name)
            options = {"cache_implementation": "static"} if cache == "static" else {}
            # Compiling a static cache is another question, and the same graph for both.
            model.generate(
                prompt, max_new_tokens=tokens, do_sample=False, disable_compile=True, **options
            )

        sides = {name: partial(run, name) for name in ("qkv", "sdpa")}
        row = {"work": f"generate, 6-layer Llama d256, {cache} cache", "goals": []}
        row["sides"] = take_turns(sides)
        for side in row["sides"].values():
            side["tokens/s"] = 1e3 * tokens / side["least"]
        rate = row["sides"]["qkv"]["tokens/s"] / row["sides"]["sdpa"]["tokens/s"]
        yield judged(row, "≥ 0.95× the tokens/s of sdpa", rate, rate >= 0.95)


def padding_rows():
    given, valid = torch.randn(4, 32, 8, 128, 64), torch.randint(32, 129, (32,))
    seen = torch.arange(128) < valid[:, None, None, None]
    theirs = partial(sdpa, attn_mask=seen)
    for label, mask in ("an array", seen), ("lengths", masks.lengths(valid)):
        work, ours = f"padding as {label}, (32, 8, 128, 64)", partial(qkv.attend, mask=mask)
        yield from both_ways(work, 1.05, ours, theirs, "SDPA", given)


def training_rows():
    x, valid = torch.randn(16, 128, 256), torch.randint(32, 129, (16,))
    hidden = torch.arange(128) >= valid[:, None]

    def heads(layer, x, padding):
        return layer(x, x, x, padding, need_weights=False)

    def block(layer, x, padding):
        if isinstance(layer, nn.TransformerBlock):
            return layer(x, key_padding_mask=padding)
        return layer(x, src_key_padding_mask=padding)

    for dropout in 0.1, 0.0:
        kinds = {
            "heads": (heads, pair(Heads, torch.nn.MultiheadAttention, True, 256, 8, dropout)),
            "block": (
                block,
                pair(
                    nn.TransformerBlock,
                    torch.nn.TransformerEncoderLayer,
                    True,
                    256,
                    8,
                    1024,
                    dropout,
                    norm_first=True,
                ),
            ),
        }
        for kind, (call, layers) in kinds.items():
            for label, padding in ("plain", None), ("padded", hidden):
                sides = layer_sides(layers, partial(call, padding=padding), True)
                work = f"{kind} B16 n128 d256 h8 in training, dropout {dropout}, {label}"
                yield compare_times(work, 1.0, sides, (x,))


def jax_rows():
    jax = peer("jax")
    if jax is None:
        return
    n = 64 if SMALL else 1024
    keys = jax.random.split(jax.random.key(0), 3)
    given = [jax.random.normal(key, (1, 8, n, 64)) for key in keys]
    # jax.nn has the heads after the positions.
    swapped = [x.swapaxes(1, 2) for x in given]
    jitted = jax.jit(qkv.attend)
    theirs = jax.jit(jax.nn.dot_product_attention)
    sides = {
        "qkv": lambda: qkv.attend(*given).block_until_ready(),
        "under jit": lambda: jitted(*given).block_until_ready(),
        "jax.nn under jit": lambda: theirs(*swapped).block_until_ready(),
    }
    yield compare_times(f"JAX outside jit, (1, 8, {n}, 64)", 1.3, sides)


def database_rows():
    key, value = np.random.default_rng(0).normal(size=(2, 4, 16)).astype("float32")
    names = {"Zhang": "Aston", "Lipton": "Zachary", "Li": "Mu", "Smola": "Alex"}
    database, vectors = qkv.Database(names), qkv.Database(key, value[:, 0])
    numbers = qkv.Database({1.0: 2.0, 2.0: 3.0, 3.0: 5.0, 4.0: 1.0})
    formula = partial(plain, key[:1], key, value[:, :1])
    for work, call in (
        ("D.ask on four rows", partial(database.ask, "Lee")),
        ("D.ask on four rows of vectors", partial(vectors.ask, key[0])),
        ("D.ask on four rows of numbers", partial(numbers.ask, 2.5)),
        ("D.attend on four rows of vectors", partial(vectors.attend, key[0])),
    ):
        yield compare_times(work, 12, {"qkv": call, "plain formula": formula})
    row = {"work": "D[key] on four rows", "goals": []}
    row["sides"] = take_turns({"qkv": partial(database.__getitem__, "Li")})
    micro = 1e3 * row["sides"]["qkv"]["least"]
    yield judged(row, "≤ 10 µs", micro, micro <= 10)


GROUPS = {
    "numpy": numpy_rows,
    "torch": torch_rows,
    "scores": score_rows,
    "heads": heads_rows,
    "generate": generate_rows,
    "padding": padding_rows,
    "training": training_rows,
    "jax": jax_rows,
    "database": database_rows,
}


def rows(names=()):
    for name in names or GROUPS:
        torch.manual_seed(0)
        yield from GROUPS[name]()


if __name__ == "__main__":
    chosen = [name for name in sys.argv[1:] if not name.startswith("-")]
    if unknown := set(chosen) - set(GROUPS):
        sys.exit(f"no group {', '.join(sorted(unknown))}; there are {', '.join(GROUPS)}")
    show_goals(save_results("small", rows(chosen), replace=not chosen))
