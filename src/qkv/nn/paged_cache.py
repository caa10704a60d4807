"""A key-value cache in pages, for sequences of different lengths that may share a prefix."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from qkv import attention, masks
from qkv.errors import ArgumentError, ShapeError, validate_sizes
from qkv.nn.cache import Cache
from qkv.util.keyword_hints import suggest_keywords

LARGEST_CODES = {"int8": 127.0, "float8": 448.0}
"""The largest number that a code of 8 bits stands for. float8 is torch.float8_e4m3fn."""


@suggest_keywords
class PagedCache(Cache):
    """The projected keys and values of one layer, in pages of `block` rows.

    A sequence is a table of pages, so appended rows are written once and memory grows with the rows
    of all sequences, not with the longest. Forked sequences share their pages; a shared page is
    copied when a sequence writes to it. With `int8` or `float8`, each row is stored as codes of 8
    bits and one float32 scale. `int8` is more exact where the numbers of a row are of similar size,
    `float8` where they differ much. `pages` is the number of pages to allocate with the first rows;
    a full pool doubles, which copies it.

    - In a layer it replaces `Cache`: the sequences are the batch, and have equal lengths.
    - For sequences of any length, `append_rows` and `attend` take a list of sequences.

    It has no gradients.

    >>> cache = PagedCache(block=4)
    >>> first = cache.add_sequence()
    >>> rows = torch.ones(1, 2, 6, 8)  # batch, heads, rows, width
    >>> cache.append_rows([first], rows, rows)
    >>> second = cache.fork_sequence(first)
    >>> cache.append_rows([second], rows[:, :, :1], rows[:, :, :1])
    >>> cache.lengths, cache.used_pages
    ({0: 6, 1: 7}, 3)
    >>> cache.attend(torch.ones(2, 4, 1, 8), [first, second], weighting="entmax15").shape
    torch.Size([2, 4, 1, 8])
    """

    def __init__(
        self, block: int = 256, *, int8: bool = False, float8: bool = False, pages: int = 8
    ) -> None:
        super().__init__()
        validate_sizes(block=block, pages=pages)
        if int8 and float8:
            raise ArgumentError("PagedCache: int8=True and float8=True exclude each other")
        self.block, self.codes = block, "int8" if int8 else "float8" if float8 else None
        self.lengths: dict[int, int] = {}
        """The number of rows of each sequence."""
        self.tables: dict[int, list[int]] = {}
        """The pages of each sequence, in order."""
        self.initial_pages, self.next_sequence = pages, 0
        self.use_counts: list[int] = []
        """How many sequences use each page."""
        self.free_pages: list[int] = []
        self.scales: list[Tensor] = []
        self._runners: dict[Any, Any] = {}
        """Functions that attend to the pages of this pool."""
        self._tables: tuple[Any, ...] = ()
        """The sequences of the last call, and their tables and lengths on the device."""
        self.dtypes: list[torch.dtype] = []

    def __len__(self) -> int:
        return max(self.lengths.values(), default=0)

    def __repr__(self) -> str:
        return (
            f"PagedCache({sum(self.lengths.values())} rows of {len(self.lengths)} sequences in "
            f"{self.used_pages} pages of {self.block})"
        )

    @property
    def used_pages(self) -> int:
        """The number of pages that hold rows of some sequence."""
        return len(self.use_counts) - len(self.free_pages)

    # Sequences

    def add_sequence(self) -> int:
        """Return the number of a new, empty sequence."""
        sequence, self.next_sequence = self.next_sequence, self.next_sequence + 1
        self.lengths[sequence], self.tables[sequence] = 0, []
        return sequence

    def fork_sequence(self, sequence: int) -> int:
        """Return a new sequence with the same rows. No row is copied."""
        self._check_sequences([sequence])
        fork = self.add_sequence()
        self.lengths[fork], self.tables[fork] = self.lengths[sequence], [*self.tables[sequence]]
        for page in self.tables[fork]:
            self.use_counts[page] += 1
        return fork

    def remove_sequence(self, sequence: int) -> None:
        """Remove a sequence. Pages that no other sequence uses become free."""
        self._check_sequences([sequence])
        for page in self.tables.pop(sequence):
            self._release_page(page)
        del self.lengths[sequence]
        self._tables = ()

    def select_sequences(self, sequences: Sequence[int]) -> list[int]:
        """Keep these sequences only, and return their new numbers. One may occur several times.

        A beam search selects the sequences that its best beams continue.
        """
        self._check_sequences(sequences)
        old, forks = list(self.tables), [self.fork_sequence(x) for x in sequences]
        for sequence in old:
            self.remove_sequence(sequence)
        return forks

    # Rows

    def append_rows(self, sequences: Sequence[int], key: Tensor, value: Tensor) -> None:
        """Append rows (batch, heads, n, width): row b of the batch to sequence b of the list."""
        self._check_sequences(sequences)
        self._check_rows(sequences, key, value)
        self._tables = ()
        if not self.buffers:
            self._allocate_pool(key, value)
        elif self.buffers[0].is_inference() and not torch.is_inference_mode_enabled():
            self._runners = {}
            for arrays in (self.buffers, self.scales):  # torch forbids to write to the old ones
                arrays[:] = [x.clone() for x in arrays]
        pages, offsets = [], []
        for sequence in sequences:
            start = self.lengths[sequence]
            end = start + key.shape[-2]
            self._prepare_pages(sequence, start, end)
            table = self.tables[sequence]
            pages.append([table[i // self.block] for i in range(start, end)])
            offsets.append([i % self.block for i in range(start, end)])
            self.lengths[sequence] = end
        device = key.device
        at = torch.tensor(pages, device=device), torch.tensor(offsets, device=device)
        for i, new in enumerate((key, value)):
            rows = new.detach().transpose(1, 2)  # (batch, n, heads, width)
            if self.codes and rows.shape[-1]:
                scale = rows.float().abs().amax(-1, keepdim=True) / LARGEST_CODES[self.codes]
                self.scales[i][at[0], :, at[1]] = scale
                rows = rows / torch.where(scale == 0, 1.0, scale)
                if self.codes == "int8":
                    rows = rows.round().to(torch.int8)
                else:
                    rows = rows.to(torch.float8_e4m3fn).view(torch.uint8)
            self.buffers[i][at[0], :, at[1]] = rows.to(self.buffers[i].dtype)

    def gather_rows(self, sequences: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
        """Return keys and values (batch, heads, m, width), and the lengths (batch,).

        m is the length of the longest sequence. Rows after the end of a sequence have any values.
        """
        self._check_sequences(sequences)
        if not self.buffers:
            raise ArgumentError("cache holds no rows yet: append some first")
        longest = max(self.lengths[x] for x in sequences)
        count = -(-longest // self.block)
        tables = [self.tables[x][:count] for x in sequences]
        device = self.buffers[0].device
        at = torch.tensor([[*x, *[0] * (count - len(x))] for x in tables], device=device)
        key, value = (self._read_pages(i, at.long(), longest) for i in (0, 1))
        return key, value, torch.tensor([self.lengths[x] for x in sequences], device=device)

    def attend(
        self,
        query: Tensor,
        sequences: Sequence[int],
        *,
        is_causal: bool = True,
        mask: Any = None,
        **options: Any,
    ) -> Tensor:
        """Return the attention of queries (batch, heads, n, width) over the rows of the sequences.

        The n queries of a sequence are those of its last n rows; with `is_causal` each attends to
        the rows up to its own. `options` are those of `qkv.attend`, and so is `mask`, whose keys
        are those of `gather_rows`. On CUDA, kernels read the pages of a decoding step where they
        are; `explain` says whether they do.
        """
        plan = self._plan_pages(query, sequences, is_causal, mask, options)
        if not isinstance(plan, str):
            return plan()
        return self._attend_to_rows(query, sequences, is_causal, mask, options)

    def explain(
        self,
        query: Tensor,
        sequences: Sequence[int],
        *,
        is_causal: bool = True,
        mask: Any = None,
        **options: Any,
    ) -> str:
        """Return whether `attend` with these arguments gathers the pages, and why."""
        plan = self._plan_pages(query, sequences, is_causal, mask, options)
        if isinstance(plan, str):
            return f"the pages are gathered: {plan}"
        return "the kernels read the pages through their table"

    def _plan_pages(
        self, query: Tensor, sequences: Sequence[int], is_causal: bool, mask: Any, options: Any
    ) -> Callable[[], Tensor] | str:
        """Return a function that computes the output from the pages, or why no kernel does."""
        self._check_sequences(sequences)
        if mask is not None:
            return "a mask has its keys in the order of the gathered rows"
        if not self.buffers or not any(self.lengths[x] for x in sequences):
            return "there are no rows"
        key, value = (self._as_codes(x) for x in self.buffers)
        return attention.plan_pages(
            query,
            key,
            value,
            lambda: self._device_tables(sequences),
            dtype=self.dtypes[0],
            scales=self.scales,
            is_causal=is_causal and query.shape[-2] > 1,
            known=self._runners,
            **options,
        )

    def _device_tables(self, sequences: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return the pages (batch, count) and the lengths (batch,) of the sequences, int32.

        They are copied to the device together, and again only after a change.
        """
        key = tuple(sequences)
        if not self._tables or self._tables[0] != key:
            lengths = [self.lengths[x] for x in key]
            count = -(-max(lengths) // self.block)
            tables = [self.tables[x][:count] for x in key]
            numbers = lengths + [0] * (-len(lengths) % 4)  # the table is aligned to 16 bytes
            first = len(numbers)
            for x in tables:
                numbers += x + [0] * (count - len(x))
            device = self.buffers[0].device
            host = torch.tensor(numbers, dtype=torch.int32, pin_memory=device.type == "cuda")
            both = host.to(device, non_blocking=True)
            self._tables = key, both[first:].view(-1, count), both[: len(lengths)]
        return self._tables[1:]

    def _attend_to_rows(
        self, query: Tensor, sequences: Sequence[int], is_causal: bool, mask: Any, options: Any
    ) -> Tensor:
        """Return the output over gathered rows."""
        key, value, lengths = self.gather_rows(sequences)
        n, m = query.shape[-2], key.shape[-2]
        is_padded = len({self.lengths[x] for x in sequences}) > 1
        valid: Any = masks.lengths(lengths) if is_padded else None
        if is_causal and n > 1:
            ends = lengths[:, None] - n + 1 + torch.arange(n, device=lengths.device)
            valid = torch.arange(m, device=lengths.device) < ends[:, None, :, None]
        if mask is not None and valid is not None:
            mask = masks.array(valid) & mask if isinstance(valid, Tensor) else valid & mask
        mask = valid if mask is None else mask
        out: Tensor = attention.attend(query, key, value, mask=mask, **options)
        return out

    # The interface of `Cache`

    def append(self, layer: Any, key: Tensor, value: Tensor) -> list[Tensor]:
        self._claim_owner(layer)
        if not self.lengths:
            for _ in range(key.shape[0]):
                self.add_sequence()
        self._check_equal_lengths()
        self.append_rows(list(self.lengths), key, value)
        return self._current_rows()

    def _current_rows(self) -> list[Tensor]:
        self._check_equal_lengths()
        return list(self.gather_rows(list(self.lengths))[:2])

    # Pages

    def _allocate_pool(self, key: Tensor, value: Tensor) -> None:
        shapes = [(self.initial_pages, x.shape[1], self.block, x.shape[-1]) for x in (key, value)]
        kind = {"int8": torch.int8, "float8": torch.uint8, None: key.dtype}[self.codes]
        self.dtypes = [key.dtype, value.dtype]
        self.buffers = [key.new_zeros(shape, dtype=kind) for shape in shapes]
        if self.codes:
            self.scales = [key.new_zeros((*x[:-1], 1), dtype=torch.float32) for x in shapes]
        self.use_counts = [0] * self.initial_pages
        self.free_pages = list(reversed(range(self.initial_pages)))

    def _prepare_pages(self, sequence: int, start: int, end: int) -> None:
        """Give the sequence pages of its own for the rows from `start` to `end`."""
        table, at = self.tables[sequence], start // self.block
        if end > start and at < len(table) and self.use_counts[table[at]] > 1:
            page = self._take_page()
            for x in (*self.buffers, *self.scales):
                x[page] = x[table[at]]
            self._release_page(table[at])
            table[at] = page
        while len(table) * self.block < end:
            table.append(self._take_page())

    def _take_page(self) -> int:
        if not self.free_pages:
            size = len(self.use_counts)
            self._runners = {}
            for arrays in (self.buffers, self.scales):
                arrays[:] = [torch.cat((x, torch.zeros_like(x))) for x in arrays]
            self.use_counts += [0] * size
            self.free_pages = list(reversed(range(size, 2 * size)))
        page = self.free_pages.pop()
        self.use_counts[page] = 1
        return page

    def _release_page(self, page: int) -> None:
        self.use_counts[page] -= 1
        if not self.use_counts[page]:
            self.free_pages.append(page)

    def _as_codes(self, x: Tensor) -> Tensor:
        """Return the codes of stored bytes. torch does not index arrays of float8."""
        return x.view(torch.float8_e4m3fn) if self.codes == "float8" else x

    def _read_pages(self, i: int, at: Tensor, length: int) -> Tensor:
        """Return rows (batch, heads, length, width) of the pages (batch, count)."""
        heads = self.buffers[i].shape[1]
        each = torch.arange(heads, device=at.device)
        flat = (at[:, None] * heads + each[:, None]).flatten()  # (batch, heads, count)
        rows = self.buffers[i].flatten(0, 1).index_select(0, flat)
        if self.codes:
            scales = self.scales[i].flatten(0, 1).index_select(0, flat)
            rows = (self._as_codes(rows).float() * scales).to(self.dtypes[i])
        size = at.shape[1] * self.block
        return rows.view(at.shape[0], heads, size, rows.shape[-1])[:, :, :length]

    # Checks

    def _check_sequences(self, sequences: Sequence[int]) -> None:
        for x in sequences:
            if x not in self.tables:
                raise ArgumentError(f"cache has no sequence {x!r}: it has {list(self.tables)}")

    def _check_rows(self, sequences: Sequence[int], key: Tensor, value: Tensor) -> None:
        if torch.is_grad_enabled() and (key.requires_grad or value.requires_grad):
            raise ArgumentError(
                "a paged cache has no gradients: append under torch.no_grad(), or use nn.Cache()"
            )
        if len(set(sequences)) != len(sequences):
            raise ArgumentError(f"a sequence occurs twice in {list(sequences)}: fork it first")
        expected = len(sequences), key.shape[-2]
        if any(x.dim() != 4 or (x.shape[0], x.shape[2]) != expected for x in (key, value)):
            raise ShapeError(
                f"key and value must be ({len(sequences)}, heads, n, width), one for each "
                f"sequence, not {tuple(key.shape)} and {tuple(value.shape)}"
            )
        for name, x, new, dtype in zip(
            ("key", "value"), self.buffers, (key, value), self.dtypes, strict=False
        ):
            have, come = (x.shape[1], x.shape[-1]), (new.shape[1], new.shape[-1])
            if have != come or dtype != new.dtype or x.device != new.device:
                raise ShapeError(
                    f"cache holds {name} rows of (heads, width) {have}, {dtype} on {x.device}; "
                    f"the new rows are {come}, {new.dtype} on {new.device}"
                )

    def _check_equal_lengths(self) -> None:
        if len(set(self.lengths.values())) > 1:
            raise ArgumentError(
                "a layer needs sequences of equal lengths, and those of the cache differ: use "
                "cache.append_rows and cache.attend"
            )
