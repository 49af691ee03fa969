"""The demo: a small real model, a process that fills its KV cache, and another one that goes on from there.

    python -m fabric_kvcache.demo.prefiller --name prefiller0
    python -m fabric_kvcache.demo.decoder --prefiller local:prefiller0 --prompt "..."

`fabric demo kv` starts both and compares with one process that does it all. Nothing here is imported by the library.
"""

from __future__ import annotations
