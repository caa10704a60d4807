"""The first paper's decoder is its formula, and learns."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from qkv.errors import QkvError  # noqa: E402
from qkv.nn import BahdanauDecoder  # noqa: E402

F64 = {"dtype": torch.float64}


def test_bahdanau_is_its_formula():
    torch.manual_seed(0)
    decoder = BahdanauDecoder(vocabulary=7, embed_dim=3, hidden=4, memory_dim=5).double()
    tokens, memory = torch.tensor([[1, 2, 6], [0, 3, 3]]), torch.randn(2, 6, 5, **F64)
    mask = torch.tensor([[False] * 6, [False] * 4 + [True] * 2])
    logits, last, weights = decoder(tokens, memory, mask)
    score = decoder.score
    s = torch.tanh(decoder.start(memory[:, 0]))
    for i in range(3):
        y = decoder.embedding(tokens[:, i])
        e = torch.tanh((s @ score.w_query.T)[:, None] + memory @ score.w_key.T + score.bias)
        alpha = torch.softmax((e @ score.v).masked_fill(mask, -torch.inf), -1)
        c = (alpha[..., None] * memory).sum(1)
        s = decoder.cell(torch.cat((y, c), -1), s)
        torch.testing.assert_close(weights[:, i], alpha)
        torch.testing.assert_close(logits[:, i], decoder.head(torch.cat((s, c, y), -1)))
    torch.testing.assert_close(last, s)


def test_bahdanau_goes_on_from_a_state():
    decoder = BahdanauDecoder(7, 3, 4, 5)
    tokens, memory = torch.tensor([[1, 2, 6]]), torch.randn(1, 6, 5)
    full = decoder(tokens, memory)[0]
    first, state, _ = decoder(tokens[:, :2], memory)
    remaining = decoder(tokens[:, 2:], memory, state=state)[0]
    torch.testing.assert_close(torch.cat((first, remaining), 1), full)


def test_bahdanau_learns_to_reverse():
    torch.manual_seed(0)
    encoder = torch.nn.GRU(6, 16, batch_first=True, bidirectional=True)
    decoder = BahdanauDecoder(6, 8, 16, 32)
    source = torch.randint(1, 6, (32, 4))
    goal = source.flip(1)
    fed = torch.cat((torch.zeros(32, 1, dtype=torch.long), goal[:, :-1]), 1)
    parameters = [*encoder.parameters(), *decoder.parameters()]
    optimizer = torch.optim.Adam(parameters, 1e-2)
    for _ in range(80):
        memory = encoder(torch.nn.functional.one_hot(source, 6).float())[0]
        logits = decoder(fed, memory)[0]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), goal.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert float((logits.argmax(-1) == goal).float().mean()) > 0.9


@pytest.mark.parametrize(
    "call, match",
    [
        (lambda: BahdanauDecoder(5, 2, 0, 2), "hidden"),
        (
            lambda: BahdanauDecoder(5, 2, 2, 2)(torch.zeros(1, 3).long(), torch.zeros(2, 2)),
            "memory",
        ),
        (
            lambda: BahdanauDecoder(5, 2, 2, 2)(
                torch.zeros(1, 3).long(), torch.zeros(1, 4, 2), torch.zeros(1, 3).bool()
            ),
            "mask",
        ),
    ],
)
def test_what_is_wrong_is_refused(call, match):
    with pytest.raises(QkvError, match=match):
        call()
