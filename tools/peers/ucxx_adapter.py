"""UCXX: tagged messages of its synchronous layer. Its Python has no one-sided write, so the target posts receives.

Requests are not asked for their errors, which takes time: the comparison of the data would tell.
"""

from __future__ import annotations

import importlib
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from adapter import PING, PONG, SMALL, Adapter, Span, anonymous
from harness import main, parse

_DATA, _NOTE, _PING = 1, 2, 3  #: tags
_POSTED = 4096  #: receives posted at a time


class Ucxx(Adapter):
    name = "ucxx"
    distribution = "ucxx-cu12"
    two_sided = True

    def open(self, role: str, nbytes: int) -> bytes:
        np: Any = importlib.import_module("numpy")
        self.api: Any = importlib.import_module("ucxx._lib.libucxx")
        types: Any = importlib.import_module("ucxx.types")
        self.array: Any = importlib.import_module("ucxx._lib.arr").Array
        self.tags = {tag: types.Tag(tag) for tag in (_DATA, _NOTE, _PING)}
        self.exact = types.TagMaskFull
        context = self.api.UCXContext(feature_flags=(self.api.Feature.TAG,))
        self.worker = self.api.UCXWorker(context, enable_delayed_submission=False, enable_python_future=False)
        self.memory = anonymous(nbytes)
        self.bytes = np.frombuffer(self.memory, dtype=np.uint8)
        self.views: dict[Span, Any] = {}
        self.note = self.array(np.zeros(1, dtype=np.uint8))
        self.noted = self.array(np.zeros(1, dtype=np.uint8))
        self.lands_at = PING if role == "target" else PONG
        self.todo: deque[Span] = deque()
        self.posted: deque[Any] = deque()
        return bytes(self.worker.address)

    def connect(self, other: bytes) -> None:
        address = self.api.UCXAddress.create_from_buffer(other)
        self.endpoint = self.api.UCXEndpoint.create_from_worker_address(
            self.worker, address, endpoint_error_handling=False
        )
        self.next_note = self._receive(self.noted, _NOTE)
        self.next_ping = self._receive(self._view((self.lands_at, SMALL)), _PING)

    def _view(self, span: Span) -> Any:
        view = self.views.get(span)
        if view is None:
            view = self.views[span] = self.array(self.bytes[span[0] : span[0] + span[1]])
        return view

    def _receive(self, view: Any, tag: int) -> Any:
        return self.worker.tag_recv(view, self.tags[tag], self.exact)

    def write(self, offset: int, nbytes: int) -> list[Any]:
        return [self.endpoint.tag_send(self._view((offset, nbytes)), self.tags[_DATA])]

    def done(self, operation: list[Any]) -> bool:
        while operation and operation[-1].completed:
            operation.pop()
        if operation:
            self.worker.progress()
        return not operation

    def _send(self, view: Any, tag: int) -> None:
        request = self.endpoint.tag_send(view, self.tags[tag])
        while not request.completed:
            self.worker.progress()

    def notify(self) -> None:
        self._send(self.note, _NOTE)

    def write_notify(self, offset: int, nbytes: int) -> None:
        self._send(self._view((offset, nbytes)), _PING)

    def progress(self) -> None:
        self.worker.progress()

    def expect(self, spans: Sequence[Span]) -> None:
        self.todo.extend(spans)
        self._post()

    def _post(self) -> None:
        while self.todo and len(self.posted) < _POSTED:
            self.posted.append(self._receive(self._view(self.todo.popleft()), _DATA))

    def poll(self) -> int:
        self.worker.progress()
        if self.next_ping.completed:
            self.next_ping = self._receive(self._view((self.lands_at, SMALL)), _PING)
            return 1
        posted = self.posted
        while posted and posted[0].completed:
            posted.popleft()
        if self.todo:
            self._post()
        if self.next_note.completed and not posted:
            self.next_note = self._receive(self.noted, _NOTE)
            return 1
        return 0

    def paged(self, page: int, here: Sequence[int], there: Sequence[int]) -> tuple[Callable[[], list[Any]], int]:
        views = [self._view((k * page, page)) for k in here]
        return lambda: [self.endpoint.tag_send(view, self.tags[_DATA]) for view in views], 0


if __name__ == "__main__":
    main(parse(), Ucxx)
