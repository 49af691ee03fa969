"""The command line, `fabric` (also `fabricctl`).

Each command gathers, fills a model of `models.py`, and renders that model as a table or as one JSON object. stdout
holds the result, stderr everything else. Exit codes are in `guard.py`.

A command's module is imported only when that command is run, so `fabric --help` costs as little as typer does.
"""

from __future__ import annotations

from fabric_core.cli.app import build, main

__all__ = ["build", "main"]
