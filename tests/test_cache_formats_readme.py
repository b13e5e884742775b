"""The specification of cache rows says what the formats do."""

import re
from pathlib import Path

import numpy as np
import pytest

from sandbox.cache_formats import E4M3, FORMATS, Widths, vectors

TEXT = (Path(vectors.__file__).parent / "README.md").read_text()
DEEPSEEK = Widths(512, 64)


def table(heading):
    """Rows of the table whose first line starts with this, as lists of cells."""
    lines = TEXT[TEXT.index(f"| {heading} |") :].split("\n\n")[0].splitlines()
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


def test_sizes():
    heading, _, *rows = table("format")
    assert heading[3] == "L = 512, R = 64"
    named = {name: row for row in rows for name in re.findall(r"`(\w+)`", row[0])}
    assert set(named) == set(FORMATS)
    for name, row in named.items():
        size = FORMATS[name].row_bytes(DEEPSEEK)
        numbers = [int(cell.replace(",", "")) for cell in row[3:7]]
        assert numbers == [size, 61 * size, 2**30 // (61 * size), FORMATS[name].alignment]


@pytest.mark.parametrize(
    ("name", "field"),
    [(name, field) for name in FORMATS for field in FORMATS[name].fields(DEEPSEEK)],
)
def test_offsets(name, field):
    if not FORMATS[name].packed:
        assert not FORMATS[name].fields(DEEPSEEK)["kv_c"].offset
        return
    section = next(
        part
        for part in TEXT.split("\n## ")
        if part.startswith(f"`{name}`") or (f", `{name}`" in part.splitlines()[0])
    )
    cells = next(line for line in section.splitlines() if f"| `{field}`" in line).split("|")
    offset = int(cells[4 if name == "int4_per_token" else 3])
    assert offset == FORMATS[name].fields(DEEPSEEK)[field].offset


def test_codes():
    (values, _, codes) = table("value / k_scale")
    numbers = [eval(cell.replace("^", "**"), {"inf": np.inf, "NaN": np.nan}) for cell in values[1:]]
    numbers = np.float32([-0.0 if cell == "-0" else x for cell, x in zip(values[1:], numbers)])
    assert [f"`{code:02x}`" for code in E4M3.encode(numbers)] == codes[1:]


@pytest.mark.parametrize("rule", ["pow2", "raw"])
def test_tile_scales(rule):
    _, _, *rows = table("`tile_scale`")
    _, _, zeros, of_336 = next(row for row in rows if f'"{rule}"' in row[0])
    for amax, shown in ((0, zeros), (336, of_336)):
        stored = FORMATS["fp8_ds_mla"].encode(
            np.full((1, 128), amax), Widths(128, 0), tile_scale=rule
        )
        assert stored[0, 128:].view(np.float32).item() == eval(shown.replace("^", "**"))


def test_examples_run():
    examples = re.findall(r"```python\n(.*?)```", TEXT, flags=re.DOTALL)
    assert len(examples) == 3
    for example in examples:
        exec(compile(example, "README.md", "exec"), {})


def test_commands_have_options_that_exist():
    from typer.testing import CliRunner

    from experiments.__main__ import app

    known = CliRunner().invoke(app, ["conformance", "--help"], env={"COLUMNS": "300"}).output
    for option in re.findall(
        r"^python -m experiments conformance (.*?)(?: #|$)", TEXT, re.MULTILINE
    ):
        for name in re.findall(r"--[\w-]+", option):
            assert name in known


def test_errors_of_the_rules():
    """The percentages of the text, on standard normal latents."""
    fmt, dims = FORMATS["fp8_ds_mla"], Widths(512, 0)
    rows = np.random.default_rng(0).standard_normal((2000, 512)).astype(np.float32)

    def percent(stored):
        error = fmt.decode(stored, dims) - rows
        return 100 * float(np.sqrt((error**2).mean() / (rows**2).mean()))

    raw, pow2 = (fmt.encode(rows, dims, tile_scale=rule) for rule in ("raw", "pow2"))
    floored = raw.copy()
    scales = np.ascontiguousarray(raw[:, 512:]).view(np.uint32) & np.uint32(0xFF80_0000)
    floored[:, 512:] = scales.view(np.uint8)
    assert f"{percent(raw):.2f} % for `raw`," in TEXT
    assert f"{percent(pow2):.2f} % for `pow2`" in TEXT
    assert f"{percent(floored):.0f} % for `raw` with floored" in TEXT
