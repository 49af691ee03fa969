"""The kernels of `gpu_nic/*.cu` in numpy, over memory of the host: the same lists and words, one slot at a time."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
from nic_words import LINE, Local, Mail, array

from fabric_moe.cuda.report import DISCARDED, Words
from fabric_moe.dtypes import bits_of, narrow, widen
from fabric_moe.gpu_nic.layout import NicLayout


class Slot:
    """What the kernels of one slot see, and what they do."""

    def __init__(self, layout: NicLayout, c: Any) -> None:
        self.layout, self.config, self.c = layout, layout.config, c
        self.mail, self.local = Mail.from_address(c.mail), Local.from_address(c.local)
        self.words = Words.from_address(c.host)
        self.alive = [r for r in range(self.config.ranks) if c.alive >> r & 1]
        self.slot = c.slot

    def list(self, name: str, dtype: Any, *shape: int) -> Any:
        return array(self.c.scratch + self.layout.scratch[name], dtype, shape)

    def owner(self, e: int) -> int:
        return int(np.searchsorted(self.config.expert_bounds, e, side="right")) - 1

    def rows(self, base: int, count: int) -> Any:
        return array(base, np.uint8, (count, self.layout.row_bytes))

    def give_up(self, culprits: int) -> None:
        if not self.local.broken:
            self.local.broken = 1
            self.words.culprits, self.words.lost = culprits, 1

    # ---- dispatch

    def count(self, a: Any) -> None:
        config, k, fan = self.config, self.config.topk, self.config.fan_out
        ids = array(a.ids, np.int64 if a.wide else np.int32, (a.tokens, a.given))
        live = int(array(a.live, np.int32, (1,))[0]) if a.live else a.tokens
        lists = self.list("IDS", np.int32, config.max_tokens, k)
        place = self.list("PLACE", np.uint32, config.max_tokens, k)
        mask = self.list("MASK", np.uint64, config.max_tokens)
        seat = self.list("SEAT", np.uint32, config.max_tokens, fan)
        table = self.list("TABLE", np.uint32, config.max_tokens, fan)
        hist, rows = np.zeros(config.experts, np.int64), np.zeros(config.ranks, np.int64)
        lists[:] = -1
        for t in range(a.tokens):
            found = 0
            for j in range(a.given if t < live else 0):
                e = int(ids[t, j])
                if e < 0 or self.owner(e) not in self.alive:
                    self.local.unreachable += e >= 0
                    continue
                lists[t, j], place[t, j] = e, hist[e]
                hist[e] += 1
                found |= 1 << self.owner(e)
            mask[t] = found
            for i, d in enumerate(d for d in range(config.ranks) if found >> d & 1):
                seat[t, i] = rows[d]
                rows[d] += 1
        mine = self.list("MINE", np.uint32, config.ranks + 1)
        mine[:] = np.concatenate([[0], np.cumsum(rows)])
        for t in range(a.tokens):
            for i, d in enumerate(d for d in range(config.ranks) if int(mask[t]) >> d & 1):
                at = self.layout.in_sums + (int(mine[d]) + int(seat[t, i])) * config.sum_bytes + (d + 1) * LINE
                table[t, i] = at // 16
        counted = array(self.c.counted, np.uint32, (config.ranks * (1 + self.layout.held),))
        counted[: config.ranks] = rows
        for e in range(config.experts):
            d = self.owner(e)
            counted[config.ranks + d * self.layout.held + e - int(config.expert_bounds[d])] = hist[e]
        self.local.epoch[self.slot] += 1
        self.mail.counted[self.slot] = self.local.epoch[self.slot]

    def pack(self, a: Any) -> None:
        config, layout, k = self.config, self.layout, self.config.topk
        x = array(a.x, np.uint8, (a.tokens, config.token_bytes))
        weights = array(a.weights, np.float32, (a.tokens, a.given)) if a.weights else None
        mask, ids = self.list("MASK", np.uint64, a.tokens), self.list("IDS", np.int32, a.tokens, k)
        place, mine = self.list("PLACE", np.uint32, a.tokens, k), self.list("MINE", np.uint32, config.ranks + 1)
        seat = self.list("SEAT", np.uint32, config.max_tokens, config.fan_out)
        out = self.rows(self.c.out, config.max_tokens * config.fan_out)
        for t in range(a.tokens):
            for i, d in enumerate(d for d in range(config.ranks) if int(mask[t]) >> d & 1):
                row = out[int(mine[d]) + int(seat[t, i])]
                row[: config.token_bytes] = x[t]
                if config.scale_bytes:
                    scales = array(a.scales, np.uint8, (a.tokens, config.scale_bytes))
                    row[layout.scale_at : layout.scale_at + config.scale_bytes] = scales[t]
                meta = row[layout.meta_at : layout.meta_at + 4 * (3 * k + 1)].view(np.uint32)
                here = np.array([e >= 0 and self.owner(int(e)) == d for e in ids[t]])
                meta[:k] = np.where(here, ids[t] - int(config.expert_bounds[d]), -1).astype(np.int32).view(np.uint32)
                meta[k : 2 * k] = place[t]
                heavy = np.ones(k, np.float32)
                if weights is not None:
                    heavy[: a.given] = weights[t]
                meta[2 * k : 3 * k], meta[3 * k] = heavy.view(np.uint32), self.local.epoch[self.slot]
        self.mail.packed[self.slot] = self.local.epoch[self.slot]

    def wait(self, word: str, missing: Callable[[int], bool]) -> bool:
        """As `wait_for` in arrive.cu."""
        epoch, deadline, known = self.local.epoch[self.slot], time.monotonic_ns() + self.c.limit, 0
        while getattr(self.mail, word)[self.slot] != epoch:
            if self.mail.noted:
                self.give_up(self.mail.noted)
                return False
            gone, late = self.mail.gone & self.c.alive, time.monotonic_ns() > deadline
            if late or gone & ~known:
                known |= gone
                found = sum(1 << r for r in self.alive if missing(r)) & (~0 if late else gone)
                if found or late:
                    self.give_up(found or gone or 1 << self.c.rank)
                    return False
            time.sleep(0.0001)
        return True

    def arrived(self) -> Any:
        found = array(self.c.arrived, np.uint32, (self.config.ranks * (1 + self.layout.held),)).astype(np.int64)
        return found[: self.config.ranks], found[self.config.ranks :].reshape(self.config.ranks, self.layout.held)

    def seat_of(self, s: int, n: int, counts: Any) -> int:
        private = self.layout.private
        if n < private:
            return s * private + n
        return int(self.config.ranks * private + np.maximum(counts[:s] - private, 0).sum() + n - private)

    def wait_rows(self, a: Any) -> None:
        def missing(s: int) -> bool:
            if self.mail.begun[self.slot] != self.local.epoch[self.slot]:
                return False
            heads = self.mail.heads[self.slot]
            if heads & self.c.alive != self.c.alive:
                return s != self.c.rank and not heads >> s & 1
            counts, _ = self.arrived()
            rows, n = self.rows(self.c.in_, self.layout.comes), int(counts[s])
            last = {min(n, self.layout.private) - 1, n - 1} - {-1}  # of each of its writes
            stamps = [rows[self.seat_of(s, i, counts)][self.layout.meta_at :].view(np.uint32) for i in last]
            return any(stamp[3 * self.config.topk] != self.local.epoch[self.slot] for stamp in stamps)

        if not self.wait("rows_here", missing):
            return
        counts, experts = self.arrived()
        theirs = np.concatenate([[0], np.cumsum(counts)])
        self.list("THEIRS", np.uint32, self.config.ranks + 1)[:] = theirs
        array(a.starts, np.uint32, (self.config.ranks + 1,))[:] = theirs
        of = experts[:, : a.held].sum(axis=0)
        room = np.full(a.held, a.capacity) if a.kind == 1 else -(-of // a.alignment) * a.alignment
        begin = np.concatenate([[0], np.cumsum(room)])
        array(a.counts, np.int32, (a.held,))[:] = of
        array(a.offsets, np.int64, (a.held + 1,))[:] = begin
        tab = np.zeros((self.config.ranks, self.layout.held), np.int64)
        tab[:, : a.held] = np.cumsum(experts, axis=0)[:, : a.held] - experts[:, : a.held] + begin[:-1]
        self.list("TAB", np.uint32, *tab.shape)[:] = tab

    def lay_out(self, a: Any) -> None:
        config, layout, k = self.config, self.layout, self.config.topk
        counts, _ = self.arrived()
        theirs = self.list("THEIRS", np.uint32, config.ranks + 1)
        tab = self.list("TAB", np.uint32, config.ranks, layout.held)
        rows, once = self.rows(self.c.in_, layout.comes), a.kind in (2, 3)
        plan = array(a.plan, np.uint32, (max(1, int(theirs[-1])), 2 * k))
        for s in self.alive:
            for n in range(int(counts[s])):
                number = int(theirs[s]) + n
                alone = number if a.kind == 2 else s * config.max_tokens + n
                row = rows[self.seat_of(s, n, counts)]
                meta = row[layout.meta_at : layout.meta_at + 4 * (3 * k + 1)].view(np.uint32)
                assert meta[3 * k] == self.local.epoch[self.slot]
                ids, plan[number, k:] = meta[:k].view(np.int32), meta[2 * k : 3 * k]
                at = [int(tab[s, e] + meta[k + j]) if e >= 0 else -1 for j, e in enumerate(ids)]
                if once:
                    array(a.local_ids + 4 * k * alone, np.int32, (k,))[:] = ids
                    array(a.weights + 4 * k * alone, np.uint32, (k,))[:] = meta[2 * k : 3 * k]
                    for q in at:
                        if q >= 0:
                            array(a.expert_rows + 8 * q, np.int64, (1,))[0] = alone
                    at = [alone] + [-1] * (k - 1)
                plan[number, :k] = np.array(at, np.int64).astype(np.uint32)
                for q in at:
                    if q >= 0:
                        size = config.token_bytes
                        array(a.tokens + q * size, np.uint8, (size,))[:] = row[:size]
                        if config.scale_bytes:
                            scales = row[layout.scale_at : layout.scale_at + config.scale_bytes]
                            array(a.scales + q * config.scale_bytes, np.uint8, (config.scale_bytes,))[:] = scales
        self.padding(a)

    def padding(self, a: Any) -> None:
        config, size = self.config, self.config.token_bytes
        if a.kind == 0:
            offsets, counts = array(a.offsets, np.int64, (a.held + 1,)), array(a.counts, np.int32, (a.held,))
            for e in range(a.held):
                for q in range(int(offsets[e] + counts[e]), int(offsets[e + 1])):
                    array(a.tokens + q * size, np.uint8, (size,))[:] = 0
                    if config.scale_bytes:
                        array(a.scales + q * config.scale_bytes, np.uint8, (config.scale_bytes,))[:] = 0

    # ---- combine

    def combine(self, a: Any, name: str) -> None:
        config, layout, k = self.config, self.layout, self.config.topk
        theirs = self.list("THEIRS", np.uint32, config.ranks + 1)
        rows = 0 if a.flags else int(theirs[-1])
        width, used = config.hidden * bits_of(name) // 8, config.hidden * bits_of(config.wire) // 8
        base, plan = self.c.out + layout.out_sums, array(a.plan, np.uint32, (max(1, rows), 2 * k))
        for row in range(rows):
            s = int(np.searchsorted(theirs[1:], row, side="right"))
            total = np.zeros(config.hidden, np.float32)
            for j in np.flatnonzero(plan[row, :k] != 0xFFFFFFFF):
                term = widen(array(a.y + int(plan[row, j]) * width, np.uint8, (1, width)), name)[0]
                total += term * plan[row, k + j : k + j + 1].view(np.float32)[0] if a.weighted else term
            at = base + row * config.sum_bytes + (s + 1) * LINE
            array(at, np.uint8, (used,))[:] = narrow(total[None], config.wire)[0]
        for s, epoch in enumerate([self.local.epoch[self.slot]] * config.ranks):
            array(base + int(theirs[s]) * config.sum_bytes + s * LINE, np.uint64, (1,))[0] = epoch << 32 | a.flags
        self.mail.summed[self.slot] = self.local.epoch[self.slot]

    def head(self, d: int) -> int:
        mine = self.list("MINE", np.uint32, self.config.ranks + 1)
        at = self.c.in_ + self.layout.in_sums + int(mine[d]) * self.config.sum_bytes + d * LINE
        return int(array(at, np.uint64, (1,))[0])

    def wait_sums(self, a: Any) -> None:
        epoch = self.local.epoch[self.slot]
        came = self.wait("sums_here", lambda d: self.head(d) >> 32 != epoch)
        if came and (gone := sum(1 << d for d in self.alive if self.head(d) & 16)):
            self.words.first[DISCARDED] = gone
            self.words.told[DISCARDED] += 1

    def combine_recv(self, a: Any) -> None:
        config = self.config
        mask = self.list("MASK", np.uint64, max(1, a.tokens))
        table = self.list("TABLE", np.uint32, config.max_tokens, config.fan_out)
        used, width = config.hidden * bits_of(config.wire) // 8, config.hidden * bits_of(config.out_dtype) // 8
        for t in range(a.tokens):
            total = np.zeros(config.hidden, np.float32)
            for i in range(int(mask[t]).bit_count()):
                total += widen(array(self.c.in_ + 16 * int(table[t, i]), np.uint8, (1, used)), config.wire)[0]
            out = array(a.out + t * width, np.uint8, (1, width))
            if a.accumulate:
                total += widen(out, config.out_dtype)[0]
            out[:] = narrow(total[None], config.out_dtype)
