"""The database on disk against a plain list of pairs, through everything that can happen to it."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

import qkv
from qkv.database import KeyNotFoundError, check_store
from qkv.database.encoders import Characters
from qkv.errors import ArgumentError
from tests.sampling import FULL

keys = st.sampled_from(["", "a", "b", "ab", "Ä", "a b", "\x00", "🦊"])
values = st.one_of(st.none(), st.integers(-5, 5), st.text(max_size=3), st.lists(st.booleans()))


class Model(RuleBasedStateMachine):
    @initialize()
    def begin(self):
        self.folder = Path(tempfile.mkdtemp())
        self.pairs: list[tuple[str, object]] = []
        self.past: dict[int, list[tuple[str, object]]] = {}
        self.D = self.opened()

    def opened(self):
        # The narrowest encoder: what is tested is what is kept. "json" takes values of any type.
        return qkv.open(self.folder / "d.qkv", create=True, encoder=Characters(width=16))

    def teardown(self):
        if hasattr(self, "D"):
            self.D.close()
            assert check_store(self.folder / "d.qkv") == []
            shutil.rmtree(self.folder)

    def noted(self):
        self.past[self.D.version] = list(self.pairs)

    @rule(pairs=st.lists(st.tuples(keys, values.map(lambda v: {"v": v})), min_size=1, max_size=3))
    def add(self, pairs):
        self.D.add([k for k, _ in pairs], [v for _, v in pairs])
        self.pairs += pairs
        self.noted()

    @rule(key=keys, value=values.map(lambda v: {"v": v}))
    def update(self, key, value):
        self.D.update(key, value)
        for i in reversed(range(len(self.pairs))):
            if self.pairs[i][0] == key:
                del self.pairs[i]
                break
        self.pairs.append((key, value))
        self.noted()

    @rule(key=keys)
    def remove(self, key):
        here = [v for k, v in self.pairs if k == key]
        if here:
            assert self.D.remove([key]) == len(here)
            self.pairs = [(k, v) for k, v in self.pairs if k != key]
            self.noted()
        else:
            with pytest.raises(KeyNotFoundError):
                self.D.remove([key])

    @rule()
    def reopen(self):
        self.D.close()
        self.D = self.opened()

    @rule()
    def compact(self):
        self.D.compact()
        versions = {version.number for version in self.D.versions()}
        self.past = {v: pairs for v, pairs in self.past.items() if v in versions}
        assert list(self.D.items()) == self.pairs

    @precondition(lambda self: self.pairs)
    @rule()
    def encode(self):
        self.D.encode(Characters(width=8))
        self.noted()

    @precondition(lambda self: self.past)
    @rule(data=st.data())
    def look_back(self, data):
        version = data.draw(st.sampled_from(sorted(self.past)))
        assert list(self.D.at(version).items()) == self.past[version]

    @precondition(lambda self: self.pairs)
    @rule(query=keys)
    def ask(self, query):
        if query == "" and query not in self.D:
            with pytest.raises(ArgumentError, match="query 0 is empty"):
                self.D.ask(query)
            return
        answer = self.D.ask(query, weighting="average", top=100)
        assert [(row.key, row.value) for row in answer.rows] == self.pairs
        assert answer.weights.sum() == pytest.approx(1)

    @invariant()
    def the_same(self):
        if not hasattr(self, "D"):
            return
        assert len(self.D) == len(self.pairs)
        assert list(self.D.items()) == self.pairs
        for key, _ in self.pairs:
            here = [v for k, v in self.pairs if k == key]
            assert self.D.get_all(key) == here
            assert self.D[key] == here[-1]


TestModel = Model.TestCase
TestModel.settings = settings(
    max_examples=200 if FULL else 12,
    stateful_step_count=25,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
