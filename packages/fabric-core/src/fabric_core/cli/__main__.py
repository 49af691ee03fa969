"""`python -m fabric_core.cli`: the same as the script."""

from __future__ import annotations

from fabric_core.cli.app import main

main()
