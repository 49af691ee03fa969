"""The trainer's word to vLLM servers, by HTTP: all instances are told everything at the same time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from vllm.distributed.weight_transfer.clients import HTTPVLLMWeightSyncClient  # type: ignore[import-not-found]

from fabric_core import ConfigError
from fabric_rlweights.vllm.session import UpdateFailed

__all__ = ["FabricHTTPClient"]


class FabricHTTPClient(HTTPVLLMWeightSyncClient):  # type: ignore[misc]
    """vLLM's HTTP client for one instance or several.

    It also empties the caches after an update, for what is in them is of the old weights, and it numbers the workers of
    several instances one after the other, in the order of their addresses.
    """

    def __init__(self, base_url: str | Sequence[str], timeout: float = 300) -> None:
        """`base_url`: of each instance. `timeout`: seconds of a call, more than those of an update."""
        urls = [base_url] if isinstance(base_url, str) else list(base_url)
        if not urls or len(set(urls)) != len(urls):
            raise ConfigError(f"base_url={base_url!r}: the address of each vLLM instance, once")
        super().__init__(urls[0], timeout)
        self._each = [HTTPVLLMWeightSyncClient(url, timeout) for url in urls]

    def workers(self) -> list[int]:
        """How many workers each instance has, data parallel ones too."""
        import requests

        found = []
        for one in self._each:
            response = requests.get(f"{one.base_url}/get_world_size", timeout=self.timeout)
            response.raise_for_status()
            found.append(int(response.json()["world_size"]))
        return found

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        first = [0]
        if len(self._each) > 1:
            for count in self.workers():
                first.append(first[-1] + count)
        told = [{**init_info, "first_rank": rank} if rank else init_info for rank in first]
        self._all(lambda number: self._each[number].init_weight_transfer_engine(told[number]))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        try:
            self._all(lambda number: self._each[number].finish_weight_update(weight_version))
        finally:  # a worker that has new weights has an old cache too, however the others did
            self._all(self._empty)

    def _empty(self, number: int) -> None:
        """Empty an instance's caches. Raises UpdateFailed: it cannot."""
        for force in ("false", "true"):  # vLLM keeps all of it while any request runs, unless those begin once more
            asked = {"reset_external": "true", "reset_running_requests": force}
            if self._ask(number, "reset_prefix_cache", asked).get("success") is not False:
                break
        else:
            raise UpdateFailed(
                f"{self._each[number].base_url} has the new weights and a prefix cache of the old ones, which it does "
                "not empty: POST /pause before an update, and /resume after it"
            )
        self._each[number]._post("reset_encoder_cache")

    def _ask(self, number: int, path: str, params: dict[str, str]) -> dict[str, Any]:
        import requests

        one = self._each[number]
        response = requests.post(f"{one.base_url}/{path}", params=params, timeout=self.timeout)
        response.raise_for_status()
        found: dict[str, Any] = response.json()
        return found

    def _post(self, path: str, json: dict[str, Any] | None = None) -> None:
        self._all(lambda number: self._each[number]._post(path, json))

    def _all(self, call: Callable[[int], None]) -> None:
        """Call for each instance, all at once. Raises the first of their errors when all have ended."""
        if len(self._each) == 1:
            return call(0)
        with ThreadPoolExecutor(len(self._each), thread_name_prefix="fabric-rl-vllm") as threads:
            calls = [threads.submit(call, number) for number in range(len(self._each))]
        for one in calls:
            one.result()
        return None
