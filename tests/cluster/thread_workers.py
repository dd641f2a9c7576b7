"""Worker classes that the tests run as threads of this process."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

from rpcrl import Controller, Worker, register

entered = threading.Semaphore(0)
"""Released when a method waits at the gate."""
gate = threading.Event()
"""Lets the methods that wait go on."""
told = threading.Event()
"""Set when a coroutine that waits is cancelled: its worker has been told to end."""
ran: list[int] = []


class Threaded(Worker):
    def __init__(self, base: int = 0) -> None:
        self.base = base
        self.seen = [self.rank]

    @register
    def ranks(self) -> tuple[int, int, int, int]:
        return self.rank, self.world_size, self.node_rank, self.local_rank

    @register
    async def ranks_of_a_coroutine(self) -> list[int]:
        await asyncio.sleep(0)
        return [self.rank, await asyncio.to_thread(lambda: self.rank), *self.seen]

    @register
    def rank_in_a_thread_of_its_own(self) -> str:
        found: list[str] = []

        def look() -> None:
            try:
                found.append(str(self.rank))
            except Exception as error:
                found.append(str(error))

        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
        return found[0]

    @register
    def grow(self, numbers: list[int]) -> list[int]:
        numbers.append(self.base + self.rank)
        return numbers

    @register
    def where(self) -> tuple[int, str]:
        return threading.get_ident(), threading.current_thread().name

    @register
    def say(self, line: str) -> None:
        print(line, flush=True)

    @register
    def open_a_controller(self) -> None:
        Controller(transport="inproc")

    @register
    def meet(self) -> None:
        self.init_process_group()

    @register
    def wait_at_the_gate(self) -> int:
        entered.release()
        if not gate.wait(60):
            raise TimeoutError("the gate was not opened")
        return self.rank

    @register
    def run(self, number: int) -> None:
        ran.append(number)

    @register(concurrent=True)
    async def wait_for_ever(self) -> None:
        entered.release()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            told.set()
            raise

    @register
    def fall(self) -> None:
        raise KeyError("falls")

    @register
    def leave(self) -> None:
        raise SystemExit(3)

    @register
    def neighbour(self, role: str) -> Any:
        return self.colocated(role).base


class FailsToBuild(Worker):
    def __init__(self) -> None:
        if self.rank == 1:
            raise RuntimeError("no such weights: /nowhere")


def wait_until_ended(name: str, within_s: float = 20.0) -> None:
    """Wait until no thread has ``name`` in its name."""
    deadline = time.monotonic() + within_s
    while [thread for thread in threading.enumerate() if name in thread.name]:
        if time.monotonic() > deadline:
            raise TimeoutError(f"threads of {name} still run")
        threading.Event().wait(0.005)
