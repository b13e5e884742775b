"""What a layer's run shows and writes: tables, plots, one HTML page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from experiments import layer_tables, report, tables
from experiments.cli import console, say, say_verdict
from experiments.compare import gemm_text
from experiments.fingerprint import command_line, fingerprint
from experiments.layer_rows import LayerRow
from experiments.results import Run

PAGE = report.Page(
    "The whole MLA layer",
    """
A step is all of a layer: projections, norms, RoPE, the write to the paged cache, attention over the
cached context and the new tokens, output projection. Each contender has the same weights and
inputs; contexts are random latents that were written to the cache in its format. It is first
compared, every output, with an oracle that takes what the cache restores to, in float64 on a CPU
and in float32 on a GPU: error/allowed is the larger of the rms of a token's errors and of its
largest error, each over the rms of that token's values and over what the dtype allows, for the
worst token. The layer's rows in the cache are compared too. A contender that is not PASSED has no
time, and outputs are made NaN before the timed loop and compared again after it. Times are of
replays of a CUDA graph of one step, queued behind other work, the contenders' in turn; L2 is "cold"
where a step moves more than twice the L2 cache. x layer is the plain layer's time over the
contender's. The limit is the longer of two: a device-to-device copy of as many bytes, in the same
rounds (weights once, cached rows once, hidden states in and out), and the step's FLOPs at the rate
of a bf16 GEMM of 8192 x 8192 x 8192. Eager call is the host time of a step from Python. own MB is
the workspace that the layers of a problem share, or the most that a step takes from torch.
Stages are differences of events in eager steps on one stream, behind other work: a step on a GPU
computes some of them side by side. torch_compiled is a page of torch: absorbed decode by batched
products, prefill by SDPA, over a contiguous cache that is restored before; huggingface is
transformers' attention, which projects keys and values of the whole context up at every step.
Host seconds are the time of a check on the CPU and say nothing about a GPU.
""",
    layer_tables.columns_for,
    layer_tables.sections,
)


def write(run: Run, gemm: float | str | None) -> None:
    """Fingerprint, tables, plots and the page, beside the rows."""
    from experiments import layer_plots  # matplotlib takes a second to import

    rows, folder = run.rows, run.folder
    found = {**fingerprint(command_line()), "bf16_gemm_tflop_per_s": gemm}
    run.write_json("fingerprint.json", found)
    columns = layer_tables.columns_for(rows)
    text = tables.text_table("layer", rows, columns)
    markdown = tables.markdown_table("layer", rows, columns)
    for heading, lines in layer_tables.sections(rows):
        text += f"\n{heading}\n" + "".join(f"  {line}\n" for line in lines)
        markdown += f"\n### {heading}\n\n" + "".join(f"- {line}\n" for line in lines)
    (folder / "table.txt").write_text(text)
    (folder / "table.md").write_text(markdown)
    report.write(folder / "report.html", rows, found, layer_plots.plot(rows, folder), PAGE)


def show(rows: Sequence[LayerRow], folder: Path, gemm: float | str | None) -> None:
    """The run on the terminal."""
    columns = layer_tables.columns_for(rows)
    for style, line in tables.text_lines("layer", rows, columns=columns):
        console.print(line, style=style, highlight=False, markup=False, soft_wrap=True)
    for heading, lines in layer_tables.sections(rows):
        say(heading, "bold")
        for line in lines:
            say(f"  {line}", indent=4)
    if gemm is not None:
        say(f"bf16 GEMM 8192 x 8192 x 8192: {gemm_text(gemm)}")
    for line in tables.failures(rows):
        console.print(line, style="red", highlight=False, markup=False, soft_wrap=True)
    say_verdict(rows, folder)
