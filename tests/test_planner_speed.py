"""The planner beside a plain loop over requests."""

import sys
import tracemalloc

import numpy as np
import pytest

from experiments import planner_speed


@pytest.mark.parametrize("requests", [1, 5, 300])
def test_plain_loop_and_planner_agree(requests):
    arguments = planner_speed.problem(requests)
    fast = planner_speed.vectorised(**arguments)
    slow = planner_speed.plain_loop(**arguments)
    assert set(fast) == set(slow)
    for name, array in slow.items():
        np.testing.assert_array_equal(fast[name], array, err_msg=name)


def test_fewer_calls_than_the_loop_and_linear():
    """Calls and bytes are counted, not timed: a busy machine changes neither."""

    def calls(plan, count):
        arguments = planner_speed.problem(count)
        seen = 0

        def see(frame, event, argument):
            nonlocal seen
            seen += event in ("call", "c_call")

        sys.setprofile(see)
        try:
            plan(**arguments)
        finally:
            sys.setprofile(None)
        return seen

    def most_bytes(count):
        arguments = planner_speed.problem(count)
        tracemalloc.start()
        try:
            planner_speed.vectorised(**arguments)
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    vectorised, plain_loop = planner_speed.vectorised, planner_speed.plain_loop
    assert calls(plain_loop, 1024) > 20 * calls(vectorised, 1024)
    assert calls(vectorised, 100_000) < 1.5 * 10 * calls(vectorised, 10_000)
    assert most_bytes(100_000) < 1.5 * 10 * most_bytes(10_000)
