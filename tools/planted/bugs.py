"""The table of planted bugs."""

from __future__ import annotations

from planted.bugs_above import IMMEDIATES, POSTING, TRANSFERS
from planted.bugs_below import PEERS, THREADS
from planted.bugs_reasons import REASONS
from planted.table import Bug

BUGS: tuple[Bug, ...] = (*IMMEDIATES, *TRANSFERS, *POSTING, *PEERS, *THREADS, *REASONS)
