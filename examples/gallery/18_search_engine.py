r"""
Exercise 3: a differentiable search engine
==========================================

*Design a search engine with attention that can be trained end to end.*

1. An **encoder** turns each document into a vector, the key, and the typed text into the query.
2. A **score** with a learned matrix compares them: :math:`s_i = q^\top W k_i`.
3. **Softmax** over all documents turns the scores into probabilities.
4. The **loss** is :math:`-\log \alpha(q, k_{\text{clicked}})` for the document that was clicked.
5. Its **gradient** flows back through steps 3, 2 and, optionally, 1. For a reader, the results are
   sorted by weight. For a model, :math:`\sum_i \alpha_i v_i` is the answer, and *its* gradient
   flows back too.

A sorted list of ten has no derivative. The weights have one. That is the whole difference.
"""

import random
from pathlib import Path

import torch

import qkv
from qkv import plot, scores
from qkv.database.encoders import Words
from qkv.plot import style

figure = style.new_figure((8.4, 2.0), "constrained")
panel = figure.subplots()
boxes = {
    "typed text": (0, 1.4),
    "documents": (0, 0),
    "encoder": (2.2, 0.7),
    "score qᵀWk": (4.4, 0.7),
    "softmax α": (6.6, 0.7),
    "−log α(clicked)": (8.8, 1.4),
    "Σ α v": (8.8, 0),
}
for name, (x, y) in boxes.items():
    learned = name in ("encoder", "score qᵀWk")
    look = {"boxstyle": "round,pad=0.5", "fc": "#fddbc7" if learned else "#f3f3f3", "ec": style.INK}
    panel.text(x, y, name, ha="center", va="center", fontsize=9, bbox=look | {"lw": 0.8})
links = [(0, 2), (1, 2), (2, 3), (3, 4), (4, 5), (4, 6)]
spots = [*boxes.values()]
for a, b in links:
    arrow = {"arrowstyle": "<->", "color": style.INK, "lw": 1, "shrinkA": 34, "shrinkB": 34}
    panel.annotate("", spots[b], spots[a], arrowprops=arrow)
panel.set(xlim=(-0.9, 9.9), ylim=(-0.6, 2.0))
panel.axis("off")
figure

# %%
# Arrows point both ways: numbers go to the right, gradients to the left. Red parts are learned.
#
# Implementation
# --------------
#
# The documents are 300 books, known only by their *titles*. People type a few words about the
# content of a book, and the title says little about that. The engine learns it from clicks. A query
# is four words drawn from a summary: eight queries per book for training, and one more for the
# test.

here = Path(globals().get("__file__", "18_search_engine.py"))  # a notebook has no __file__
data = here.resolve().parents[1] / "data" / "books.csv"
books = list(qkv.Database.from_source(data, key="title", value="summary").rows())
draw = random.Random(0)


def queries(times: int) -> list[str]:
    """`times` queries per book: one for each book, then one for each book again."""
    texts = [[word.strip(".,;:") for word in book["summary"].split()] for book in books]
    long = [sorted({word for word in text if len(word) > 3}) for text in texts]
    return [" ".join(draw.sample(words, min(4, len(words)))) for words in long * times]


encode = Words().encode
key = torch.tensor(encode([book["title"] for book in books]))
train, clicked = torch.tensor(encode(queries(8))), torch.arange(300).repeat(8)
test = torch.tensor(encode(queries(1)))


def measure(score: scores.Score) -> tuple[float, float]:
    """How often the right book is first, and among ten."""
    alpha = qkv.weights(test, key, score=score)
    rank = (alpha > alpha.diagonal()[:, None]).sum(1)
    return float((rank == 0).float().mean()), float((rank < 10).float().mean())


# %%
# Before training, W is the identity: a plain cosine of word vectors. Then follow sixty gradient
# steps.

W = torch.eye(256).mul(20.0).requires_grad_()
before = measure(scores.Multiplicative(W.detach()))
descent = torch.optim.Adam([W], lr=0.1)
losses = []
for _ in range(60):
    alpha = qkv.weights(train, key, score=scores.Multiplicative(W))
    loss = -alpha[torch.arange(len(clicked)), clicked].log().mean()
    descent.zero_grad()
    loss.backward()
    descent.step()
    losses.append(loss.item())
after = measure(scores.Multiplicative(W.detach()))
print(f"first {before[0]:.0%} → {after[0]:.0%}, among ten {before[1]:.0%} → {after[1]:.0%}")
assert before[0] < 0.1 and after[0] > 0.75 and after[1] > 0.9

figure = style.new_figure((8.0, 2.6), "constrained")
left, right = figure.subplots(1, 2)
left.plot(losses, color=style.RED, lw=1.8)
style.style_axes(left, "step", "−log α(clicked)", "training")
left.set_ylim(0)
for x, (was, now) in enumerate(zip(before, after, strict=True)):
    right.bar(x - 0.18, was, 0.34, color=style.FRAME)
    right.bar(x + 0.18, now, 0.34, color=style.RED)
    for dx, share in ((-0.18, was), (0.18, now)):
        right.text(x + dx, share + 0.02, f"{share:.0%}", ha="center", fontsize=9, color=style.INK)
style.style_axes(right, "", "share of 300 test queries", "grey before, red after")
right.set_xticks([0, 1], ["first", "among ten"])
right.set_ylim(0, 1)
figure

# %%
# A new query, in words that the title does not contain.

text = "a captain hunts a whale"
alpha = qkv.weights(torch.tensor(encode([text])), key, score=scores.Multiplicative(W.detach()))[0]
best = alpha.argsort(descending=True)[:6]
assert books[best[0]]["title"] == "Moby-Dick"
plot.bars([books[i]["title"] for i in best], alpha[best].tolist(), title=text, others=294)

# %%
# The library does this in one call, ``D.learn(pairs)``, for pairs of a query and the right key. It
# also learns tokens, word weights and the temperature. The example ``reverse_dictionary.py`` uses
# it to find words by their definitions.
