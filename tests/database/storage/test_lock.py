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

from qkv.database.errors import StoreUnwritableError
from qkv.database.storage import Store, lock
from qkv.util import types
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


def interrupt_at(pins: lock.VersionPins, nth: int) -> bool:
    """Whether a hold and its release were interrupted at their nth place."""
    old = sys.gettrace()
    sys.settrace(Interrupting(nth))
    try:
        if pins.pin_version(3):
            pins.release_version(3)
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(old)
    return False


def test_an_interrupt_leaves_the_pins_free():
    for nth in itertools.count(1):
        pins = lock.VersionPins(None)
        came = interrupt_at(pins, nth)
        later = threading.Thread(target=pins.pin_version, args=(4,), daemon=True)
        later.start()
        later.join(300)
        assert not later.is_alive(), f"place {nth} keeps the lock"
        if not came:
            break
    assert nth > 3


def test_a_finaliser_that_runs_under_the_lock_is_applied_after_it(monkeypatch):
    pins = lock.VersionPins(None)
    pins.pin_version(2)
    monkeypatch.setattr(pins, "_lock_shared", lambda version: pins.release_version(2) or True)
    assert pins.pin_version(3)
    assert pins.claim_version(2)
    assert not pins.claim_version(3)


def test_a_writer_that_is_stopped_leaves_no_lock(tmp_path):
    def moment(after):
        writer, other = lock.WriteLock(tmp_path), lock.WriteLock(tmp_path)
        early = stopped(writer.acquire, after)
        writer.release()
        other.acquire(wait_seconds=0)
        other.release()
        return early

    assert len(list(itertools.takewhile(moment, itertools.count()))) > 5


@pytest.mark.parametrize("kind", ["writer", "claims", "pins"])
def test_what_is_closed_is_closed_once(tmp_path, kind):
    def moment(after):
        writer, pins = lock.WriteLock(tmp_path), lock.VersionPins(tmp_path)
        writer.acquire()
        assert pins.pin_version(1) and pins.claim_version(2)
        close = {"writer": writer.release, "claims": pins.release_claims, "pins": pins.close}[kind]
        early = stopped(close, after)
        files = [os.open(tmp_path / "other", os.O_RDWR | os.O_CREAT) for _ in range(4)]
        writer.release()
        pins.close()
        for file in files:
            os.close(file)  # which fails where somebody has closed it
        return early

    assert len(list(itertools.takewhile(moment, itertools.count()))) > 0


def test_a_snapshot_that_is_stopped_holds_no_version(tmp_path):
    with Store(tmp_path / "s") as store:
        for _ in moments(lambda: store.open_snapshot().close()):
            store.commit(settings={"version": store.version})
            assert store.compact().held == ()


def test_a_fork_that_is_stopped_leaves_no_lock():
    thing = Store()

    def free():
        with thing.fork_lock():
            lock.register_fork_handler(thing)

    for first in (True, False):  # Python runs the second hook whatever became of the first
        for after in itertools.count():
            early = stopped(lock._before_fork, after if first else 10**6, lock.__file__)
            early |= stopped(lock._after_fork, 10**6 if first else after, lock.__file__)
            later = threading.Thread(target=free, daemon=True)
            later.start()
            later.join(300)
            assert not later.is_alive() and lock._held_locks == []
            if not early:
                break
        assert after > 1


@pytest.mark.parametrize("way", ["alone", "commit", "view"])
def test_a_traceback_that_somebody_keeps_keeps_no_lock(way):
    store, kept, done = Store(), [], []
    ways = {
        "alone": store.exclusive_lock,
        "commit": lambda: contextlib.nullcontext(store.commit(settings={"now": len(done)})),
        "view": store._reader_catalog.read_transaction,
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
        assert len(done) == count + 1 and store.open_snapshot().settings == {"later": count}
    assert kept


@pytest.mark.parametrize(
    ("number", "step"),
    [(errno.EMFILE, "close other files$"), (errno.EROFS, "or open it only for reading$")],
)
def test_a_lock_that_cannot_be_opened_says_what_to_do(tmp_path, monkeypatch, number, step):
    def opened(*_):
        raise OSError(number, os.strerror(number))

    with Store(tmp_path / "s", create=True) as store:
        monkeypatch.setattr(lock.safe_open, "open_regular_file", opened)
        with pytest.raises(StoreUnwritableError, match=step):
            store.commit(settings={"a": 1})
        monkeypatch.undo()
        assert store.commit(settings={"a": 1}).version == 1
