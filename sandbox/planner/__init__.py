"""Plans of a step: batches, context chunks, workspaces, context parallelism. No kernel, no GPU."""

from sandbox.planner.batch import (
    PAD_SLOT,
    Batch,
    Order,
    Split,
    decodes_first,
    plan_batch,
    single_token_rows,
    slot_mapping,
    split_decodes_and_prefills,
    token_positions,
    token_requests,
)
from sandbox.planner.chunks import Chunk, ContextPlan, plan_context_chunks
from sandbox.planner.context_parallel import ContextParallel
from sandbox.planner.decode import DecodePlanner
from sandbox.planner.packed import Packed, pack
from sandbox.planner.pieces import RowPadding
from sandbox.planner.plan import Plan, plan_step
from sandbox.planner.report import Report, report
from sandbox.planner.strategies import STRATEGIES
from sandbox.planner.workspace import Workspace, size_workspace, workspace_of

__all__ = [
    "PAD_SLOT",
    "STRATEGIES",
    "Batch",
    "Chunk",
    "ContextParallel",
    "ContextPlan",
    "DecodePlanner",
    "Order",
    "Packed",
    "Plan",
    "Report",
    "RowPadding",
    "Split",
    "Workspace",
    "decodes_first",
    "pack",
    "plan_batch",
    "plan_context_chunks",
    "plan_step",
    "report",
    "single_token_rows",
    "size_workspace",
    "slot_mapping",
    "split_decodes_and_prefills",
    "token_positions",
    "token_requests",
    "workspace_of",
]
