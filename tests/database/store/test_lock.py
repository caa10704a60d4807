"""Pins of versions stay free of an interrupt, wherever it falls."""

from __future__ import annotations

import dis
import itertools
import sys
import threading

from qkv.database.store import lock


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
        later.join(10)
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
