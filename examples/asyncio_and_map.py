"""A pool under asyncio, a map over an endless input, and a call that is cancelled while it runs.

.venv/bin/python examples/asyncio_and_map.py
"""

from __future__ import annotations

import asyncio
import itertools
import time

from sandbox_exec import Limits, Pool, context


def smallest_factor(number: int) -> int:
    """The work: find the smallest factor of a number, the slow way."""
    return next(factor for factor in range(2, number + 1) if number % factor == 0)


def waits_for_ever() -> None:
    context().trace("waiting")
    while True:
        time.sleep(1)


def map_over_an_endless_input(pool: Pool) -> None:
    """The input is read only a few calls ahead; the outcomes come in its order, one for each, good or bad."""
    found = 0
    for number, outcome in zip(itertools.count(1), pool.map(smallest_factor, itertools.count(1)), strict=False):
        if not outcome.ok:  # 1 has no factor: the agent raises, and the map goes on
            print(f"  {number}: {outcome.status}, {outcome.error.type if outcome.error else ''}")
        elif outcome.value == number:
            print(f"  {number} is prime")
            found += 1
        if found == 5:
            break  # leaving the loop cancels what was ahead


async def await_calls(pool: Pool) -> None:
    """A future of the pool is one of `concurrent.futures`: wrap it, and await it beside anything else."""
    calls = [asyncio.wrap_future(pool.submit(smallest_factor, number)) for number in (91, 143, 221)]
    outcomes = await asyncio.gather(*calls)
    print("  smallest factors of 91, 143, 221:", *(outcome.unwrap() for outcome in outcomes))


async def give_up_on_a_call(pool: Pool) -> None:
    """Cancelling a call that runs kills it, with all that it started; what it traced until then is there."""
    future = pool.submit(waits_for_ever)
    try:
        await asyncio.wait_for(asyncio.wrap_future(future), timeout=0.5)  # calls future.cancel()
    except TimeoutError:
        outcome = future.result()
        print(f"  {outcome.status}, blame: {outcome.blame}; it traced: {[event['type'] for event in outcome.trace]}")
        print(f"  nothing of it is left: {outcome.kill.proof if outcome.kill else '-'}")


if __name__ == "__main__":
    with Pool(max_workers=2, limits=Limits(timeout_s=5)) as pool:
        print("map:")
        map_over_an_endless_input(pool)
        print("asyncio:")
        asyncio.run(await_calls(pool))
        print("cancel:")
        asyncio.run(give_up_on_a_call(pool))
