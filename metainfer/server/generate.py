"""Run a job: its choices in parallel, their deltas merged, its metrics kept.

Leaving the generator early cancels whatever still runs in the engine.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from time import perf_counter

from metainfer.core.errors import RequestError
from metainfer.engine.text_stream import Delta
from metainfer.server.deadline import arm
from metainfer.server.prepare import Choice, Job
from metainfer.server.state import ServerState

Item = tuple[Choice, Delta]


async def deltas(state: ServerState, job: Job) -> AsyncGenerator[Item, None]:
    """(choice, delta) as they come, in order within a choice.

    Raises:
        RequestError: refused by the engine, or a choice failed; the other choices are cancelled.
    """
    timer = arm(state, job)
    state.opened(len(job.choices))
    outcome = "cancelled"
    try:
        merged = _one(state, job, job.choices[0]) if len(job.choices) == 1 else _many(state, job)
        async with aclosing(merged) as items:
            async for item in items:
                yield item
        outcome = "finished"
    except RequestError as error:
        outcome = error.code
        raise
    finally:
        if timer is not None:
            timer.cancel()
        state.closed(len(job.choices))
        state.metrics.request_done(job, outcome, perf_counter() - job.arrived)
        if state.traces is not None:
            state.traces.request(job, outcome)


async def _one(state: ServerState, job: Job, choice: Choice) -> AsyncGenerator[Item, None]:
    metrics, times = state.metrics, choice.times
    times.submitted = perf_counter()
    async with aclosing(state.client.submit(choice.request)) as outputs:  # type: ignore[type-var]
        async for output in outputs:
            first = choice.text.completion_tokens == 0
            delta = choice.text.push(output)
            now = perf_counter()
            if delta.tokens:
                if first:
                    times.first, times.queue_s = now, output.queue_s
                    metrics.first_tokens(job, times)
                else:
                    metrics.token_gap.observe(now - times.last, len(delta.tokens))
                times.last = now
            yield choice, delta
            if delta.finish is not None:
                return


async def _many(state: ServerState, job: Job) -> AsyncGenerator[Item, None]:
    merged: asyncio.Queue[Item | BaseException | None] = asyncio.Queue()

    async def run(choice: Choice) -> None:
        try:
            async with aclosing(_one(state, job, choice)) as items:
                async for item in items:
                    merged.put_nowait(item)
            merged.put_nowait(None)
        except Exception as error:  # noqa: BLE001 - handed to the reader, who raises it
            merged.put_nowait(error)

    tasks = [asyncio.ensure_future(run(choice)) for choice in job.choices]
    try:
        running = len(tasks)
        while running:
            item = await merged.get()
            if isinstance(item, BaseException):
                raise item
            if item is None:
                running -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
