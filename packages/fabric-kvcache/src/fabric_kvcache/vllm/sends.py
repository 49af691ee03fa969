"""The prefill side in a worker: prompts are pushed layer by layer while the engine computes them.

    begin(step)         before the forward pass: which tokens it computes, of which prompts
    layers()(number)    after each layer, in the model's thread; with None at the end of the pass
    end(step)           after the forward pass
    poll()              at the end of each step: whose blocks may be used by others now

A decoder may ask before its prompt is computed, meanwhile, or afterwards. What was computed before it asked goes at
once. Nothing here waits for a peer, except where blocks are about to be taken away in the middle of a prompt.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from fabric_core import FabricError, WaitTimeout
from fabric_kvcache.hook import LayerHook
from fabric_kvcache.prefiller import Prefiller
from fabric_kvcache.vllm.caches import Caches
from fabric_kvcache.vllm.gone import Gone
from fabric_kvcache.vllm.outgoing import Outgoing
from fabric_kvcache.vllm.steps import Report, Step

__all__ = ["Sends"]

log = logging.getLogger("fabric.kvcache.vllm")

_LONGEST_DRAIN = 10.0  # seconds: what a preemption waits for writes to end


class Sends:
    """Of one worker. One thread, but for what `layers` returns."""

    def __init__(
        self,
        prefiller: Prefiller,
        caches: Caches,
        *,
        drain: Callable[[], object] = lambda: None,
        settle: Callable[[], object] = lambda: None,
    ) -> None:
        """On a device that computes behind the host's back: `drain()` waits until no call of what `layers` returned is
        to come, `settle()` until what it was given is computed."""
        self._prefiller = prefiller
        self._caches = caches
        self._drain, self._settle = drain, settle
        self._prompts: dict[str, Outgoing] = {}
        self._gone = Gone(prefiller)
        self._hooks: list[tuple[Outgoing, LayerHook]] = []
        self.report = Report()

    # ---- a step

    def begin(self, step: Step) -> None:
        for request_id in step.preempted:
            prompt = self._prompts.get(request_id)
            if prompt is not None:
                self._move(prompt)
        self._hooks = []
        asked = self._prefiller.asked if step.advances else frozenset()
        for advance in step.advances:
            prompt = self._prompts.get(advance.request_id)
            if prompt is None:
                prompt = self._prompts[advance.request_id] = Outgoing(
                    advance.request_id, advance.transfer_id, advance.total, advance
                )
            prompt.moved |= advance.moved
            prompt.last = advance
            prompt.ready = self._caches.done(advance.first, advance.total)
            if prompt.transfer_id in asked:
                self._take(prompt)
            self._push_ready(prompt)
            self._hook(prompt)
        for request_id, (transfer_id, hold) in step.held.items():
            prompt = self._prompts.setdefault(request_id, Outgoing.unknown(request_id, transfer_id))
            prompt.finished, prompt.until = True, time.monotonic() + hold
        for request_id, (transfer_id, reason) in step.dropped.items():
            prompt = self._prompts.setdefault(request_id, Outgoing.unknown(request_id, transfer_id))
            prompt.finished, prompt.error = True, prompt.error or reason
        for prompt in (self._prompts[one] for one in step.unwanted & self._prompts.keys()):
            prompt.until = 0.0 if prompt.finished else prompt.until

    def layers(self) -> Callable[[int | None], None]:
        """Return what is to be called with the number of each layer of this step that is in the cache. It never raises.

        None: all are, also those that the engine has no hook for. It may be called after the next step has begun, and
        by another thread, which `drain` then waits for.
        """
        hooks = self._hooks

        def ready(number: int | None) -> None:
            for prompt, hook in hooks:
                if not prompt.error:
                    try:
                        for layer in hook.left if number is None else (number,):
                            hook(layer)
                    except FabricError as error:
                        self._failed(prompt, error)

        return ready

    def end(self, step: Step) -> None:
        for advance in step.advances:
            prompt = self._prompts.get(advance.request_id)
            if prompt is not None:
                prompt.ready = self._caches.done(advance.end, advance.total)

    def poll(self) -> set[str]:
        """Take what was asked for, end what has ended, and return the ids of requests whose blocks are free."""
        asked, free = self._prefiller.asked, set[str]()
        withdrawn = self._prefiller.withdrawn if self._prompts else frozenset()
        self._gone.refuse(asked, {prompt.transfer_id for prompt in self._prompts.values()})
        for prompt in list(self._prompts.values()):
            if prompt.job is None and not prompt.over and prompt.transfer_id in withdrawn:
                self._failed(prompt, "its decoder has cancelled it")
            if prompt.transfer_id in asked:
                self._take(prompt)
                self._push_ready(prompt)
            if self._over(prompt) and prompt.finished:
                free.add(prompt.request_id)
                del self._prompts[prompt.request_id]
                self._gone.add(prompt.transfer_id, prompt.error or "it was sent already")
        return free

    @property
    def waiting(self) -> int:
        """Prompts whose blocks are not free yet."""
        return len(self._prompts)

    # ---- one prompt

    def _take(self, prompt: Outgoing) -> None:
        if prompt.job is not None or prompt.error or prompt.over:
            return
        try:
            prompt.job = self._prefiller.take(prompt.transfer_id, 0)
        except WaitTimeout:
            return
        except FabricError as error:
            self._failed(prompt, error)
            return
        total = self._caches.whole(prompt.total)
        if prompt.job.total != total:
            self._failed(
                prompt,
                f"the decoder asked for {prompt.job.total} units of {self._caches.granule} tokens, the prompt has "
                f"{prompt.total} tokens: both must be given the same prompt",
            )

    def _use(self, prompt: Outgoing, upto: int) -> None:
        """Tell the job which pages hold the prompt's first `upto` granules."""
        assert prompt.job is not None
        if upto > prompt.upto or prompt.moved:
            tables = self._caches.tables(prompt.last.blocks)
            prompt.job.use(tables, upto=upto, moved=prompt.moved)
            prompt.upto, prompt.moved = upto, False

    def _push_ready(self, prompt: Outgoing) -> None:
        """Push what is in the cache, and was not pushed yet."""
        job = prompt.job
        if job is None or prompt.error:
            return
        first = max(prompt.pushed, min(job.start, prompt.ready))
        if first >= prompt.ready:
            return
        self._settle()
        try:
            self._use(prompt, prompt.ready)
            job.push_all(first, prompt.ready)
            prompt.pushed = prompt.ready
        except FabricError as error:
            self._failed(prompt, error)

    def _hook(self, prompt: Outgoing) -> None:
        """Have this step's granules pushed by the layers as they become ready."""
        job, advance = prompt.job, prompt.last
        end = self._caches.done(advance.end, advance.total)
        if job is None or prompt.error or end <= prompt.pushed:
            return
        first = max(prompt.pushed, job.start)
        if first < end:
            try:
                self._use(prompt, end)
                self._hooks.append((prompt, job.hook(first, end)))
            except FabricError as error:
                self._failed(prompt, error)
                return
        prompt.pushed = end

    def _move(self, prompt: Outgoing) -> None:
        """Its blocks are about to be another's: wait for what is being read from them."""
        prompt.moved = True
        prompt.ready = 0
        self._drain()
        limit = time.monotonic() + _LONGEST_DRAIN
        while prompt.job is not None and not prompt.job.idle:
            if time.monotonic() > limit:
                self._failed(prompt, "it was preempted while its decoder did not take what was sent")
                break
            time.sleep(0.0002)

    def _failed(self, prompt: Outgoing, why: FabricError | str) -> None:
        if not prompt.error:
            prompt.error = str(why)
            log.warning("request %s (%s) is not sent: %s", prompt.request_id, prompt.transfer_id, why)

    def _over(self, prompt: Outgoing) -> bool:
        """Whether it is over; end it if it can be ended now."""
        job = prompt.job
        if job is None:
            if not prompt.over and prompt.finished and time.monotonic() > prompt.until:
                self._failed(prompt, "no decoder has asked for it in time" if prompt.until else "its client has left")
            return prompt.over or bool(prompt.error)
        if not prompt.error and job.cancelled and not job.whole:
            self._failed(prompt, "its decoder has cancelled it, or is lost")
        if prompt.error and not prompt.stopped:
            prompt.stopped = True
            job.stop(prompt.error)
        if not job.idle or not (prompt.error or job.whole):
            return False
        prompt.job, prompt.over = None, True
        try:
            if prompt.stopped:
                job.abandon(prompt.error)
            else:
                job.finish()
                self.report.sent[prompt.request_id] = (
                    sum(push.nbytes for push in job.pushes),
                    sum(push.writes for push in job.pushes),
                )
        except FabricError as error:
            self._failed(prompt, error)
        return True

    def close(self) -> None:
        """Stop what is under way; the prefiller may be closed afterwards."""
        for prompt in self._prompts.values():
            if prompt.job is not None:
                prompt.job.abandon("the prefill engine shuts down")
        self._prompts.clear()
