"""Values: addresses, descriptors, page lists, flags."""

from __future__ import annotations

import array
import pickle
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fabric_core import BadRange, Flag, MrDesc, NetAddr, Pages, PeerGroup, ProtocolError, TransferEngine
from fabric_core.stats import quantiles

_text = st.text(st.characters(min_codepoint=33, max_codepoint=126, exclude_characters=","), min_size=1, max_size=255)
_addr = st.builds(NetAddr, st.just("local"), st.lists(_text, min_size=1, max_size=8).map(tuple))


@given(_addr)
def test_addresses_go_round_as_text_and_as_bytes(addr: NetAddr) -> None:
    assert NetAddr.parse(str(addr)) == addr
    assert NetAddr.from_bytes(addr.to_bytes()) == addr


@given(_addr, st.integers(0, 2**63), st.integers(0, 2**62), st.integers(0, 2**64 - 1), st.booleans())
def test_descriptors_go_round_as_bytes(addr: NetAddr, ptr: int, nbytes: int, key: int, write: bool) -> None:
    n = len(addr.domains)
    desc = MrDesc(addr, ptr, nbytes, int(write), [key] * n, [ptr] * n)
    again = MrDesc.from_bytes(desc.to_bytes())
    assert again == desc
    assert hash(again) == hash(desc)
    assert again.writable is write
    assert str(key) not in repr(desc).replace(str(nbytes), "") or key < 10**6  # keys are not logged


@pytest.mark.parametrize(
    "bad", ["", "local", "local:", ":x", "local:a,,b", "local:a b", "lo cal:x", "local:" + ",".join("a" * 9), "x:é", 7]
)
def test_a_bad_address_is_a_protocol_error(bad: object) -> None:
    with pytest.raises(ProtocolError):
        NetAddr.parse(bad)  # type: ignore[arg-type]


def test_a_descriptor_of_another_wire_version_is_refused_naming_both() -> None:
    data = bytearray(NetAddr("local", ("a",)).to_bytes())
    data[3] = 9
    with pytest.raises(ProtocolError, match=r"version 9 .* speaks 1"):
        NetAddr.from_bytes(data)


def test_page_lists_take_any_u32_buffer_and_convert_what_is_not() -> None:
    assert len(Pages([1, 2, 3], 8)) == 3
    assert len(Pages(np.arange(5, dtype=np.uint32), 8)) == 5
    assert Pages(np.arange(5), 8).indices.itemsize == 4
    assert len(Pages(array.array("I", [4]), 8)) == 1
    assert len(Pages(range(9), 8)) == 9
    with pytest.raises(BadRange, match="2\\*\\*32"):
        Pages([-1], 8)
    with pytest.raises(BadRange, match="-5"):
        Pages(np.array([-5, 3]), 8)


def test_a_peer_group_holds_each_peer_once() -> None:
    a, b = NetAddr("local", ("a",)), NetAddr("local", ("b",))
    group = PeerGroup([a, b, a])
    assert len(group) == 2
    assert a in group
    assert NetAddr("local", ("c",)) not in group


def test_a_flag_counts_ended_and_failed_operations() -> None:
    flag = Flag()
    assert (flag.value, flag.done, flag.failed) == (0, 0, 0)
    with TransferEngine.open() as engine:
        handle, _ = engine.reg_mr(bytearray(64))
        _, desc = engine.reg_mr(bytearray(64))
        transfer = engine.submit_single_write(8, None, (handle, 0), (desc, 0), flag)
        end = time.monotonic() + 5
        while not flag.done and time.monotonic() < end:
            pass
        assert (flag.done, flag.failed) == (1, 0)
        assert transfer.state == "done"  # the flag is bumped last


def test_engines_and_results_cannot_be_pickled() -> None:
    with TransferEngine.open() as engine, pytest.raises(TypeError, match="exchange addresses"):
        pickle.dumps(engine)


def test_quantiles_come_from_the_upper_edges_of_buckets() -> None:
    buckets = [0] * 48
    assert quantiles(buckets)["p50_us"] == 0
    buckets[9] = 99  # 512..1023 ns
    buckets[19] = 1
    found = quantiles(buckets)
    assert found["count"] == 100
    assert found["p50_us"] == 1.024
    assert found["p999_us"] == 1048.576


def test_a_flag_outlives_the_operations_that_name_it() -> None:
    with TransferEngine.open() as engine:
        handle, _ = engine.reg_mr(bytearray(64))
        _, desc = engine.reg_mr(bytearray(64))
        transfers = [engine.submit_single_write(8, None, (handle, 0), (desc, 0), Flag()) for _ in range(200)]
        for transfer in transfers:
            transfer.wait(5)
