r"""
Many heads, and what follows them
=================================

One attention looks for one thing. Several of them side by side, each with its own matrices, look
for several things in the same words:

.. math:: S^{(i)} = \mathrm{Attention}(X W_Q^{(i)}, X W_K^{(i)}, X W_V^{(i)}),
          \qquad \mathrm{MultiHead}(X) = [S^{(1)} \cdots S^{(h)}]\, W_O

Each is a *head*. Their outputs are concatenated and mixed by one more matrix, :math:`W_O`, which
some texts leave out. Then comes a feed-forward network, for each word by itself.
"""

import math

import numpy as np
import torch

import qkv
from qkv import plot

# %%
# Heads that see near and far
# ---------------------------
#
# Why use several heads? Take 32 words of which only the positions are known. Each is a point that
# moves on circles at different speeds. A matrix that turns all circles back by one position makes a
# head that looks at the previous word. A longer or shorter key makes a head that looks near or far.

n, circles = 32, 12
speed = 1 / 30 ** (np.arange(circles) / circles)
angle = np.arange(n)[:, None] * speed
X = np.concatenate([np.cos(angle), np.sin(angle)], 1)  # (32, 24)


def turned(steps: int) -> np.ndarray:
    """W such that x W is the position `steps` away: it turns each circle by that much."""
    c, s = np.diag(np.cos(steps * speed)), np.diag(np.sin(steps * speed))
    return np.block([[c, s], [-s, c]])


assert np.allclose(X[:-3] @ turned(3), X[3:])
heads = {
    "the word before": 40 * turned(-1),
    "three words on": 40 * turned(3),
    "the neighbours": 2 * turned(0),
    "the whole text": 0.2 * turned(0),
}
alpha = np.stack([qkv.weights(X @ w_q, X) for w_q in heads.values()])
places = np.arange(n)
assert (alpha[0].argmax(1)[1:] == places[1:] - 1).all()
assert (alpha[1].argmax(1)[:-3] == places[:-3] + 3).all()
reach = (alpha * np.abs(places[:, None] - places)).sum(-1).mean(-1)
assert reach[0] < reach[2] < reach[3]
plot.heatmaps(alpha, "keys: places", "queries: places", list(heads), figsize=(2.6, 2.6))

# %%
# One softmax could not do two of these at once: its single row of weights would have to be the mean
# of both. With two heads, :math:`W_O` gets both answers unmixed.
#
# A layer of heads, by hand
# -------------------------
#
# h heads of width d/h cost as much as one head of width d. Here the parts of torch's own layer are
# taken out and combined again by the formula above.

torch.manual_seed(0)
d, h, n = 16, 4, 10
layer = torch.nn.MultiheadAttention(d, h, batch_first=True)
x = torch.randn(1, n, d)
w_q, w_k, w_v = layer.in_proj_weight.chunk(3)
S = [
    qkv.attend(x @ q.T, x @ k.T, x @ v.T)
    for q, k, v in zip(w_q.chunk(h), w_k.chunk(h), w_v.chunk(h), strict=True)
]
assert len(S) == h and S[0].shape == (1, n, d // h)
by_hand = torch.cat(S, -1) @ layer.out_proj.weight.T
assert torch.allclose(by_hand, layer(x, x, x)[0], atol=1e-6)

ours = qkv.nn.MultiHeadAttention(d, h, batch_first=True)
ours.load_state_dict(layer.state_dict())
assert torch.allclose(ours(x, x, x)[0], by_hand, atol=1e-6)

# %%
# The feed-forward network
# ------------------------
#
# Attention only *averages* values: its output is linear in V. The result needs further processing.
# Two matrices with a nonlinearity between them do this, the same for each word:
#
# .. math:: \mathrm{FFN}(x) = W_2\, \max(0, W_1 x + b_1) + b_2
#
# It does not look at other words. If you pass the words one at a time, nothing changes.

network = qkv.nn.FeedForward(d, hidden=64)
one_at_a_time = torch.stack([network(x[0, i]) for i in range(n)])
assert torch.allclose(network(x)[0], one_at_a_time, atol=1e-6)

# %%
# It can also be read as attention. W₁ holds 64 keys, W₂ their 64 values, and the weights are
# relu(q·k + b), which have no fixed sum. What the network has learned is a database.

query = x[0]
weights = torch.relu(query @ network.linear1.weight.T + network.linear1.bias)
assert weights.shape == (n, 64)
memory = weights @ network.linear2.weight.T + network.linear2.bias
assert torch.allclose(memory, network(query), atol=1e-6)

# %%
# A block
# -------
#
# Both parts are followed by a sum with their input, so that a word is changed and not replaced, and
# by a norm. This is the block that transformers stack.

block = qkv.nn.TransformerBlock(d, h, dim_feedforward=64, dropout=0.0)
y = block.norm1(x + block.self_attn(x, x, x)[0])
z = block.norm2(y + block.linear2(torch.relu(block.linear1(y))))
assert torch.allclose(block(x), z, atol=1e-5)
print(qkv.nn.describe(block, length=n))

# %%
# Untrained heads look at nothing in particular. The previous page shows what 72 trained heads look
# at.

drawn = ours(x, x, x, average_attn_weights=False)[1][0].detach()
assert drawn.shape == (h, n, n)
spread = -(drawn * drawn.log()).sum(-1).mean()
assert spread > 0.9 * math.log(n)
