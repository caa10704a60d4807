r"""
Exercise 4: squeeze and excitation
==================================

*Describe the gate of Squeeze-and-Excitation networks as attention.*

The network reads a picture x of C channels and reduces each channel to its mean. It passes the C
means through two small layers, and multiplies each channel by a number between 0 and 1:

.. math:: z_c = \mathrm{mean}(x_c), \qquad
          \alpha = \sigma\left(W_2\, \mathrm{relu}(W_1 z)\right), \qquad
          \tilde x_c = \alpha_c\, x_c

As attention: squeezing is **average pooling**, with all weights 1/m. The **query** is
:math:`q = \mathrm{relu}(W_1 z)`, one per picture. The **key** of channel c is row c of :math:`W_2`,
and its **value** is the channel itself. The score is a dot product, and the **weighting** is a
sigmoid.
"""

import numpy as np
import torch

import qkv
from qkv import plot
from qkv.plot import style

torch.manual_seed(0)
layer = qkv.nn.SqueezeExcitation(8, reduction=2)
x = torch.randn(5, 8, 6, 6)

# %%
# Piece by piece
# --------------

places = x.flatten(2).mT  # (5, 36, 8): 36 places, each a row
z = qkv.attend(places[:, :1], places, places, score="constant", weighting="average")
assert torch.allclose(z[:, 0], x.mean((2, 3)), atol=1e-6)
query = torch.relu(layer.fc1(z))
alpha = qkv.weights(query, layer.fc2.weight, score="dot", weighting="sigmoid", mask=layer.fc2.bias)[
    :, 0
]
by_formula = torch.sigmoid(layer.fc2(torch.relu(layer.fc1(x.mean((2, 3))))))
assert torch.allclose(alpha, by_formula, atol=1e-6)
assert torch.allclose(layer(x), x * alpha[:, :, None, None], atol=1e-6)

# %%
# There are two differences. Channels do not compete: a sigmoid can open all gates at once, or none,
# while softmax must share. And there is no final sum: each weighted channel is kept for the next
# layer. With that sum, it would be the attention of the first pages:

assert not torch.allclose(alpha.sum(1), torch.ones(5))
pooled = qkv.attend(
    query,
    layer.fc2.weight,
    x.flatten(2),
    score="dot",
    weighting="sigmoid",
    mask=layer.fc2.bias,
)[:, 0]
assert torch.allclose(pooled, layer(x).sum(1).flatten(1), atol=1e-5)

# %%
# Training
# --------
#
# There are four channels. Three are pictures. The fourth is a plain shade that says which of the
# three is not noise. That one is the target. No fixed mixture of channels can produce it, but a
# gate that reads the shade can.

rng = torch.Generator().manual_seed(1)
grid = torch.linspace(-1, 1, 12)
disc = ((grid[:, None] ** 2 + grid**2) < 0.5).float()


def scenes(count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Pictures (count, 4, 12, 12), the target (count, 12, 12), and which channel holds it."""
    which = torch.arange(count) % 3
    x = torch.randn(count, 4, 12, 12, generator=rng) * 0.7
    x[torch.arange(count), which] = disc
    x[:, 3] = (which.float() - 1)[:, None, None]
    return x, disc.expand(count, 12, 12), which


gate = qkv.nn.SqueezeExcitation(4, reduction=1)
fixed = torch.nn.Parameter(torch.zeros(4))
descent = torch.optim.Adam([*gate.parameters(), fixed], lr=0.03)
for _ in range(200):
    x, target, _ = scenes(96)
    gated = (gate(x)[:, :3].sum(1) - target).square().mean()
    plain = ((fixed.sigmoid()[:, None, None] * x)[:, :3].sum(1) - target).square().mean()
    descent.zero_grad()
    (gated + plain).backward()
    descent.step()
print(f"error with the gate {gated.item():.3f}, with fixed weights {plain.item():.3f}")
assert gated.item() < 0.25 * plain.item()

# %%
# The gate for nine scenes: it opens the channel that the shade names.

x, target, which = scenes(9)
alpha = gate.gate(x).detach()
assert (alpha[:, :3].argmax(1) == which).all()
plot.heatmaps(
    alpha[:, :3],
    "channels",
    "scenes",
    "gates",
    figsize=(2.7, 4.0),
    xticks=["0", "1", "2"],
    yticks=[f"shade {shade - 1}".replace("-", "−") for shade in which.tolist()],
    annotate=True,
)

# %%
# One scene: three channels, their sum with fixed weights, and the result of the gate.

with torch.no_grad():
    mixed = (fixed.sigmoid()[:, None, None] * x)[:, :3].sum(1)
    seen = [*x[1, :3], mixed[1], gate(x)[1, :3].sum(0)]
figure = style.new_figure((9.2, 2.1), "constrained")
names = ["channel 0", "channel 1", "channel 2", "fixed weights", "through the gate"]
for panel, picture, name in zip(figure.subplots(1, 5), seen, names, strict=True):
    panel.imshow(np.asarray(picture), cmap="Greys", vmin=-1, vmax=1.5)
    panel.set_title(name, fontsize=9, color=style.INK)
    panel.set(xticks=[], yticks=[])
    panel.spines[:].set(linewidth=0.5, color=style.FRAME)
figure
