r"""
Longer tables
=============

*A model learned to look things up in short tables. Does it still find them in long ones?*

Attention is a look-up: a query asks a table of keys and values. Here a model learns the look-up
itself. A table has rows (symbol, value) and a query is one of its symbols. The model must answer
with that row's value. It trains on tables of 16 rows and is tested on up to 1,024.

Softmax gives every row some weight, so the other rows together weigh more in a longer table. Entmax
and sparsemax can give weights of exactly 0, and the other rows then add nothing.
"""

import torch

import qkv
from qkv.plot import style

SYMBOLS, VALUES, WIDTH, TRAINED_ROWS = 1024, 64, 32, 16


def draw_tables(count: int, rows: int, rng: torch.Generator) -> tuple[torch.Tensor, ...]:
    """Draw symbols (count, rows), all different, their values, and the rows of eight queries."""
    first = torch.randint(SYMBOLS, (count, 1), generator=rng)
    step = 2 * torch.randint(SYMBOLS // 2, (count, 1), generator=rng) + 1
    symbols = (first + step * torch.arange(rows)) % SYMBOLS
    values = torch.randint(VALUES, (count, rows), generator=rng)
    return symbols, values, torch.randint(rows, (count, 8), generator=rng)


# %%
# The model
# ---------
#
# Symbols are vectors. Two matrices make queries and keys of them, and the values are vectors too.
# The answer is the value that is most similar to what attention returns.


class LookUp(torch.nn.Module):
    def __init__(self, weighting: str) -> None:
        super().__init__()
        self.weighting = weighting
        self.symbols = torch.nn.Embedding(SYMBOLS, WIDTH)
        self.values = torch.nn.Embedding(VALUES, WIDTH)
        self.query, self.key, self.value = (
            torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3)
        )

    def encode(self, symbols: torch.Tensor, asked: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self.query(self.symbols(symbols.gather(1, asked))), self.key(self.symbols(symbols))

    def forward(
        self, symbols: torch.Tensor, values: torch.Tensor, asked: torch.Tensor
    ) -> torch.Tensor:
        query, key = self.encode(symbols, asked)
        found = qkv.attend(query, key, self.value(self.values(values)), weighting=self.weighting)
        return found @ self.values.weight.T


def train_model(weighting: str) -> LookUp:
    torch.manual_seed(0)
    rng, model = torch.Generator().manual_seed(0), LookUp(weighting)
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    for _ in range(300):
        symbols, values, asked = draw_tables(32, TRAINED_ROWS, rng)
        logits = model(symbols, values, asked)
        loss = torch.nn.functional.cross_entropy(logits.mT, values.gather(1, asked))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model


# %%
# The test
# --------
#
# Two numbers for each length: how often the answer is right, and the share of the weight on the
# right row.


@torch.no_grad()
def measure_model(model: LookUp, rows: int) -> tuple[float, float]:
    symbols, values, asked = draw_tables(64, rows, torch.Generator().manual_seed(1))
    right = model(symbols, values, asked).argmax(-1) == values.gather(1, asked)
    weights = qkv.weights(*model.encode(symbols, asked), weighting=model.weighting)
    return right.double().mean().item(), weights.gather(2, asked[..., None]).mean().item()


lengths = [16, 32, 64, 128, 256, 512, 1024]
measured = {}
for weighting in ("softmax", "entmax15", "sparsemax"):
    model = train_model(weighting)
    measured[weighting] = [measure_model(model, rows) for rows in lengths]

# %%
# All three learn the look-up. In a table of 64 times the rows, softmax puts 30 % of the weight on
# the right row and answers 92 % of the queries; entmax keeps 71 % and answers 99 %.

last = {weighting: numbers[-1] for weighting, numbers in measured.items()}
assert all(numbers[0][0] > 0.99 for numbers in measured.values())
assert last["softmax"][0] < 0.95 < last["entmax15"][0]
assert last["softmax"][1] < 0.5 < last["entmax15"][1] < last["sparsemax"][1]

colours = {"softmax": style.INK, "entmax15": style.RED, "sparsemax": style.BLUE}
figure = style.new_figure((7.2, 2.8), "constrained")
panels = figure.subplots(1, 2, sharey=True)
for at, (panel, label) in enumerate(
    zip(panels, ("right answers", "weight on the right row"), strict=True)
):
    for weighting, numbers in measured.items():
        panel.plot(
            lengths,
            [x[at] for x in numbers],
            "o-",
            color=colours[weighting],
            label=weighting,
            lw=1.6,
            ms=4,
        )
    panel.set_xscale("log", base=2)
    panel.set_xticks(lengths, [f"{rows:,}" for rows in lengths])
    panel.set_ylim(0, 1.03)
    style.style_axes(panel, "rows of the table", "", label)
panels[0].legend(frameon=False, fontsize=9, labelcolor=style.INK, loc="lower left")
figure

# %%
# This model is as small as a look-up can be. In a transformer with several layers, more counts: how
# positions are encoded, which task it is, and whether a key and its value are joined before the
# look-up. The page *Attention as associative recall* of this documentation measures it for many
# tasks and kinds of attention.
