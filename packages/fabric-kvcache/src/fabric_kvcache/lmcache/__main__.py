"""`python -m fabric_kvcache.lmcache ...`: LMCache's own command, in which the channel `fabric` is known."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from fabric_kvcache.lmcache import register

__all__ = ["load_timeout", "main"]


def load_timeout(words: Sequence[str]) -> float:
    """Return the --p2p-load-timeout of LMCache's command line (seconds; its default is 30)."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--p2p-load-timeout", type=float, default=30.0)
    return float(parser.parse_known_args(list(words))[0].p2p_load_timeout)


def main() -> object:
    """Register, and go on as LMCache's command."""
    register(load_timeout(sys.argv[1:]))
    from lmcache.cli.main import main as lmcache  # type: ignore[import-not-found]

    return lmcache()


if __name__ == "__main__":
    sys.exit(main())  # type: ignore[arg-type]
