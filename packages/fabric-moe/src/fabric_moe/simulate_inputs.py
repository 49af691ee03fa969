"""What `fabric moe simulate` is told and does not work out: times of kernels, and what others have published."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["HOP", "KERNELS", "PUBLISHED", "Kernels"]


@dataclass(frozen=True, slots=True)
class Kernels:
    """What GPUs add to the wire, in microseconds."""

    name: str
    first: float  #: from the launch of dispatch to its first bytes being ready to be sent
    dispatch_recv: float  #: from the last row's arrival to the end of dispatch
    combine_first: float  #: from the launch of combine to its first bytes being ready
    combine_recv: float
    source: str


#: `paper`: section 6 and Fig. 12 of arXiv 2510.27656. `asked`: what this project asks of its kernels. `h200`: what its
#: kernels took on an H200, docs/results: whole kernels, since what they send leaves when they end.
KERNELS = {
    "paper": Kernels("paper", 15.0, 25.3, 13.4, 15.0, "first transfer 15 us after launch; kernel times of Fig. 12"),
    "asked": Kernels(
        "asked", 4.0, 8.0, 4.0, 7.0,
        "3 us + 1.5 x the bytes of 128 tokens at 3.3 TB/s: what this project asks of its kernels",
    ),
    "h200": Kernels("h200", 5.0, 6.4, 10.6, 6.3, "this package's kernels, 128 tokens, 8 ranks on an H200; no proxy"),
}  # fmt: skip

#: Microseconds from a GPU's stores of 14 KiB and a flag to another GPU of its node seeing them: half a round trip over
#: the NVLink of two H200.
HOP = 2.6

#: p50 microseconds, as the paper's authors publish them: (kind, NIC, ranks) -> (dispatch, combine). Left out: two
#: cells of the prefill table that look exchanged with each other.
PUBLISHED: dict[tuple[str, str, int], tuple[float, float]] = {
    ("decode", "efa-p5en", 16): (214.8, 241.5),
    ("decode", "efa-p5en", 32): (229.1, 335.0),
    ("decode", "efa-p5en", 64): (266.7, 391.2),
    ("decode", "cx7", 16): (110.2, 185.5),
    ("decode", "cx7", 32): (153.9, 266.3),
    ("decode", "cx7", 64): (187.5, 309.1),
    ("prefill", "efa-p5en", 16): (3196.7, 5379.1),
    ("prefill", "efa-p5en", 32): (4619.0, 8271.5),
    ("prefill", "efa-p5en", 64): (5334.3, 9779.3),
    ("prefill", "cx7", 32): (4011.8, 7526.8),
    ("prefill", "cx7", 64): (4665.2, 8771.1),
}
