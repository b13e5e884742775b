"""Batches as a server forms them, from a request trace or from a seeded generator."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from sandbox.kernels.case import Workload

PREFIX_BLOCK = 512
"""Tokens that one id of `hash_ids` stands for."""
LENGTHS = {"input_length": (1, 1 << 24), "output_length": (0, 1 << 20)}
"""Least and most tokens; what is longer is a mistake, and its batches would take hours."""


class TraceError(ValueError):
    """A trace file cannot be read; the message names the file and the line."""


@dataclass(frozen=True)
class Request:
    """One request: arrival in ms, tokens in and out, ids of the prompt's 512-token blocks."""

    timestamp: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]


def read_trace(path: Path) -> list[Request]:
    """Requests of a JSON Lines file, in the order of their timestamps.

    Each line is an object with `timestamp` (ms), `input_length`, `output_length` (tokens) and
    `hash_ids` (one integer for each 512-token block of the prompt); other keys are ignored.

    Raises:
        TraceError: the file is missing, empty, no text, or a line is malformed.
    """
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as failure:
        raise TraceError(f"{path}: {failure.strerror}") from failure
    requests = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                requests.append(_request(json.loads(line.decode())))
            except UnicodeDecodeError as failure:
                raise TraceError(f"{path}, line {number}: not UTF-8 text") from failure
            except json.JSONDecodeError as failure:
                raise TraceError(
                    f"{path}, line {number}: expected a JSON object a line ({failure.msg})"
                ) from failure
            except (ValueError, TypeError, RecursionError) as failure:
                raise TraceError(f"{path}, line {number}: {failure}") from failure
    if not requests:
        raise TraceError(f"{path}: no request in it")
    return sorted(requests, key=lambda request: request.timestamp)


def _request(fields: object) -> Request:
    if not isinstance(fields, dict):
        raise ValueError(f"expected an object, got {type(fields).__name__}")
    for key in ("timestamp", "input_length", "output_length", "hash_ids"):
        if key not in fields:
            raise ValueError(f"{key} is missing")
    timestamp = fields["timestamp"]
    if type(timestamp) not in (int, float) or not 0 <= timestamp < 1e18:
        raise ValueError(f"timestamp is {timestamp!r}, expected milliseconds from 0 on")
    for key, (least, most) in LENGTHS.items():
        if type(fields[key]) is not int or not least <= fields[key] <= most:
            raise ValueError(
                f"{key} is {fields[key]!r}, expected an integer from {least} to {most}"
            )
    ids = fields["hash_ids"]
    if not isinstance(ids, list) or any(type(each) is not int for each in ids):
        raise ValueError("hash_ids is not a list of integers")
    return Request(timestamp, fields["input_length"], fields["output_length"], tuple(ids))


