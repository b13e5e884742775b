"""Source lines and variable names in the host runner's messages."""

import re
import shutil
import subprocess
from pathlib import Path

_MARK = re.compile(r"<(code|shared) ([0-9a-f]+)>")


def resolve(message: str, library: Path) -> str:
    """`message` with its marks replaced: code offsets by source lines, offsets into static shared
    memory by variables. Without binutils lines are left out."""

    def replace(mark: re.Match) -> str:
        offset = int(mark[2], 16)
        return _line(library, offset) if mark[1] == "code" else _variable(library, offset)

    return _MARK.sub(replace, message)


def _line(library: Path, offset: int) -> str:
    if not 0 < offset < 2**31:
        return ""
    # Innermost first, when functions were inlined.
    frames = _run("addr2line", "-i", "-e", str(library), hex(offset)).splitlines()
    places = [frame.split(" ")[0].rpartition(":") for frame in frames]
    ours = [(Path(path), line) for path, _, line in places if path.endswith((".cu", ".cuh"))]
    if not ours:
        return ""
    text = f" at {ours[0][0].name}:{ours[0][1]}"
    caller = next((place for place in ours if place[0].suffix == ".cu"), ours[0])
    return text if caller == ours[0] else f"{text} from {caller[0].name}:{caller[1]}"


def _variable(library: Path, offset: int) -> str:
    for row in _run("nm", "-C", "--format=sysv", str(library)).splitlines():
        cells = [cell.strip() for cell in row.split("|")]
        if len(cells) < 5 or cells[3] != "TLS" or not cells[4]:
            continue
        start, size = int(cells[1], 16), int(cells[4], 16)
        if start <= offset < start + size:
            return f"shared `{cells[0].rpartition('::')[2]}`, byte {offset - start}"
    return f"static shared memory, byte {offset}"


def _run(tool: str, *arguments: str) -> str:
    if not shutil.which(tool):
        return ""
    return subprocess.run([tool, *arguments], capture_output=True, text=True).stdout
