"""Two prefillers, two decoders, one prefiller killed in the middle of a request: the other one does it instead.

This process is the scheduler: a `Registry` over a fixed list chooses a prefiller for each decoder's request. The
prefiller that is to die pushes half of its layers, says so and stands still; then it is killed with SIGKILL. Its
decoder finds it lost, and is told of the other one. Both decoders then do it all in one process, and compare.
"""

from __future__ import annotations

import os
import secrets
import signal
from collections.abc import Callable

from fabric_core.cli.guard import PEER
from fabric_kvcache.demo.decoder import PROMPT_TWO
from fabric_kvcache.demo.launch import Demo, DemoFailed, Event, Options, same
from fabric_kvcache.demo.report import Failed, Halfway, Killed, KvFleet, Prefilled, Result, Task, Text
from fabric_kvcache.directory import Member, StaticDirectory
from fabric_kvcache.registry import Choice, NobodyThere, Registry

__all__ = ["Fleet", "run_fleet"]

_LOAD_TIMEOUT = 900.0  # seconds: importing torch and reading the model four times, on a busy machine with a cold disk
_SLACK = 20.0  # seconds
_SEED = 1
_DOOMED = "prefiller0"
_PREFILLERS = (_DOOMED, "prefiller1")
_DECODERS = ("decoder0", "decoder1")


def _ignore(_: Text) -> None:
    """Two decoders generate at a time: their texts are shown when they are whole."""


class Fleet(Demo):
    """Four processes. A context manager, as `Demo`."""

    def __init__(self, options: Options, on_stage: Callable[[str], None]) -> None:
        super().__init__(options, _ignore, on_stage)
        self.prompts = dict(zip(_DECODERS, (options.prompt, PROMPT_TWO), strict=True))
        self.choices: dict[str, Choice] = {}
        self.results: dict[str, Result] = {}
        self.prefilled: list[Prefilled] = []
        self.failures: list[Failed] = []
        self.victim: Killed | None = None
        self.registry = Registry(StaticDirectory([]))

    def run_fleet(self) -> KvFleet:
        """Run it. Raises DemoFailed."""
        self.on_stage("starting two prefillers and two decoders, each loads the model ...")
        self._start_all(max(len(prompt.encode()) for prompt in self.prompts.values()))
        self._until(lambda: len(self.ready) == len(self.children), _LOAD_TIMEOUT, "loading the model")
        addresses = {name: self.ready[name].address for name in _PREFILLERS}
        members = [Member(name=name, role="prefiller", addresses=(at,)) for name, at in addresses.items()]
        self.registry = Registry(StaticDirectory(members), seed=_SEED, hold=_LOAD_TIMEOUT)
        for name in _DECODERS:
            self._give_work(name)
        # Prefill and transfer twice for a retried request, and all of it once more in one process.
        limit = 4 * self.options.timeout + self.options.max_new_tokens * 4.0 + _SLACK
        self._until(self._complete, limit, "prefill, transfer and generation", self._heard)
        assert self.victim is not None
        results = [self.results[name] for name in _DECODERS]
        retried = [result for result in results if len(result.asked) > 1]
        return KvFleet(
            equal=all(same(result) for result in results)
            and [result.asked[0] for result in retried] == [self.victim.address],
            decoders=results,
            prefillers=self.prefilled,
            killed=self.victim,
            failures=self.failures,
        )

    def _start_all(self, room: int) -> None:
        token = secrets.token_hex(4)
        pool = ["--pool-tokens", str(min(room + 256, 1 << 16))]
        for name in _PREFILLERS:
            role = ["--requests", "1", "--hold"] if name == _DOOMED else ["--requests", str(len(_DECODERS))]
            self._start("prefiller", ["--name", f"{name}-{token}", *pool, *role], name)
        for name in _DECODERS:
            limits = ["--timeout", str(self.options.timeout), "--max-new-tokens", str(self.options.max_new_tokens)]
            self._start("decoder", ["--name", f"{name}-{token}", *limits], name)

    def _give_work(self, decoder: str) -> None:
        """Choose a prefiller for a decoder."""
        try:
            choice = self.choices[decoder] = self.registry.choose("prefiller")
        except NobodyThere as error:
            raise DemoFailed(PEER, f"nobody is left for {decoder}: {error}") from None
        self.on_stage(f"{decoder} asks {choice.member.name}")
        self._tell(decoder, Task(prefiller=choice.addresses[0], prompt=self.prompts[decoder], retry=True))

    def _heard(self, name: str, event: Event) -> None:
        if isinstance(event, Halfway):
            process = self.children[name].process
            ready = self.ready[name]
            self.victim = Killed(
                name=name, address=ready.address, pid=process.pid,
                request_id=event.request_id, layers=event.layers, of=event.of,
            )  # fmt: skip
            self.killed.add(name)
            os.kill(process.pid, signal.SIGKILL)
            self.on_stage(f"{name} was killed after {event.layers} of {event.of} layers")
        elif isinstance(event, Failed):
            self.failures.append(event)
            self.on_stage(f"{name}: {event.message}")
            self.choices[name].failed()
            self._give_work(name)
        elif isinstance(event, Result):
            self.results[name] = event
            self.choices[name].done()
        elif isinstance(event, Prefilled):
            self.prefilled.append(event)

    def _complete(self) -> bool:
        return len(self.results) == len(_DECODERS) and len(self.prefilled) == len(_DECODERS)


def run_fleet(options: Options, on_stage: Callable[[str], None]) -> KvFleet:
    """Run the demo with four processes. Raises DemoFailed with a sentence for people and the exit code."""
    with Fleet(options, on_stage) as fleet:
        return fleet.run_fleet()
