"""The README's example is a variant that works, and its commands exist."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from sandbox.cache_formats import FORMATS
from sandbox.dims import PRESETS
from sandbox.kernels import OPS
from sandbox.kernels.attention.raw_decode_mma import SHAPES

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


def python(*arguments, cwd=ROOT):
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "160"},
    )


@pytest.fixture
def example(tmp_path):
    source = next(block for block in blocks("cuda") if "my_gather" in block)
    launcher = next(block for block in blocks("python") if '@gather.variant("my_gather"' in block)
    (tmp_path / "my_gather.cu").write_text(source)
    (tmp_path / "my_gather.py").write_text(launcher)
    return tmp_path


def compare_command():
    line = next(line for line in README.splitlines() if "--variant-file my_gather.py" in line)
    return line.removeprefix("python ").split()


def test_the_example_variant_is_right(example):
    command = [*compare_command(), "--quick", "--target", "host", "--out", str(example / "run")]
    run = python(*command, cwd=example)
    assert run.returncode == 0, run.stdout + run.stderr
    assert re.search(r"my_gather\s+host\s+[1-9]", run.stdout), run.stdout


def test_a_wrong_example_is_caught(example):
    path = example / "my_gather.cu"
    path.write_text(path.read_text().replace("offset < 0 ? 0 : from[i]", "from[i + 1]"))
    command = [*compare_command(), "--quick", "--target", "host", "--out", str(example / "run")]
    run = python(*command, cwd=example)
    assert run.returncode == 1
    assert re.search(r"WRONG|ERROR", run.stdout)


ROUND_TRIP = """
wanted = torch.cat([kv_c, k_pe], dim=1).float()
error = (workspace.float() - wanted).abs()
assert workspace.dtype == torch.bfloat16
assert 0 < error.max() and (error <= wanted.abs() / 14 + fp8["k_scale"] / 512).all()
assert codes.count_nonzero() <= 9 * 48
"""


DECODED = """
rows, wanted = workspace[:6].double(), query[0, 0].double()
scores = scale["softmax_scale"] * wanted @ rows.T
assert latent.shape == (2, 1, 3, 40) and latent.dtype == torch.bfloat16
within = {"rtol": 0.02, "atol": 0.02}
torch.testing.assert_close(latent[0, 0].double(), scores.softmax(-1) @ rows[:, :40], **within)
torch.testing.assert_close(latent_lse[:, 0].double(), scores.logsumexp(-1), **within)
"""

MERGED = """
bounds = torch.tensor([0, 9], dtype=torch.int32)
whole, whole_lse = prefill_attention(q, k, v, new, bounds, **scale)
torch.testing.assert_close(out, whole)
torch.testing.assert_close(lse, whole_lse)
"""


SWAPPED = """
assert out.shape == (2, 64) and out.dtype == torch.bfloat16 and out.isfinite().all()
assert 0 <= difference < 0.1 * out.abs().max()
"""


def test_the_layers_tour_runs():
    tour, swap = (block for block in blocks("python") if "MLALayer" in block)
    run = python("-c", tour + swap + SWAPPED)
    assert run.returncode == 0, run.stderr


def test_the_ops_examples_run():
    use, packed, decode, prefill, debug = (
        block
        for block in blocks("python")
        if "@gather.variant" not in block and "MLALayer" not in block
    )
    examples = use + packed + ROUND_TRIP + decode + DECODED + prefill + MERGED + debug
    run = python("-W", "error", "-c", examples)
    assert run.returncode == 0, run.stderr


def test_every_op_and_format_is_listed_with_its_size():
    for name in OPS:
        assert re.search(rf"^\| \[?`{name}`", README, flags=re.MULTILINE), name
    for fmt in FORMATS.values():
        line = next(line for line in README.splitlines() if re.match(rf"\|.*`{fmt.name}`", line))
        assert str(fmt.row_bytes(PRESETS["deepseek_v3"])) in line, line


def test_tiles_of_decode_are_as_large_as_their_readme_says():
    text = (ROOT / "sandbox" / "kernels" / "attention" / "README.md").read_text()
    row = r"^\| (\d+) x (\d+) \| (\d+) \| (\d+) \| ([\d,]+) \| ([\d,]+) \|$"
    found = [
        tuple(int(cell.replace(",", "")) for cell in match)
        for match in re.findall(row, text, flags=re.MULTILINE)
    ]
    assert found == [
        (s.rows, s.tokens, s.warps, s.teams, s.shared_bytes(576, 0), s.shared_bytes(576, 576))
        for s in SHAPES
    ]


def test_commands_exist():
    commands = {re.match(r"python -m experiments (\w+)", line) for line in README.splitlines()}
    names = {match[1] for match in commands if match}
    assert {"doctor", "list", "compare", "conformance", "cache_error", "resources"} <= names
    for name in names:
        run = python("-m", "experiments", name, "--help")
        assert run.returncode == 0, run.stderr


def test_make_targets_exist():
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^make (\w+)", README, flags=re.MULTILINE))
    assert targets == {"compare", "test"}
    for target in targets:
        assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE)


def test_links_lead_somewhere():
    for readme in [ROOT / "README.md", *(ROOT / "sandbox").rglob("README.md")]:
        for target in re.findall(r"\]\(([^)#]+)\)", readme.read_text()):
            if "://" not in target:
                assert (readme.parent / target).exists(), f"{readme}: {target}"
