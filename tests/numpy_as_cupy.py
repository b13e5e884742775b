"""CuPy for tests of timing on machines without a GPU."""

import numpy as np


class NumpyAsCupy:
    """Just enough of CuPy, over NumPy, to run the timing of a case without a GPU.

    Its calls run when they are captured; replays of its graphs do nothing.
    """

    def __init__(self, clock_us):
        self.cuda = self
        self.runtime = self
        self.random = self
        self._clock_us = clock_us
        self.ptr = 0
        self.memcpyDeviceToDevice = 3

    def __getattr__(self, name):
        return getattr(np, name)

    def __enter__(self):
        return self

    def __exit__(self, *failure):
        return None

    def RandomState(self, seed):
        return np.random.default_rng(seed)

    def Stream(self, non_blocking):
        assert non_blocking, "a capture needs a stream that does not wait for the default one"
        return self

    def get_current_stream(self):
        return self

    def synchronize(self):
        pass

    def Event(self):
        return type("Event", (), {"record": lambda *_: None, "synchronize": lambda _: None})()

    def get_elapsed_time(self, start, stop):
        return self._clock_us / 1e3

    def deviceSynchronize(self):
        pass

    def memGetInfo(self):
        return 1 << 33, 1 << 34

    def memcpyAsync(self, *arguments):
        pass

    def MemoryPool(self):
        return type("Pool", (), {"malloc": None})()

    def get_default_memory_pool(self):
        return type("Pool", (), {"free_all_blocks": lambda _: None})()

    def using_allocator(self, malloc):
        return self

    def begin_capture(self):
        pass

    def end_capture(self):
        return self

    def launch(self, stream):
        pass
