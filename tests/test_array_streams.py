"""The device and the stream of a call: made current, ordered after others, restored."""

from __future__ import annotations

import types

import pytest

from sandbox.arrays import Kind, streams


class FakeStream:
    def __init__(self, cuda, ptr, capturing=False):
        self.cuda, self.ptr, self.capturing, self.log = cuda, ptr, capturing, []

    def use(self):
        self.cuda.streams[self.cuda.current] = self

    def record(self):
        return self

    def wait_event(self, other):
        self.log.append(other)

    def synchronize(self):
        self.log.append("synchronize")

    def is_capturing(self):
        return self.capturing


class FakeCuda:
    """Two GPUs' current device and streams, with CuPy's names."""

    def __init__(self):
        self.current = 0
        self.streams = {gpu: FakeStream(self, 0) for gpu in (0, 1)}
        self.runtime = types.SimpleNamespace(
            getDevice=lambda: self.current, setDevice=lambda gpu: setattr(self, "current", gpu)
        )

    def get_current_stream(self):
        return self.streams[self.current]


class FakeKind(Kind):
    def __init__(self, gpu, stream=None, error=None):
        super().__init__(gpu)
        self._stream, self.error = stream, error

    def stream(self):
        if self.error:
            raise self.error
        return self._stream


@pytest.fixture
def cuda(monkeypatch):
    fake = FakeCuda()
    monkeypatch.setattr(streams, "import_cupy", lambda: types.SimpleNamespace(cuda=fake))
    return fake


def state(cuda):
    return cuda.current, dict(cuda.streams)


def test_device_and_stream_are_made_current_and_restored(cuda):
    before = state(cuda)
    theirs = FakeStream(cuda, 77)
    with streams.make_current(1, {FakeKind(1, theirs)}):
        assert cuda.current == 1
        assert cuda.get_current_stream() is theirs
        cuda.runtime.setDevice(0)
    assert state(cuda) == before
    assert not theirs.log
    with pytest.raises(KeyError), streams.make_current(1, {FakeKind(1, theirs)}):
        raise KeyError
    assert state(cuda) == before
    with pytest.raises(KeyError), streams.make_current(1, {FakeKind(1, error=KeyError())}):
        pass
    assert state(cuda) == before


def test_without_tensors_the_current_stream_stays(cuda):
    mine = FakeStream(cuda, 5)
    cuda.streams[1] = mine
    with streams.make_current(1, {FakeKind(1)}):
        assert cuda.get_current_stream() is mine
    assert cuda.streams[1] is mine
    assert not mine.log


def test_mixed_libraries_are_ordered_except_under_capture(cuda):
    outer = cuda.streams[0]
    theirs, capturing = FakeStream(cuda, 77), FakeStream(cuda, 78, capturing=True)
    for stream, expected in [(theirs, [outer]), (capturing, [])]:
        with streams.make_current(0, {FakeKind(0), FakeKind(0, stream)}):
            assert stream.log == expected


def test_kinds_that_must_wait_do_so_at_the_end(cuda):
    kind = FakeKind(0)
    kind.waits_on_exit = True
    with streams.make_current(0, {kind}):
        assert not cuda.streams[0].log
    assert cuda.streams[0].log == ["synchronize"]
