"""Messages as bytes: what is unpacked equals what was packed, and what repeats is not sent again."""

from __future__ import annotations

import numpy as np
import pytest

from torchdl_ray.packing import MAX_PHRASES, Packer, Unpacker, pack_payload, unpack_payload
from torchdl_ray.program import (
    Backward,
    Drop,
    Fetch,
    Forward,
    LeafKind,
    Message,
    RandomKey,
    Seed,
    ShardData,
    Step,
    Structure,
    WireTensor,
    ZeroGrad,
)

TEMPLATE = b"template" * 200
EXPECTED = Structure("spec", (LeafKind(True, "float32", 0, True),))
NAMES = ("weight", "bias")


def forward(number, method="forward", template=TEMPLATE):
    return Forward(
        id=number,
        site=f"train.py:{number}",
        model=1,
        call=number + 1000,
        method=method,
        template=template,
        differentiable=(),
        grad=True,
        inference=False,
        training=True,
        autocast=None,
        key=RandomKey(0, number, 0),
        dim=0,
        reduction="mean",
        out_dims=None,
        expected=EXPECTED,
    )


def step(number, first=1):
    """A training step's commands, from command id `first`."""
    seed = Seed(0, WireTensor(np.ones((), dtype=np.float32), "float32", ()), True)
    return (
        ZeroGrad(id=first, model=1, names=NAMES, to_none=True),
        forward(first + 1),
        Backward(id=first + 2, model=1, call=first + 1001, seeds=(seed,), keep_graph=False, full=True),
        Drop(id=first + 3, calls=(first,)),
        Step(id=first + 4, optimizer=9, groups=b"", key=RandomKey(0, number, 0)),
    )


def same(a, b):
    """Equality of commands, whose arrays have no single truth value."""
    return str(a) == str(b)


def test_messages_arrive_as_they_were():
    packer, unpacker = Packer(), Unpacker()
    for number in range(1, 5):
        message = Message(0, number, step(number, 10 * number), resume=number == 3)
        assert same(unpacker.unpack(packer.pack(message)), message)


def test_what_repeats_travels_once():
    packer = Packer()
    sizes = [len(packer.pack(Message(0, n, step(n, 10 * n)))) for n in range(1, 4)]
    assert sizes[0] > len(TEMPLATE)
    assert sizes[1] == pytest.approx(sizes[2], abs=8)
    assert sizes[1] < 700


def test_a_message_that_is_packed_again_for_another_rank_is_whole():
    packer, first, second = Packer(), Unpacker(), Unpacker()
    message = Message(0, 1, step(1))
    first.unpack(packer.pack(message))
    again = packer.pack(message)  # an interrupt came before the second rank got it
    assert same(second.unpack(again), message)
    following = packer.pack(Message(0, 2, step(2, 20)))
    assert same(first.unpack(following), second.unpack(following))


def test_a_new_generation_starts_anew():
    packer = Packer()
    packer.pack(Message(0, 1, step(1)))
    packer.pack(Message(0, 2, step(2, 20)))
    message = Message(1, 1, step(3, 30), resume=True)
    fresh = Unpacker()  # a worker that came in the place of a lost one
    assert same(fresh.unpack(packer.pack(message)), message)


def test_a_worker_forgets_old_phrases():
    packer, unpacker = Packer(), Unpacker()
    for number in range(1, 2 * MAX_PHRASES + 5):
        message = Message(0, number, (forward(number, template=b"%d" % number),))
        assert same(unpacker.unpack(packer.pack(message)), message)
        assert len(unpacker._phrases) <= MAX_PHRASES + 1


def test_other_commands_travel_whole():
    message = Message(0, 1, (Fetch(id=1, call=2, leaf=0), Drop(id=2, calls=(2,), values=(5,))))
    assert same(Unpacker().unpack(Packer().pack(message)), message)


def test_small_payload_travels_in_the_message_and_large_by_reference():
    shard = ShardData(0, 2, ((2, 1.0),), (WireTensor(np.arange(4.0), "float64", (4,)),))
    body, large = pack_payload({7: ("big", shard), 8: (b"common",)}, lambda item: item == "big")
    assert large == ["big"]
    found = unpack_payload(body, ["arrived"])
    assert found[7][0] == "arrived"
    assert found[7][1].pieces == ((2, 1.0),)
    assert found[7][1].arrays[0].array.tolist() == [0.0, 1.0, 2.0, 3.0]
    assert found[8] == (b"common",)
    assert unpack_payload(*pack_payload({}, bool)) == {}


def test_read_only_arrays_arrive_read_only():
    array = np.arange(3.0)
    array.setflags(write=False)
    body, _ = pack_payload({1: (WireTensor(array, "float64", (3,)),)}, lambda item: False)
    assert not unpack_payload(body, [])[1][0].array.flags.writeable
