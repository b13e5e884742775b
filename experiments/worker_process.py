"""The parent's end of a worker: start it, ask it, notice that it died, say why."""

from __future__ import annotations

import json
import os
import pickle
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
START_S = 120.0
"""A worker that has not started after so long counts as hung."""


class WorkerDied(Exception):
    """The worker ended or hung; `stage` is what it last said that it was doing."""

    def __init__(self, reason: str, stage: str | None) -> None:
        super().__init__(reason)
        self.stage = stage


class WorkerHung(WorkerDied):
    """The worker gave no word for too long and was killed."""


class TaskFailed(Exception):
    """A task raised; `variant` is the one to blame where the task had several."""

    def __init__(self, reason: str, variant: str | None) -> None:
        super().__init__(reason)
        self.variant = variant


class WorkerStopped(Exception):
    """The worker was asked after `stop`."""


def environment_for(gpu: bool) -> dict[str, str]:
    """What a worker of one kind of targets is told beside its parent's environment."""
    return {} if gpu else {"NUMBA_ENABLE_CUDASIM": "1"}


class WorkerProcess:
    """A worker that is started when first asked and again after it died.

    Args:
        variant_files: the user's files to import in the worker.
        environment: added to this process's environment.
        timeout_s: without a word for so long, a worker counts as hung and is killed.
    """

    def __init__(
        self,
        variant_files: list[Path],
        environment: Mapping[str, str],
        timeout_s: float,
    ) -> None:
        self._files = variant_files
        paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        self._environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), **environment}
        self._timeout_s = timeout_s
        self._process: subprocess.Popen[bytes] | None = None
        self._errors: Any = None
        self._buffer = b""
        self._stopped = False

    def ask(self, task: str, on_stage: Callable[[str], None] = lambda stage: None, **arguments):
        """What the worker answers to `task`.

        Raises:
            WorkerDied: it crashed or hung.
            TaskFailed: the task raised.
        """
        try:
            if self._process is None:
                self._start()
            return self._exchange((task, arguments), on_stage, self._timeout_s)
        except WorkerDied:
            if self._stopped:
                raise WorkerStopped from None
            raise

    def close(self) -> None:
        if self._process is not None:
            self._process.stdin.close()
            try:
                self._process.wait(5)
            except subprocess.TimeoutExpired:
                self._process.kill()
        self._forget()

    def stop(self) -> None:
        """End the worker at once and for good, from any thread."""
        self._stopped = True
        if self._process is not None:
            self._process.kill()

    def _start(self) -> None:
        if self._stopped:
            raise WorkerStopped
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115
        self._process = subprocess.Popen(
            [sys.executable, "-m", "experiments.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env=self._environment,
        )
        self._buffer = b""
        self._exchange(self._files, lambda stage: None, max(START_S, self._timeout_s))

    def _exchange(self, message: Any, on_stage: Callable[[str], None], timeout_s: float) -> Any:
        stage = None
        try:
            pickle.dump(message, self._process.stdin)
            self._process.stdin.flush()
        except BrokenPipeError:
            raise WorkerDied(self._obituary(), stage) from None
        while True:
            answer = self._next(stage, timeout_s)
            if "stage" in answer:
                stage = answer["stage"]
                on_stage(stage)
                continue
            if answer["poisoned"]:
                self._process.kill()
                self._forget()
            if "failed" in answer:
                raise TaskFailed(answer["failed"], answer["variant"])
            return answer["done"]

    def _next(self, stage: str | None, timeout_s: float) -> dict[str, Any]:
        deadline = time.monotonic() + timeout_s
        output = self._process.stdout
        with selectors.DefaultSelector() as selector:
            selector.register(output, selectors.EVENT_READ)
            while b"\n" not in self._buffer:
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    self._process.kill()
                    self._forget()
                    raise WorkerHung(f"gave no answer for {timeout_s:.0f} s", stage)
                chunk = os.read(output.fileno(), 1 << 16)
                if not chunk:
                    raise WorkerDied(self._obituary(), stage)
                self._buffer += chunk
        line, _, self._buffer = self._buffer.partition(b"\n")
        return json.loads(line)

    def _obituary(self) -> str:
        code = self._process.wait()
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        self._errors.seek(0)
        said = self._errors.read().decode(errors="replace").strip().splitlines()
        self._forget()
        return f"the process died ({how})" + (f": {said[0]}" if said else "")

    def _forget(self) -> None:
        if self._process is not None:
            self._process.stdin.close()
            self._process.stdout.close()
            self._process.wait()
            self._errors.close()
        self._process = None
