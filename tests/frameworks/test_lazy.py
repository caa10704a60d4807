"""Arrays that are made when they are read: the same rows as all at once, each made once."""

from __future__ import annotations

import sys

import numpy as np

from qkv.frameworks.lazy import LazySequence, lazy_arrays


def test_rows_are_made_once_for_all_names() -> None:
    requests = []

    def make(start: int, stop: int) -> dict[str, np.ndarray]:
        requests.append((start, stop))
        x = np.arange(start, stop)
        return {"x": x, "square": np.stack([x, x**2], axis=1).astype("f4")}

    arrays = lazy_arrays(make, 20)
    assert [len(x) for x in arrays.values()] == [20, 20]
    assert arrays["square"].shape == (20, 2) and arrays["square"].dtype == np.float32
    parts = {name: x[5:18][2:] for name, x in arrays.items()}
    np.testing.assert_array_equal(parts["x"], np.arange(7, 18))
    np.testing.assert_array_equal(np.asarray(parts["square"], float)[:, 1], np.arange(7, 18) ** 2.0)
    assert requests == [(0, 1), (7, 18)]
    assert np.asarray(arrays["x"][30:40]).shape == (0,) == np.asarray(arrays["x"][9:4]).shape


def test_what_is_made_late_is_made_after_ctrl_c_at_any_moment() -> None:
    things, stops = LazySequence(3, range), 0

    def profile(frame, event, arg):
        nonlocal left
        left -= event in ("call", "c_return")
        if left < 0:
            sys.setprofile(None)
            raise KeyboardInterrupt

    while True:
        left = stops
        sys.setprofile(profile)
        try:
            assert list(things) == [0, 1, 2]
            break
        except KeyboardInterrupt:
            stops += 1
        finally:
            sys.setprofile(None)
    assert stops > 3 and list(things) == [0, 1, 2]
