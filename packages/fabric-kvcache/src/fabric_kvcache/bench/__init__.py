"""`fabric kv bench`: two processes, a real plan, writes while layers "compute". The library uses nothing of this.

content.py   bytes that both sides can make: what a page must hold, by model coordinates
work.py      one figure's question, as both processes know it
timed.py     a prefill that takes time and computes nothing
receiver.py  the decode side, a process of its own
sender.py    the prefill side
start.py     starts the receiver's process
run.py       repeats, and makes rows
"""

from __future__ import annotations
