"""The scheduler half: which requests are sent or received, what the workers are told, and whose blocks must wait.

It knows vLLM's objects by their attributes only. A request's blocks are kept in three cases:

- sent: from its end until its writes have ended, or nobody has asked for it in time (`Step.held`, `Step.dropped`);
- being received: by vLLM itself, until the workers name it;
- not received in time, or cancelled, while a rank says that writes may still land: one more reference is taken on each
  block before vLLM gives its own back. So the request ends, and its blocks are nobody else's before they are safe.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from fabric_core import BadRange
from fabric_kvcache.vllm.card import Card
from fabric_kvcache.vllm.options import Options
from fabric_kvcache.vllm.params import Recv, key_of, recv_of, send_of
from fabric_kvcache.vllm.steps import Advance, Load, Report, Step
from fabric_kvcache.vllm.waiting import Waiting

__all__ = ["Scheduling"]

log = logging.getLogger("fabric.kvcache.vllm")


class _Sent:
    """A prompt that is to be sent, as far as it is scheduled."""

    def __init__(self, transfer_id: str, total: int) -> None:
        self.transfer_id = transfer_id
        self.total = total
        self.blocks: tuple[list[int], ...] = ()
        self.over = False  #: all of it was computed


class Scheduling:
    """`groups`: the ids of vLLM's KV cache groups that move."""

    def __init__(self, options: Options, groups: Sequence[int], *, producer: bool, consumer: bool) -> None:
        self._options = options
        self._groups = tuple(groups)
        self._producer = producer
        self._consumer = consumer
        self._sent: dict[str, _Sent] = {}
        self._loading: dict[str, Recv] = {}  # allocated, and not ended yet
        self._bad: dict[str, str] = {}  # requests whose parameters were refused, and why
        self._step = Step()
        self._unsafe: dict[str, int] = {}  # ranks where a write may still land
        self._kept: dict[str, list[Any]] = {}  # blocks with one more reference, because of the above
        self._manager: Any = None
        self._totals = Report()  # what was received, of requests that go on
        self._prompts: dict[str, list[int]] = {}  # of what was to be received: tokens, and how many were computed here
        self.card: Card | None = None
        self.waiting = Waiting()

    def bind(self, manager: Any) -> None:
        self._manager = manager

    # ---- a request comes in

    def matched(self, request: Any, computed: int) -> tuple[int, bool]:
        """Return how many tokens will come from elsewhere. No side effects: it is asked again and again."""
        if not self._consumer or request.request_id in self._loading or not self._wants(request):
            return 0, False
        count = request.num_prompt_tokens - computed
        return (count, True) if count > 0 else (0, False)

    def _wants(self, request: Any) -> Recv | None:
        try:
            return recv_of(request.request_id, request.kv_transfer_params)
        except BadRange as error:
            if request.request_id not in self._bad:
                self._bad[request.request_id] = str(error)
                log.warning("request %s is computed here: %s", request.request_id, error)
            return None

    def allocated(self, request: Any, blocks: Any, external: int) -> None:
        """Blocks were allocated for it; `external` tokens of them are to be received."""
        params = request.kv_transfer_params
        if self._producer and request.request_id not in self._sent:
            try:
                transfer_id, key = send_of(request.request_id, params), key_of(params)
            except BadRange as error:
                transfer_id = None
                log.warning("request %s is not sent: %s", request.request_id, error)
                params["do_remote_decode"] = False
            if transfer_id is not None:
                self._sent[request.request_id] = _Sent(transfer_id, request.num_prompt_tokens)
                self.waiting.add(request.request_id, transfer_id, key)
        if not external:
            return
        want = self._wants(request)
        if want is None:
            return
        params["do_remote_prefill"] = False  # a second time, after a preemption, it is computed here
        total = request.num_prompt_tokens
        self._loading[request.request_id] = want
        self._prompts[request.request_id] = [total, 0]
        load = Load(request.request_id, want, self._mine(blocks.get_block_ids()), total - external, total)
        self._step.loads.append(load)

    def _mine(self, blocks: Sequence[Sequence[int]]) -> tuple[list[int], ...]:
        return tuple(list(blocks[group]) for group in self._groups)

    # ---- a step

    def step(self, output: Any) -> Step:
        """Return what the workers are told for this step, which `output` schedules."""
        step, self._step = self._step, Step()
        step.idle = not output.num_scheduled_tokens
        step.unwanted = self.waiting.take()
        step.preempted = {one for one in output.preempted_req_ids or () if one in self._sent}
        for new in output.scheduled_new_reqs:
            self._computes(new.req_id, new.num_computed_tokens, output)
            sent = self._sent.get(new.req_id)
            if sent is not None:
                self._advance(step, new.req_id, sent, new.block_ids, new.num_computed_tokens, output, fresh=True)
        cached = output.scheduled_cached_reqs
        for index, request_id in enumerate(cached.req_ids):
            self._computes(request_id, cached.num_computed_tokens[index], output)
            sent = self._sent.get(request_id)
            if sent is not None:
                resumed = request_id in cached.resumed_req_ids
                blocks, computed = cached.new_block_ids[index], cached.num_computed_tokens[index]
                self._advance(step, request_id, sent, blocks, computed, output, fresh=resumed)
        return step

    def _computes(self, request_id: str, computed: int, output: Any) -> None:
        """Count the tokens of a prompt that are computed here, though they were to come from elsewhere."""
        prompt = self._prompts.get(request_id)
        if prompt is not None:
            end = min(prompt[0], computed + output.num_scheduled_tokens[request_id])
            prompt[1] += max(0, end - computed)

    def _advance(
        self, step: Step, request_id: str, sent: _Sent, blocks: Any, computed: int, output: Any, *, fresh: bool
    ) -> None:
        moved = fresh and bool(sent.blocks)
        if fresh:
            sent.blocks = self._mine(blocks or ())
        elif blocks is not None:
            for mine, new in zip(sent.blocks, self._mine(blocks), strict=True):
                mine.extend(new)
        if sent.over and not moved:
            return
        end = min(sent.total, computed + output.num_scheduled_tokens[request_id])
        first = min(computed, end)
        sent.over = end >= sent.total
        copy = tuple(list(one) for one in sent.blocks)  # what is extended in the next step is not this step's
        step.advances.append(Advance(request_id, sent.transfer_id, copy, first, end, sent.total, moved))

    def reported(self, report: Report | None, ended: set[str], sent: set[str] | frozenset[str] = frozenset()) -> None:
        """Take what the workers say. `ended`: requests whose receiving has ended at every rank, well or not; `sent`:
        those from whose blocks nothing is read any more.

        It is called before vLLM gives back the blocks of those that have ended badly.
        """
        for request_id in sent:
            self.waiting.discard(request_id)
        if report is not None:
            for request_id, count in report.unsafe.items():
                self._unsafe[request_id] = self._unsafe.get(request_id, 0) + count
            for request_id, count in report.safe.items():
                self._unsafe[request_id] = self._unsafe.get(request_id, 0) - count
            self._totals.add(Report(received={k: v for k, v in report.received.items() if k in self._loading}))
        for request_id in ended:
            self._loading.pop(request_id, None)
            if self._unsafe.get(request_id, 0) > 0:
                self._keep(request_id)
        for request_id in [one for one, count in self._unsafe.items() if count <= 0]:
            del self._unsafe[request_id]
            blocks = self._kept.pop(request_id, [])
            if blocks:
                self._manager.block_pool.free_blocks(reversed(blocks))

    def _keep(self, request_id: str) -> None:
        found = self._manager.get_blocks(request_id).blocks
        blocks = [block for group in self._groups for block in found[group] if not block.is_null]
        self._manager.block_pool.touch(blocks)
        self._kept[request_id] = blocks
        log.warning(
            "%d blocks of request %s stay unused until its prefiller has confirmed that it writes no more",
            len(blocks),
            request_id,
        )

    @property
    def busy(self) -> bool:
        """Whether workers must be asked although no request is under way."""
        return bool(self._unsafe or self._kept or self._step.cancelled or self._step.dropped)

    # ---- a request ends

    def finished(self, request: Any, blocks: Sequence[Sequence[int]], *, well: bool) -> tuple[bool, Any]:
        """Return (whether its blocks are kept until the workers name it, its kv_transfer_params)."""
        request_id = request.request_id
        self._bad.pop(request_id, None)
        prompt = self._prompts.pop(request_id, None)
        nbytes, writes, seconds = self._totals.received.pop(request_id, (0, 0, 0.0))
        if request_id in self._loading:  # vLLM keeps its blocks until the workers name it
            self._step.cancelled.add(request_id)
            self.waiting.discard(request_id)
            return False, None
        answer: dict[str, Any] | None = None
        if prompt is not None:
            answer = {
                "fabric": {"bytes": nbytes, "writes": writes, "seconds": round(seconds, 6), "computed": prompt[1]}
            }
        sent = self._sent.pop(request_id, None) or self._unscheduled(request)
        if sent is None:
            return False, answer
        if not well or not sent.over:
            self._step.dropped[request_id] = (sent.transfer_id, "the prefill request was aborted")
            return True, answer
        self._step.held[request_id] = (sent.transfer_id, self._options.hold)
        if self.card is not None:
            answer = {
                **self.card.params(sent.transfer_id),
                "remote_block_ids": [list(blocks[group]) for group in self._groups],
                "remote_num_tokens": sent.total,
            }
        return True, answer

    def _unscheduled(self, request: Any) -> _Sent | None:
        """A prompt that was to be sent and ends before anything of it was scheduled: its decoder must hear of that."""
        try:
            transfer_id = send_of(request.request_id, request.kv_transfer_params) if self._producer else None
        except BadRange:
            return None
        return None if transfer_id is None else _Sent(transfer_id, request.num_prompt_tokens)
