"""`python -m experiments <name>`."""

import typer

from experiments.cache_error import cache_error
from experiments.compare import compare
from experiments.conformance import conformance
from experiments.doctor import doctor
from experiments.layer import layer
from experiments.listing import list_ops
from experiments.planner_speed import planner_speed
from experiments.replay import replay_trace
from experiments.resources import resources

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode="markdown",
    help="""Experiments with kernels of Multi-head Latent Attention.

    Start with **doctor** (what this machine can do), then **list** (ops and variants),
    then **compare** (which variant is right, and how fast), then **layer** (which variant matters
    in a whole layer, and what that is worth against torch); **resources** compiles the
    kernels for every GPU. About cache formats: **conformance** (do writers and readers, yours
    too, agree byte for byte) and **cache_error** (what a format costs in accuracy). Without
    kernels: **replay** (which batches, chunks and memory a request trace makes) and **planner**
    (how long planning a step takes).""",
)
app.command("compare")(compare)
app.command("layer")(layer)
app.command("list")(list_ops)
app.command("doctor")(doctor)
app.command("planner")(planner_speed)
app.command("replay")(replay_trace)
app.command("resources")(resources)
app.command("cache_error")(cache_error)
app.command("conformance")(conformance)

if __name__ == "__main__":
    app()
