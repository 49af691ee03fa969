"""An instance that registers with a torch TCPStore: `registry_peer.py PORT NAME ROLE LEASE`. Lines on stdin: role ROLE,
load N, drain, close. Answers each with a line on stdout."""

from __future__ import annotations

import sys
from datetime import timedelta

from torch.distributed import TCPStore

from fabric_kvcache.directory import StoreDirectory


def main() -> None:
    port, name, role, lease = sys.argv[1:]
    store = TCPStore("127.0.0.1", int(port), is_master=False, wait_for_workers=False, timeout=timedelta(seconds=20))
    load = [0]
    registration = StoreDirectory(store).register(
        name,
        "prefiller" if role == "prefiller" else "decoder",
        [f"local:{name}"],
        lease=float(lease),
        load=lambda: load[0],
    )
    print("registered", flush=True)
    for line in sys.stdin:
        verb, _, word = line.strip().partition(" ")
        if verb == "role":
            registration.change(role="prefiller" if word == "prefiller" else "decoder")
        elif verb == "drain":
            registration.change(state="draining")
        elif verb == "load":
            load[0] = int(word)
        elif verb == "close":
            registration.close()
        print(f"{verb} done", flush=True)


if __name__ == "__main__":
    main()
