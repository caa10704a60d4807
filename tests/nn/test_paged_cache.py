"""A paged cache beside attention over each sequence's own rows."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

import qkv
from qkv import nn, scores
from qkv.errors import ArgumentError, QkvError, ShapeError

HEADS, SHARED, D = 4, 2, 8


class Both:
    """A paged cache, and the rows of each sequence as one tensor."""

    def __init__(self, **options):
        self.make = torch.Generator().manual_seed(0)
        self.paged, self.rows = nn.PagedCache(block=4, pages=2, **options), {}

    def normal(self, *shape):
        return torch.randn(*shape, generator=self.make)

    def add(self):
        sequence = self.paged.add_sequence()
        self.rows[sequence] = self.normal(2, SHARED, 0, D)
        return sequence

    def fork(self, sequence):
        other = self.paged.fork_sequence(sequence)
        self.rows[other] = self.rows[sequence]
        return other

    def append(self, sequences, n):
        key, value = self.normal(2, len(sequences), SHARED, n, D)
        self.paged.append_rows(sequences, key, value)
        for x, *new in zip(sequences, key, value, strict=True):
            self.rows[x] = torch.cat((self.rows[x], torch.stack(new)), -2)

    def check(self, sequences, n=1, atol=1e-5, **options):
        query = self.normal(len(sequences), HEADS, n, D)
        out = self.paged.attend(query, sequences, **options)
        for x, q, got in zip(sequences, query, out, strict=True):
            key, value = self.rows[x]
            mask = qkv.masks.causal("bottom_right")
            want = qkv.attend(q, key, value, mask=mask, engine="dense", **options)
            torch.testing.assert_close(got, want, atol=atol, rtol=0)


def test_sequences_of_many_lengths():
    both = Both()
    a, b, c = (both.add() for _ in range(3))
    for sequences, n in (([a, b], 3), ([c], 9), ([b], 5), ([a, b, c], 1), ([a, c], 4)):
        both.append(sequences, n)
    assert both.paged.lengths == {a: 8, b: 9, c: 14} and both.paged.used_pages == 2 + 3 + 4
    for sequences in ([a, b, c], [c, a], [b]):
        both.check(sequences)
        both.check(sequences, n=3)
    both.check([a, c], 2, weighting="entmax15", score=scores.Gaussian(2.0))
    query = both.normal(1, HEADS, 1, D)
    key, value = both.rows[b]
    want = scaled_dot_product_attention(query, key[None], value[None], enable_gqa=True)
    torch.testing.assert_close(both.paged.attend(query, [b]), want)


def test_a_shared_page_is_copied_when_a_sequence_writes():
    both = Both()
    a = both.add()
    both.append([a], 10)
    b, c = both.fork(a), both.fork(a)
    assert both.paged.used_pages == 3
    both.append([b], 1)  # copies the last page, which holds two rows
    assert both.paged.used_pages == 4
    both.append([a], 5)
    both.append([b, c], 3)
    both.check([a, b, c])
    assert both.paged.tables[a][:2] == both.paged.tables[b][:2] == both.paged.tables[c][:2]
    both.paged.remove_sequence(a)
    both.check([b, c])
    both.append([c], 20)  # reuses freed pages
    both.check([b, c], 3)


def test_a_full_last_page_is_shared_without_a_copy():
    both = Both()
    a = both.add()
    both.append([a], 8)
    b = both.fork(a)
    both.append([b], 1)
    assert both.paged.used_pages == 3
    both.check([a, b])


def test_beams_are_selected():
    both = Both()
    beams = [both.add() for _ in range(3)]
    both.append(beams, 6)
    kept = both.paged.select_sequences([beams[2], beams[2], beams[0]])
    both.rows = {x: both.rows[beams[i]] for x, i in zip(kept, (2, 2, 0), strict=True)}
    both.append(kept, 1)
    both.check(kept)
    # One full page of each of the two beams, and three last pages.
    assert both.paged.used_pages == 2 + 3


@pytest.mark.parametrize("has_sinks", [False, True])
def test_the_same_as_the_paged_attention_of_transformers(has_sinks):
    eager_paged = pytest.importorskip("transformers.integrations.eager_paged")
    both = Both()
    sequences = [both.add() for _ in range(3)]
    for sequence, n in zip(sequences, (3, 9, 6), strict=True):
        both.append([sequence], n)
    query = both.normal(3, HEADS, 1, D)
    owner = torch.repeat_interleave(torch.arange(3), torch.tensor([3, 9, 6]))
    bias = torch.zeros(1, 1, 3, 18).masked_fill(owner != torch.arange(3)[:, None], -torch.inf)

    class PackedCache:  # transformers has the rows of all sequences in one row of the batch
        def update(self, **_):
            rows = torch.cat([both.rows[x] for x in sequences], -2)
            return rows[0][None], rows[1][None]

    module = torch.nn.Module()
    module.layer_idx, module.num_key_value_groups = 0, HEADS // SHARED
    options = {}
    if has_sinks:
        module.sinks = both.normal(HEADS)
        options["weighting"] = qkv.weightings.Softmax(sink=module.sinks)
    theirs, _ = eager_paged.eager_paged_attention_forward(
        module, query.transpose(0, 2), None, None, bias, D**-0.5, cache=PackedCache()
    )
    ours = both.paged.attend(query, sequences, **options)
    torch.testing.assert_close(ours.permute(2, 0, 1, 3), theirs)


def test_int8_pages():
    both = Both(int8=True)
    a, b = both.add(), both.add()
    both.append([a, b], 7)
    both.append([b], 2)
    both.check([a, b], atol=0.02)
    key = both.paged.gather_rows([b])[0]
    wanted = both.rows[b][0]
    assert (key[0] - wanted).abs().max() <= wanted.abs().max() / 254 + 1e-6
    assert both.paged.buffers[0].dtype == torch.int8


def test_float8_pages():
    both = Both(float8=True)
    a, b = both.add(), both.add()
    both.append([a, b], 7)
    both.append([b], 2)
    both.check([a, b], atol=0.1)
    fork = both.paged.fork_sequence(b)
    key = both.paged.gather_rows([fork])[0]
    wanted = both.rows[b][0]
    assert ((key[0] - wanted).abs() <= wanted.abs() / 16 + wanted.abs().max() * 2e-5).all()
    assert both.paged.buffers[0].element_size() == 1
    with pytest.raises(ArgumentError, match="exclude each other"):
        nn.PagedCache(int8=True, float8=True)


@pytest.mark.parametrize(
    "layer",
    [
        nn.MultiHeadAttention(16, 4, batch_first=True, num_kv_heads=2, rotary=True),
        nn.DifferentialAttention(16, 2),
        nn.LatentAttention(16, 2, kv_rank=8, head_dim=4, rotary_dim=4),
    ],
    ids=lambda layer: type(layer).__name__,
)
def test_layers_take_it_in_place_of_a_cache(layer):
    x = torch.randn(2, 9, 16, generator=torch.Generator().manual_seed(0))

    def decode(cache):
        parts = x.split((5, 1, 1, 2), 1)
        if isinstance(layer, nn.MultiHeadAttention):
            return [layer(y, y, y, is_causal=True, cache=cache)[0] for y in parts]
        return [layer(y, is_causal=True, cache=cache) for y in parts]

    with torch.no_grad():
        torch.testing.assert_close(decode(nn.PagedCache(4)), decode(nn.Cache()))
    with torch.inference_mode():
        decode(cache := nn.PagedCache(4))
    assert len(cache) == 9 and "18 rows of 2 sequences in 6 pages of 4" in repr(cache)


def test_a_pool_made_in_inference_mode_is_written_later():
    both = Both()
    with torch.inference_mode():
        a = both.add()
        both.append([a], 3)
    for n in (1, 3):
        both.append([a], n)
        both.check([a])


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (lambda x: x.paged.fork_sequence(7), ArgumentError, "no sequence 7"),
        (lambda x: x.append([0, 0], 1), ArgumentError, "occurs twice"),
        (
            lambda x: x.paged.append_rows([0], *torch.ones(2, 1, 3, 1, D)),
            ShapeError,
            "heads, width",
        ),
        (
            lambda x: x.paged.append_rows([0], *torch.ones(2, 2, 2, 1, D)),
            ShapeError,
            "one for each",
        ),
        (
            lambda x: x.paged.append_rows([0], *torch.ones(2, 1, 2, 1, D, requires_grad=True)),
            ArgumentError,
            "no gradients",
        ),
        (
            lambda x: x.paged.append(torch.nn.Identity(), *torch.ones(2, 2, 2, 1, D)),
            ArgumentError,
            "equal lengths",
        ),
        (lambda x: nn.PagedCache(0), QkvError, "block"),
        (lambda x: nn.PagedCache().gather_rows([]), ArgumentError, "no rows"),
    ],
)
def test_what_is_refused(call, error, match):
    both = Both()
    a, _ = both.add(), both.add()
    both.append([a], 2)
    with pytest.raises(error, match=match):
        call(both)


def test_without_a_kernel_the_pages_are_gathered(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    both = Both()
    sequence = both.add()
    both.append([sequence], 5)
    explained = both.paged.explain(both.normal(1, HEADS, 1, D), [sequence])
    assert explained == "the pages are gathered: only kernels on CUDA read pages"
