import concurrent.futures
import os
import subprocess
import sys
import threading

import pytest

from qkv.frameworks import threads
from tests.interrupt import cores, moments

# A Ctrl-C may come wherever a call of C returns, to ours and to the standard library's.
WAITS = (threads.__file__, threading.__file__, os.path.dirname(concurrent.futures.__file__))


@pytest.fixture
def two():
    with cores(2):
        yield


def meet():
    """Whether both threads are there: each waits for the other."""
    both = threading.Barrier(2)
    return sorted(threads.map_parallel(lambda _: both.wait(60), range(2))) == [0, 1]


def test_results_come_in_the_order_of_the_items(two):
    late = threading.Event()

    def square(x):
        if x == 0:
            assert late.wait(60)
        elif x == 9:
            late.set()
        return x * x

    assert threads.map_parallel(square, iter(range(10))) == [x * x for x in range(10)]
    assert threads.map_parallel(square, []) == []


def test_the_first_error_is_raised_and_the_rest_is_not_begun(two):
    both, seen = threading.Barrier(2), []

    def fail(x):
        seen.append(x)
        both.wait(60)
        raise ValueError(x)

    with pytest.raises(ValueError, match="0"):
        threads.map_parallel(fail, range(9))
    assert sorted(seen) == [0, 1]
    assert meet()


def test_a_thread_of_ours_does_not_wait_for_itself(two):
    assert threads.map_parallel(lambda x: threads.map_parallel(str, range(x)), [1, 2, 3]) == [
        ["0"],
        ["0", "1"],
        ["0", "1", "2"],
    ]


def test_what_a_thread_of_ours_begins_needs_no_other(two):
    both = threading.Barrier(2)

    def nested(x):
        both.wait(60)
        return threads.submit_job(str, x)()

    assert threads.map_parallel(nested, [1, 2]) == ["1", "2"]


def test_an_interrupted_call_keeps_no_thread(two):
    assert meet()
    places = [meet() for _ in moments(lambda: threads.map_parallel(str, range(3)), WAITS)]
    assert len(places) > 3 and all(places)


def test_what_was_begun_is_waited_for_however_often_that_is_interrupted(two):
    go = threading.Event()
    result = threads.submit_job(go.wait, 60)
    go.set()
    for _ in moments(result, WAITS):
        assert result() is True
    failed = threads.submit_job(int, "x")
    for _ in range(2):
        with pytest.raises(ValueError, match="'x'"):
            failed()


def test_a_finaliser_when_python_ends_does_not_wait_for_threads_that_are_gone():
    code = """if True:
        from qkv.frameworks import threads

        class Late:
            def __del__(self, each=threads.map_parallel, print=print):
                print(each(str, range(3)), flush=True)

        late = Late()
        threads.map_parallel(str, range(3))
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (done.stdout, done.stderr) == ("['0', '1', '2']\n", "")


def test_the_end_of_python_waits_for_what_is_under_way():
    """Ended inside C++, a thread would abort the process; a function called later still is."""
    code = """if True:
        import atexit, threading, time
        from qkv.frameworks import threads

        begun = threading.Event()

        def long():
            begun.set()
            time.sleep(0.3)
            print("done", flush=True)

        atexit.register(lambda: print(threads.map_parallel(str, range(3)), flush=True))
        threads.submit_job(long)
        begun.wait()
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (done.stdout, done.stderr) == ("done\n['0', '1', '2']\n", "")
