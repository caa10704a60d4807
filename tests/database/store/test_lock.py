"""Ctrl-C, wherever it falls, leaves no lock taken, and closes no file but its own."""

from __future__ import annotations

import contextlib
import dis
import errno
import itertools
import os
import sys
import threading

import pytest

from qkv import types
from qkv.database.faults import Unwritable
from qkv.database.store import Store, fork, lock
from tests.interrupt import STORE, moments, stopped


class Interrupting:
    """Raises in the nth place of the module where Python looks for a Ctrl-C: after a call."""

    def __init__(self, nth: int) -> None:
        self.left = nth
        self.before: dict[object, str] = {}

    def __call__(self, frame, event, arg):
        if frame.f_code.co_filename != lock.__file__:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            before = self.before.get(frame, "")
            self.before[frame] = dis.opname[frame.f_code.co_code[frame.f_lasti]]
            if before == "CALL":
                self.left -= 1
                if not self.left:
                    raise KeyboardInterrupt
        return self


def interrupted(pins: lock.Pins, nth: int) -> bool:
    """Whether a hold and its release were interrupted at their nth place."""
    old = sys.gettrace()
    sys.settrace(Interrupting(nth))
    try:
        if pins.hold(3):
            pins.release(3)
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(old)
    return False


def test_an_interrupt_leaves_the_pins_free():
    for nth in itertools.count(1):
        pins = lock.Pins(None)
        came = interrupted(pins, nth)
        later = threading.Thread(target=pins.hold, args=(4,), daemon=True)
        later.start()
        later.join(300)
        assert not later.is_alive(), f"place {nth} keeps the lock"
        if not came:
            break
    assert nth > 3


def test_a_finaliser_inside_of_a_hold_is_settled_after_it(monkeypatch):
    pins = lock.Pins(None)
    pins.hold(2)
    monkeypatch.setattr(pins, "_share", lambda version: pins.release(2) or True)
    assert pins.hold(3)
    assert pins.seize(2)
    assert not pins.seize(3)


def test_a_writer_that_is_stopped_leaves_no_lock(tmp_path):
    def moment(after):
        writer, other = lock.WriteLock(tmp_path), lock.WriteLock(tmp_path)
        early = stopped(writer.take, after)
        writer.drop()
        other.take(patience=0)
        other.drop()
        return early

    assert len(list(itertools.takewhile(moment, itertools.count()))) > 5


@pytest.mark.parametrize("kind", ["writer", "claims", "pins"])
def test_what_is_closed_is_closed_once(tmp_path, kind):
    def moment(after):
        writer, pins = lock.WriteLock(tmp_path), lock.Pins(tmp_path)
        writer.take()
        assert pins.hold(1) and pins.seize(2)
        close = {"writer": writer.drop, "claims": pins.unseize, "pins": pins.close}[kind]
        early = stopped(close, after)
        files = [os.open(tmp_path / "other", os.O_RDWR | os.O_CREAT) for _ in range(4)]
        writer.drop()
        pins.close()
        for file in files:
            os.close(file)  # which fails where somebody has closed it
        return early

    assert len(list(itertools.takewhile(moment, itertools.count()))) > 0


def test_a_snapshot_that_is_stopped_holds_no_version(tmp_path):
    with Store(tmp_path / "s") as store:
        for _ in moments(lambda: store.at().close()):
            store.commit(settings={"version": store.version})
            assert store.compact().held == ()


def test_a_fork_that_is_stopped_leaves_no_lock():
    thing = Store()

    def free():
        with thing.quiet():
            fork.survive(thing)

    for first in (True, False):  # Python runs the second hook whatever became of the first
        for after in itertools.count():
            early = stopped(fork._before, after if first else 10**6, fork.__file__)
            early |= stopped(fork._after, 10**6 if first else after, fork.__file__)
            later = threading.Thread(target=free, daemon=True)
            later.start()
            later.join(300)
            assert not later.is_alive() and fork._held == []
            if not early:
                break
        assert after > 1


@pytest.mark.parametrize("way", ["alone", "commit", "view"])
def test_a_traceback_that_somebody_keeps_keeps_no_lock(way):
    store, kept, done = Store(), [], []
    ways = {
        "alone": store.alone,
        "commit": lambda: contextlib.nullcontext(store.commit(settings={"now": len(done)})),
        "view": store._reader.view,
    }

    def change():
        try:
            with ways[way]():
                pass
        except KeyboardInterrupt as error:
            kept.append(error)
            raise

    def later():
        done.append(store.commit(settings={"later": len(done)}))

    for _ in moments(change, (contextlib.__file__, types.__file__, STORE)):
        count = len(done)
        other = threading.Thread(target=later, daemon=True)
        other.start()
        other.join(300)
        assert len(done) == count + 1 and store.at().settings == {"later": count}
    assert kept


@pytest.mark.parametrize(
    ("number", "step"), [(errno.EMFILE, "close other files$"), (errno.EROFS, "or only read$")]
)
def test_a_lock_that_cannot_be_opened_says_what_to_do(tmp_path, monkeypatch, number, step):
    def opened(*_):
        raise OSError(number, os.strerror(number))

    with Store(tmp_path / "s") as store:
        monkeypatch.setattr(lock.plain, "opened", opened)
        with pytest.raises(Unwritable, match=step):
            store.commit(settings={"a": 1})
        monkeypatch.undo()
        assert store.commit(settings={"a": 1}).version == 1
