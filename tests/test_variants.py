"""How an op finds its variants."""

import importlib
import threading

from sandbox.kernels import OPS, op


def test_a_thread_sees_all_variants_or_waits(monkeypatch):
    """Ranks in one process all ask for the first time at once."""
    linear = OPS["linear"]
    linear.variants  # noqa: B018
    inside, go = threading.Event(), threading.Event()

    def slowly(name):
        inside.set()
        assert go.wait(20)
        return importlib.import_module(name)

    monkeypatch.setattr(linear, "_discovered", False)
    monkeypatch.setattr(op, "importlib", type("", (), {"import_module": staticmethod(slowly)}))
    first, second = (threading.Thread(target=lambda: linear.variants) for _ in range(2))
    first.start()
    assert inside.wait(20)
    second.start()
    second.join(0.1)
    waits = second.is_alive()
    go.set()
    first.join(20)
    second.join(20)
    assert waits
    assert not second.is_alive()
