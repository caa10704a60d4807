"""The store compared with a dictionary: after the same operations, both hold the same rows."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from qkv.database.errors import DuplicateKeyError, VersionNotFoundError
from qkv.database.storage import Store, check_store
from qkv.database.storage import limits as sizes
from tests.sampling import FULL

KEYS = st.integers(0, 9)


class Model(RuleBasedStateMachine):
    """Rows are {id: (key, tensor)}; `past` has the rows and settings of each version."""

    @initialize(memory=st.booleans())
    def start(self, memory):
        limits = {
            "MAX_BUFFERED_ROWS": 5,
            "MIN_BUNDLE_ROWS": 3,
            "MAX_SEGMENT_BYTES": 600,
            "SEGMENTS_PER_MERGE": 3,
        }
        self.patches = [mock.patch.object(sizes, name, limit) for name, limit in limits.items()]
        self.patches.append(mock.patch.object(sizes, "ROWS_PER_PAGE", 4))
        for patch in self.patches:
            patch.start()
        self.folder = Path(tempfile.mkdtemp())
        self.path = None if memory else self.folder / "s"
        self.store = Store(self.path, create=True)
        self.rows, self.settings, self.last = {}, {}, -1
        self.past = {0: ({}, {})}
        self.snapshots = []

    def teardown(self):
        if not hasattr(self, "store"):
            return
        self.store.close()
        if self.path is not None:
            assert check_store(self.path) == []
        shutil.rmtree(self.folder)
        for patch in self.patches:
            patch.stop()

    def remember(self):
        version = self.store.version
        self.past[version] = (dict(self.rows), dict(self.settings))

    def add_rows(self, keys, remove=(), unique=False, **options):
        ids = range(self.last + 1, self.last + 1 + len(keys))
        width = next(iter(self.rows.values()))[1].shape if self.rows else self.width
        tensors = np.array([np.full(width, float(row)) for row in ids], float).reshape(
            len(ids), *width
        )
        made = self.store.commit(
            records=[f"{key}" for key in keys],
            digests=[b"%d" % key for key in keys],
            tensors={"key": tensors},
            remove=remove,
            unique=unique,
            **options,
        )
        assert made.ids == ids
        for row in remove:
            del self.rows[row]
        for row, key, tensor in zip(ids, keys, tensors, strict=True):
            self.rows[row] = (key, tensor)
            self.last = row
        self.remember()

    width = (2,)

    @rule(keys=st.lists(KEYS, max_size=12))
    def add(self, keys):
        self.add_rows(keys)

    @rule(keys=st.lists(KEYS, max_size=5), value=st.integers(0, 2))
    def add_with_settings(self, keys, value):
        self.settings = {"value": value}
        self.add_rows(keys, settings=self.settings)

    @rule(key=KEYS)
    def add_unique(self, key):
        if any(key == other for other, _ in self.rows.values()):
            with pytest.raises(DuplicateKeyError):
                self.add_rows([key], unique=True)
        else:
            self.add_rows([key], unique=True)

    @precondition(lambda self: self.rows)
    @rule(data=st.data(), keys=st.lists(KEYS, max_size=3))
    def remove(self, data, keys):
        remove = data.draw(st.lists(st.sampled_from(sorted(self.rows)), unique=True))
        self.add_rows(keys, remove=remove)

    @precondition(lambda self: self.rows)
    @rule(shape=st.sampled_from([(2,), (), (1, 3)]), size=st.integers(1, 5))
    def recode(self, shape, size):
        ids = sorted(self.rows)
        blocks = [ids[start : start + size] for start in range(0, len(ids), size)]
        new = {row: np.full(shape, -float(row)) for row in ids}
        self.store.rewrite_tensors(
            (block, {"key": np.array([new[row] for row in block])}) for block in blocks
        )
        self.rows = {row: (key, new[row]) for row, (key, _) in self.rows.items()}
        self.width = shape
        self.remember()

    @rule(keep=st.booleans())
    def hold(self, keep):
        """Some snapshots are held on to."""
        snap = self.store.open_snapshot()
        if keep:
            self.snapshots = [*self.snapshots, snap][-3:]

    @rule()
    def compact(self):
        report = self.store.compact()
        held = {snap.version for snap in self.snapshots} - {self.store.version}
        assert set(report.held) == held and report.rows == len(self.rows)
        expected_versions = held | {self.store.version}
        for version in set(self.past) - expected_versions:
            del self.past[version]
            with pytest.raises(VersionNotFoundError):
                self.store.open_snapshot(version)

    @precondition(lambda self: self.path is not None)
    @rule()
    def reopen(self):
        self.snapshots = []
        self.store.close()
        assert check_store(self.path) == []
        self.store = Store(self.path)

    @rule(data=st.data())
    def look_back(self, data):
        version = data.draw(st.sampled_from(sorted(self.past)))
        with self.store.open_snapshot(version) as snap:
            self.same(snap, *self.past[version])

    @invariant()
    def newest_is_the_same(self):
        if hasattr(self, "store"):
            with self.store.open_snapshot() as snap:
                self.same(snap, self.rows, self.settings)
            for snap in self.snapshots:
                self.same(snap, *self.past[snap.version])

    def same(self, snap, rows, settings_):
        ids = sorted(rows)
        assert len(snap) == len(ids) and snap.live_ids().tolist() == ids
        assert snap.settings == settings_
        assert list(snap.iterate_rows()) == [(row, str(rows[row][0])) for row in ids]
        for key in range(10):
            assert snap.find_ids(b"%d" % key) == [row for row in ids if rows[row][0] == key]
        actual = {}
        for part in snap.iterate_segments(window=3):
            for at, row in enumerate(part.ids.tolist()):
                if part.live is None or part.live[at]:
                    actual[row] = part.tensors["key"][at]
        assert list(actual) == ids
        for row in ids:
            np.testing.assert_array_equal(actual[row], rows[row][1])
        if ids:
            subset = ids[::-2]
            expected = np.array([rows[row][1] for row in subset])
            np.testing.assert_array_equal(snap.read_tensor("key", subset), expected)


TestModel = Model.TestCase
TestModel.settings = settings(
    max_examples=500 if FULL else 8,
    stateful_step_count=40,
    deadline=None,
)
