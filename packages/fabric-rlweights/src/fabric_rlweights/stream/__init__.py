"""Weights handed over tensor by tensor, through a few buckets of bounded size: for those who give (name, tensor).

Every sender sees all tensors in the same order. Bucket n is packed by sender n modulo their number, and written to
every receiver, into slot n modulo the number of slots; when a receiver has taken a bucket it says so, and its slot is
free.

Needs torch, and no framework: fabric_rlweights.verl is a thin layer over this.
"""

from fabric_rlweights.stream.member import Member, StreamFailed
from fabric_rlweights.stream.receiving import receive
from fabric_rlweights.stream.sending import send

__all__ = ["Member", "StreamFailed", "receive", "send"]