@dataclass(frozen=True)
class Generator:
    """A seeded stream of conversations with the shape of a chat service's traffic.

    Arrivals are Poisson; lengths are log-normal, cut at `input_longest` and `output_longest`; a
    request continues an earlier one, whose whole prompt is then its prefix, with probability
    `continues`; all prompts share their first block (the system prompt).
    """

    requests: int = 400
    arrivals_per_second: float = 3.4
    input_median: float = 7000.0
    input_sigma: float = 1.2
    output_median: float = 300.0
    output_sigma: float = 1.0
    input_longest: int = 131072
    output_longest: int = 2000
    continues: float = 0.4

    def __call__(self, seed: int) -> list[Request]:
        """The requests of `seed`, in order of arrival."""
        rng = np.random.default_rng(seed)
        made: list[Request] = []
        clock, fresh = 0.0, 1
        for _ in range(self.requests):
            clock += rng.exponential(1000.0 / self.arrivals_per_second)
            length = _log_normal(rng, self.input_median, self.input_sigma, self.input_longest)
            prefix: tuple[int, ...] = (0,)
            if made and rng.random() < self.continues:
                earlier = made[int(rng.integers(len(made)))]
                prefix = earlier.hash_ids
                length = min(self.input_longest, earlier.input_length + max(1, length // 4))
            blocks = -(-length // PREFIX_BLOCK)
            ids = prefix[:blocks] + tuple(range(fresh, fresh + max(0, blocks - len(prefix))))
            fresh += blocks
            output = _log_normal(rng, self.output_median, self.output_sigma, self.output_longest)
            made.append(Request(round(clock, 3), length, output, ids))
        return made


def _log_normal(rng: np.random.Generator, median: float, sigma: float, longest: int) -> int:
    return int(min(longest, max(1, rng.lognormal(math.log(median), sigma))))


def split_prefixes(requests: Sequence[Request]) -> list[tuple[int, int]]:
    """Per request the prompt tokens already cached and those to compute.

    Requests are taken in order with a cache that forgets nothing: the leading run of block ids
    that an earlier request had is cached, but never the whole prompt.
    """
    seen: set[int] = set()
    split = []
    for request in requests:
        hits = 0
        while hits < len(request.hash_ids) and request.hash_ids[hits] in seen:
            hits += 1
        seen.update(request.hash_ids)
        cached = min(hits * PREFIX_BLOCK, request.input_length - 1)
        split.append((cached, request.input_length - cached))
    return split


@dataclass(frozen=True)
class Server:
    """A simple continuous-batching server.

    A step takes `step_ms`. It computes one token of each request that is generating, then, first
    come first served, prompt tokens up to `token_budget` in all: long prompts go in chunks. At
    most `max_requests` are in progress; the others wait.
    """

    token_budget: int = 8192
    max_requests: int = 256
    step_ms: float = 50.0


@dataclass(frozen=True)
class Step:
    """One batch: contexts of the generating requests, (context, query) of each prompt chunk."""

    decode_contexts: np.ndarray
    prefills: tuple[tuple[int, int], ...]


def serve(requests: Sequence[Request], server: Server) -> Iterator[Step]:
    """The steps of `server`, in order; steps with nothing to do are left out."""
    if not 0 < server.max_requests < server.token_budget:
        raise ValueError("max_requests must be positive and below token_budget")
    prompts = split_prefixes(requests)
    contexts = np.zeros(0, np.int64)
    tokens_left = np.zeros(0, np.int64)
    partial: list[list[int]] = []  # request, context so far, prompt tokens left
    arrived, clock = 0, 0.0
    while arrived < len(requests) or partial or contexts.size:
        if not partial and not contexts.size:
            clock = max(clock, requests[arrived].timestamp)
        while (
            arrived < len(requests)
            and requests[arrived].timestamp <= clock
            and len(partial) + contexts.size < server.max_requests
        ):
            partial.append([arrived, *prompts[arrived]])
            arrived += 1
        budget = server.token_budget - contexts.size
        prefills = []
        for prompt in partial:
            chunk = min(prompt[2], budget)
            if chunk:
                prefills.append((prompt[1], chunk))
                prompt[1] += chunk
                prompt[2] -= chunk
                budget -= chunk
        yield Step(contexts, tuple(prefills))
        going_on = tokens_left > 1
        contexts, tokens_left = contexts[going_on] + 1, tokens_left[going_on] - 1
        finished = [prompt for prompt in partial if not prompt[2]]
        partial = [prompt for prompt in partial if prompt[2]]
        # The prompt's last chunk gives the first output token.
        outputs = np.array([requests[p[0]].output_length - 1 for p in finished], np.int64)
        starting = np.array([p[1] for p in finished], np.int64)
        contexts = np.concatenate([contexts, starting[outputs > 0]])
        tokens_left = np.concatenate([tokens_left, outputs[outputs > 0]])
        clock += server.step_ms


def pick(steps: Sequence[Step], count: int) -> list[int]:
    """Indices of `count` representative steps, in order.

    Every fourth is a step that only generates, the others have prompt chunks; each kind is spread
    evenly over the run up to the last prompt. Where there are too few of a kind, the other fills
    up.
    """
    prompts = [index for index, step in enumerate(steps) if step.prefills]
    decode_only = sorted(set(range(prompts[-1] if prompts else 0)) - set(prompts))
    decodes = min(len(decode_only), max(count // 4, count - len(prompts)))
    return sorted(_spread(prompts, count - decodes) + _spread(decode_only, decodes))


def _spread(places: list[int], count: int) -> list[int]:
    count = min(count, len(places))
    return [places[(2 * i + 1) * len(places) // (2 * count)] for i in range(count)]


def workload(name: str, step: Step) -> Workload:
    """The step's lengths, generating requests first."""
    contexts = (*step.decode_contexts.tolist(), *(context for context, _ in step.prefills))
    queries = (1,) * step.decode_contexts.size + tuple(query for _, query in step.prefills)
    return Workload(name, tuple(contexts), queries)


def batches(
    requests: Sequence[Request], count: int, source: str, server: Server | None = None
) -> list[Workload]:
    """`count` representative batches of a server under these requests, named after `source`."""
    steps = list(serve(requests, server or Server()))
    return [workload(f"{source}_step{index}", steps[index]) for index in pick(steps, count)]


@dataclass(frozen=True)
class Limits:
    """How much of a batch a machine without GPU can take in the time of an experiment."""

    requests: int
    context_tokens: int
    query_tokens: int


@dataclass(frozen=True)
class Scaled:
    """A workload whose lengths were divided by `factor` and of whose requests one in `stride`
    was kept."""

    workload: Workload
    factor: int = 1
    stride: int = 1

    @property
    def description(self) -> str:
        """What was done, in words; empty where nothing was."""
        done = [f"lengths divided by {self.factor}"] if self.factor > 1 else []
        done += [f"1 in {self.stride} requests"] if self.stride > 1 else []
        return ", ".join(done)


def divide(original: Workload, factor: int, stride: int = 1) -> Scaled:
    """Lengths over `factor`, rounded up, so that only zero stays zero; the last of every `stride`
    requests, so that the prompt chunks, which come last, are not all lost."""
    if factor == stride == 1:
        return Scaled(original)

    def lens(values: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(-(-n // factor) for n in values[::-1][::stride][::-1])

    name = original.name + f"_div{factor}" * (factor > 1) + f"_1in{stride}" * (stride > 1)
    contexts, queries = lens(original.context_lens), lens(original.query_lens)
    return Scaled(Workload(name, contexts, queries), factor, stride)


def scale_down(original: Workload, limits: Limits) -> Scaled:
    """The workload within `limits`: fewer requests first, then lengths over a power of two."""
    stride = -(-len(original.query_lens) // limits.requests) or 1
    factor = 1
    while True:
        scaled = divide(original, factor, stride)
        small = (
            scaled.workload.context_tokens <= limits.context_tokens
            and scaled.workload.query_tokens <= limits.query_tokens
        )
        if small or factor > max((*original.context_lens, *original.query_lens), default=1):
            return scaled
        factor *= 2
