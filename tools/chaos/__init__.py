"""Processes that move data while others are killed, stopped, restarted and closed: `python tools/chaos --help`."""
