"""`python -m fabric_kvcache.lmcache ...`: LMCache's own command, in which the channel `fabric` is known."""

from __future__ import annotations

import sys

from fabric_kvcache.lmcache import register


def main() -> object:
    """Register, and go on as LMCache's command."""
    register()
    from lmcache.cli.main import main as lmcache  # type: ignore[import-not-found]

    return lmcache()


if __name__ == "__main__":
    sys.exit(main())  # type: ignore[arg-type]
