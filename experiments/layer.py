"""The whole layer: prefill and decode, against references in torch and against other variants."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

if not __package__:
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import typer

from experiments import layer_report
from experiments.cli import VariantFileOption, run_as_script, say, stop
from experiments.compare import gemm_ceiling, run_sessions
from experiments.layer_problems import DECODES, PREFILLS, SWAPS
from experiments.layer_selection import LayerSelection, plan_work
from experiments.layer_session import LayerSession
from experiments.plan import BadOption, import_variant_files
from experiments.results import Run, run_folder
from sandbox.kernels.cuda import no_device_reason


def _spaced(text: str) -> str:
    """A list that a terminal can wrap."""
    return text.replace(",", ", ")


def layer(
    prefill: Annotated[
        str | None,
        typer.Option(
            help="Prefills of one request, new tokens + cached tokens, with commas; none leaves "
            f"them out. By default {_spaced(PREFILLS[True])}; without a GPU "
            f"{_spaced(PREFILLS[False])}."
        ),
    ] = None,
    decode: Annotated[
        str | None,
        typer.Option(
            help="Decodes, requests x cached tokens of each. By default "
            f"{_spaced(DECODES[True])}; without a GPU {_spaced(DECODES[False])}."
        ),
    ] = None,
    dims: Annotated[
        str,
        typer.Option(help="A preset (kimi_k2, kimi_linear, tiny, ...), letters (N=16), or both."),
    ] = "deepseek_v3",
    dtype: Annotated[
        str | None, typer.Option(help="Of weights; by default bfloat16, float32 without a GPU.")
    ] = None,
    cache_format: Annotated[
        str | None,
        typer.Option(
            "--format",
            help="Cache formats, with commas, or all. By default that of the dtype, fp8_e4m3 and "
            "fp8_ds_mla.",
        ),
    ] = None,
    contenders: Annotated[
        str | None,
        typer.Option(help="Of layer, swaps, torch_compiled, huggingface; by default all."),
    ] = None,
    swap: Annotated[
        list[str] | None,
        typer.Option(
            help="op=variant: the layer once more with this variant, on every problem whose step "
            f"runs the op. By default {_spaced(','.join(SWAPS))}, where the cache is plain; on a "
            "GPU for four of the shapes."
        ),
    ] = None,
    variant_file: VariantFileOption = None,
    gate: Annotated[bool, typer.Option("--gate", help="With an output gate.")] = False,
    tp_size: Annotated[int, typer.Option(min=1, help="The heads of one of so many ranks.")] = 1,
    block_size: Annotated[
        int | None, typer.Option(min=1, help="Rows of a cache block; 64, without a GPU 4.")
    ] = None,
    workspace: Annotated[
        int | None,
        typer.Option(min=1, help="Rows of context gathered at once; 16384, without a GPU 8."),
    ] = None,
    budget: Annotated[
        float, typer.Option(help="Seconds of replays a problem; very slow ones take more.")
    ] = 0.5,
    max_autotune: Annotated[
        bool,
        typer.Option("--max-autotune", help="torch.compile tries many kernels; takes minutes."),
    ] = False,
    quick: Annotated[
        bool,
        typer.Option("--quick", help="One prefill, one decode, the plain cache, no swaps."),
    ] = False,
    seed: Annotated[int, typer.Option(help="Of weights and inputs.")] = 0,
    out: Annotated[
        Path | None, typer.Option(help="Folder for results; by default a new one in results/.")
    ] = None,
    timeout: Annotated[
        float, typer.Option(help="Seconds after which a silent contender counts as hung.")
    ] = 600.0,
) -> None:
    """How fast is the whole layer, and which variant matters where?

    One step of a Multi-head Latent Attention layer, prefill over a cached context or decode, for
    each cache format: `layer` with its own choice of variants; `layer[op=variant]` with one
    swapped in; `torch_compiled`, the same in plain torch, absorbed, over a contiguous cache;
    `huggingface`, transformers' attention, which projects the whole context up. All have the same
    weights and inputs, and every output is compared with an oracle first; what is wrong gets no
    time. On a GPU: replays of CUDA graphs in turn, and where a step's time goes, stage by stage.
    Without a GPU: statuses only, a handful of tokens at the model's full width.

    The run ends with what each swap costs, stages, and memory. The exit code is 1 if any contender
    is WRONG or ERROR.

    **Examples**

    - `python -m experiments layer`
    - `python -m experiments layer --quick --dims kimi_linear --gate`
    - `python -m experiments layer --prefill none --decode 64x8192 --format fp8_ds_mla`
    - `python -m experiments layer --swap gather=raw_warp --swap lse_merge=torch`
    - `python -m experiments layer --variant-file my_gather.py --swap gather=my_gather --tp-size 8`

    **Results** are in `results/<run>/`: `rows.jsonl` (every column, raw samples, stages, the
    command that makes the row again), `fingerprint.json`, `table.txt`, `table.md`, PNG plots,
    `report.html`.
    """
    files = tuple(path.resolve() for path in variant_file or ())
    selection = LayerSelection(
        gpu=no_device_reason() is None,
        dims=dims,
        dtype=dtype,
        prefill=prefill,
        decode=decode,
        formats=cache_format,
        contenders=contenders,
        swaps=tuple(swap or ()),
        variant_files=files,
        gate=gate,
        max_autotune=max_autotune,
        tp_size=tp_size,
        block_size=block_size,
        workspace=workspace,
        quick=quick,
        seed=seed,
    )
    try:
        import_variant_files(files)
        work, left_out = plan_work(selection)
    except BadOption as failure:
        raise stop(str(failure)) from None
    if not work:
        raise stop("; ".join(["nothing to run", *left_out]))
    session = LayerSession(
        gpu=selection.gpu,
        work=work,
        reproduce=selection.command,
        variant_files=files,
        mode="max-autotune-no-cudagraphs" if max_autotune else None,
        budget_s=budget / 5 if quick else budget,
        timeout_s=timeout,
    )
    gemm = gemm_ceiling([session])
    run = Run(run_folder("layer", out))
    try:
        interrupted = run_sessions([session], run)
        layer_report.write(run, gemm)
    finally:
        run.close()
    layer_report.show(run.rows, run.folder, gemm)
    for reason in left_out:
        say(f"left out: {reason}")
    if interrupted:
        raise typer.Exit(130)
    if any(row.failed for row in run.rows):
        raise typer.Exit(1)


if __name__ == "__main__":
    run_as_script(layer)
