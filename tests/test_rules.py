"""Who may import whom, and what may stand in the product."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LAYERS = ["arrays", "cache_formats", "dims", "kernels", "planner", "layers", "experiments"]
ALLOWED = {
    "experiments": {"layers", "kernels", "planner", "cache_formats", "dims", "arrays"},
    "layers": {"kernels", "planner", "cache_formats", "dims", "arrays"},
    "kernels": {"cache_formats", "dims", "arrays"},
    "planner": {"cache_formats", "dims", "arrays"},
    "cache_formats": {"dims", "arrays"},
    "dims": set(),
    "arrays": set(),
}
SOURCES = sorted(
    path for folder in ("sandbox", "experiments") for path in (ROOT / folder).rglob("*.py")
)


def part_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return parts[0] if parts[0] == "experiments" or len(parts) == 1 else parts[1]


def imported(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names.add(node.module)
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return names


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
class TestImports:
    def test_layers_look_only_down(self, path):
        here = part_of(path)
        if here == "__init__":  # names, no layer
            return
        for name in imported(path):
            parts = name.split(".")
            if parts[0] == "experiments":
                assert here == "experiments", f"{here} imports {name}"
            elif parts[0] == "sandbox" and len(parts) > 1 and parts[1] in LAYERS:
                assert parts[1] in ALLOWED[here] | {here}, f"{here} imports {name}"

    def test_torch_stays_in_its_files(self, path):
        torch = [name for name in imported(path) if name.split(".")[0] == "torch"]
        if torch:
            assert path.name.startswith("torch_")

    def test_numba_cuda_is_imported_in_one_place(self, path):
        numba = [name for name in imported(path) if name.split(".")[0] in ("numba", "numba_cuda")]
        assert not numba or path.name == "numba_target.py"

    def test_cuda_code_stands_in_cu_files(self, path):
        assert "__global__" not in path.read_text() or path.name in ("source.py", "kernel.py")


@pytest.mark.parametrize(
    "module", ["sandbox", "sandbox.kernels", "sandbox.layers", "sandbox.arrays"]
)
def test_importing_needs_neither_torch_nor_cupy(module):
    code = (
        "import sys\n"
        "sys.modules['torch'] = sys.modules['cupy'] = sys.modules['numba'] = None\n"
        f"import {module}\n"
    )
    run = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, cwd=ROOT
    )
    assert run.returncode == 0, run.stderr


def test_kernels_have_no_double_arithmetic():
    """A literal such as 1.0 would promote a float expression to double."""
    import re

    for path in (ROOT / "sandbox" / "kernels").rglob("*.cu*"):
        for number, line in enumerate(path.read_text().splitlines(), 1):
            code = line.split("//")[0]
            assert not re.search(r"(?<![\w.])\d+\.\d*(e-?\d+)?(?![\df\w.])", code), (
                f"{path.name}:{number}: {line.strip()}"
            )
            assert not re.search(r"\bdouble\b", code), f"{path.name}:{number}"
