r"""
The dog's sentence
==================

    When he saw his owner, the dog was happy, so he wagged his tail

If "happy" is hidden, most people still guess it from "owner", "dog" and "wagged". A model that
reads the sentence must do the same: weight the other words for each word. Let each word be a query
in turn, and all words be the keys. The weights then form a square, the attention matrix. (Each pair
of a query and a key gets a *weight*. The *value* is what the key's word passes on.)

Here are the weights of a real model, all-MiniLM-L6-v2: six layers of twelve heads, trained to
recognize sentences with the same meaning.
"""

import numpy as np
from transformers.utils import logging

from qkv import plot
from qkv.database.encoders import Sentences
from qkv.transformers import capture

logging.disable_progress_bar()
sentence = "When he saw his owner, the dog was happy, so he wagged his tail"
model = Sentences().load_model()
with capture(model[0].auto_model) as seen:
    model[0].auto_model(**model.tokenizer(sentence, return_tensors="pt"))
found = seen.words(model.tokenizer, sentence)
words, alpha = found.labels, found.weights
assert alpha.shape == (6, 12, 18, 18)
assert np.allclose(alpha.sum(-1), 1, atol=1e-3)

# %%
# One head
# --------
#
# Which of the 72 heads looks most from "happy" at the words that reveal it? The last layer has one
# with half of its weight there. Most of the rest is on the marker before the sentence. Heads put
# weight there that they have no use for.

at = {word: i for i, word in enumerate(words)}
clues = [at[word] for word in ("owner", "dog", "wagged", "tail")]
clue_weight = alpha[:, :, at["happy"]][..., clues].sum(-1)
layer, head = np.unravel_index(clue_weight.argmax(), clue_weight.shape)
one = alpha[layer, head]
assert layer == 5 and clue_weight.max() > 0.5
for i in np.argsort(-one[at["happy"]])[:5]:
    print(f"happy → {words[i]:<8} {one[at['happy'], i]:.2f}")
plot.heatmaps(
    one,
    "keys",
    "queries",
    f"layer {layer}, head {head}",
    figsize=(6.2, 6.2),
    xticks=words,
    yticks=words,
)

# %%
# A row shows how one word distributes its attention, and it sums to 1. Columns have no fixed sum:
# some words are used by many others. The matrix is not symmetric either: "happy" looks at "tail"
# more than "tail" at "happy".

assert np.ptp(one.sum(0)) > 1
assert one[at["happy"], at["tail"]] > 2 * one[at["tail"], at["happy"]]

# %%
# Whose tail?
# -----------
#
# Heads specialize without supervision. One looks at the previous word. Another knows whom the
# second "his" refers to.

spots = np.arange(1, 17)  # without the markers at the ends
before = alpha[:, :, spots[1:], spots[1:] - 1].mean(-1)
assert before.max() > 0.6
first = np.unravel_index(before.argmax(), before.shape)
his = max(i for i, word in enumerate(words) if word == "his")
second = np.unravel_index(alpha[:, :, his, at["dog"]].argmax(), alpha.shape[:2])
assert alpha[(*second, his, at["dog"])] > 0.4
titles = [f"the word before ({first[0]}.{first[1]})", f"whose tail ({second[0]}.{second[1]})"]
pair = np.stack([alpha[first], alpha[second]])
plot.heatmaps(pair, "", "", titles, figsize=(4.6, 4.6), xticks=words, yticks=words)

# %%
# The same for the second of these heads, as lines from each word to the words that it looks at.

plot.alignment(pair[1], words, words, least=0.15)

# %%
# All of them
# -----------
#
# The entropy of a row is 0 if one key has all the weight, and log 18 = 2.89 if all keys have the
# same weight. Both kinds are among the 72 heads, and most values in between.

entropy = plot.data.entropy(alpha)
assert entropy.entropy.min() < 0.1 and entropy.entropy.max() > 2.5
print(
    f"from {entropy.entropy.min():.2f} to {entropy.entropy.max():.2f} of at most {np.log(18):.2f}"
)
plot.heads(alpha, title="six layers of twelve heads")

# %%
# A picture of weights does not yet explain what the model does with them. Values may be small where
# weights are large, and each layer mixes what the previous layer has already mixed.
