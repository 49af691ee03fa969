"""Scheduler halves for tests, and what requests to them say."""

from __future__ import annotations

from vllm_fakes import Block, FakeBlocks, FakeManager

from fabric_kvcache.vllm.options import Options
from fabric_kvcache.vllm.scheduling import Scheduling

FROM = {"do_remote_prefill": True, "remote_addresses": ["local:p"], "transfer_id": "t"}
TO = {"do_remote_decode": True, "transfer_id": "t"}


def half(*, groups: tuple[int, ...] = (0,), producer: bool = False, consumer: bool = False) -> Scheduling:
    made = Scheduling(Options(hold=7.0), groups, producer=producer, consumer=consumer)
    made.bind(FakeManager())
    return made


def blocks(*groups: list[int]) -> FakeBlocks:
    return FakeBlocks(tuple([Block(number, is_null=number == 0) for number in group] for group in groups))
