"""What somebody's code raised, and where in it."""

from __future__ import annotations

import os
import sysconfig
import traceback
from pathlib import Path

_SANDBOX = Path(__file__).resolve().parents[1]
_OTHERS = (
    f"{_SANDBOX}{os.sep}",
    f"{_SANDBOX.with_name('experiments')}{os.sep}",
    *{sysconfig.get_path(name) for name in ("purelib", "platlib", "stdlib")},
    "<",
)


def described(failure: BaseException) -> str:
    """Type and message, and behind their first line the last place in a file of the user's.

    Where there is none, the place that raised.
    """
    first, *rest = f"{type(failure).__name__}: {failure}".split("\n")
    frames = traceback.extract_tb(failure.__traceback__)
    own = [frame for frame in frames if not frame.filename.startswith(_OTHERS)]
    for frame in (own or frames)[-1:]:
        first += f" ({Path(frame.filename).name}:{frame.lineno}, in {frame.name})"
    return "\n".join([first, *rest])
