"""MQTT packets: what is written is read again, in whatever pieces it comes; else there is a clear error."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftd.mqtt.packets import (
    PUBLISH,
    MqttError,
    Splitter,
    connect_packet,
    packet,
    publish_packet,
    published,
    refusal,
    subscribe_packet,
    text,
)

topics = st.text(min_size=1, max_size=20)
messages = st.tuples(topics, st.binary(max_size=300), st.booleans(), st.integers(0, 65535))


@given(st.lists(messages, max_size=8), st.lists(st.integers(1, 40), max_size=60))
def test_messages_come_back_whole_in_whatever_pieces_they_arrive(
    sent: list[tuple[str, bytes, bool, int]], cuts: list[int]
) -> None:
    stream = b"".join(
        publish_packet(topic.encode(), payload, number, retain=retained)
        for topic, payload, retained, number in sent
    )
    splitter, got = Splitter(), []
    for size in [*cuts, len(stream)]:
        got += splitter.feed(stream[:size])
        stream = stream[size:]
    assert all(first & 0xF0 == PUBLISH for first, _ in got)
    assert [published(first, body) for first, body in got] == sent


@pytest.mark.parametrize("size", [0, 127, 128, 16_383, 16_384, 2_097_151, 2_097_152])
def test_lengths_at_their_limits(size: int) -> None:
    whole = packet(0x40, b"x" * size)
    splitter = Splitter()
    assert splitter.feed(whole[:-1] if size else whole[:1]) == []
    assert splitter.feed(whole[-1:] if size else whole[1:]) == [(0x40, b"x" * size)]


@given(st.binary(max_size=200))
def test_what_is_not_mqtt_is_no_other_error(data: bytes) -> None:
    try:
        for first, body in Splitter().feed(data):
            published(first, body)
    except MqttError:
        return


def test_a_length_that_never_ends_and_one_that_is_too_large() -> None:
    with pytest.raises(MqttError, match="does not speak MQTT"):
        Splitter().feed(b"\x30\xff\xff\xff\xff\x01")
    with pytest.raises(MqttError, match="at most"):
        Splitter().feed(b"\x30\xff\xff\xff\x7f")


def test_connect_says_all_that_the_standard_wants() -> None:
    will, user = ("w", b"gone"), {"username": "u", "password": "p"}
    assert connect_packet("id", keep_alive_s=5) == b"\x10\x0e\x00\x04MQTT\x04\x02\x00\x05\x00\x02id"
    assert connect_packet("i", keep_alive_s=5, will=will, **user) == (
        b"\x10\x1c\x00\x04MQTT\x04\xee\x00\x05\x00\x01i\x00\x01w\x00\x04gone\x00\x01u\x00\x01p"
    )
    assert subscribe_packet(7, ["a/+"]) == b"\x82\x08\x00\x07\x00\x03a/+\x01"


def test_refusals_are_said_in_words() -> None:
    assert refusal(b"\x00\x00") is None
    assert refusal(b"\x00\x05") == "not authorized"
    assert refusal(b"\x00\x63") == "code 99"
    with pytest.raises(MqttError):
        refusal(b"\x00")


def test_a_field_that_is_too_long_is_an_error_of_ours() -> None:
    with pytest.raises(ValueError, match="65535"):
        text(b"x" * 65_536)
