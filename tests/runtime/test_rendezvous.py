"""The rendezvous server and the store that uses it, over real sockets."""

import socket
import threading
import time
from collections.abc import Iterator
from datetime import timedelta

import pytest

from ftd.node import rendezvous
from runtime.groups.store import Rendezvous, RendezvousStore, StoreConnection, StoreError
from runtime.wire import frames
from runtime.wire import store_protocol as s
from tests.helpers.harness import TOKEN, ServerThread
from tests.helpers.waiting import until


@pytest.fixture
def server() -> Iterator[ServerThread]:
    with ServerThread() as server:
        yield server


def meeting(server: ServerThread, generation: int = 1, token: str = TOKEN) -> Rendezvous:
    return Rendezvous(host="127.0.0.1", port=server.port, token=token, generation=generation)


def store(server: ServerThread, generation: int = 1, timeout_s: float = 60.0) -> RendezvousStore:
    return RendezvousStore(meeting(server, generation), 0, timeout_s)


def test_everything_a_store_does(server: ServerThread) -> None:
    one, two = store(server), store(server)
    one.set("key", "text")
    assert two.get("key") == b"text"
    assert one.check(["key"]) and not one.check(["key", "other"])
    assert (one.add("count", 2), two.add("count", 3)) == (2, 5)
    assert one.get("count") == b"5"
    one.multi_set(["a", "b"], [b"1", "2"])
    assert two.multi_get(["b", "a"]) == [b"2", b"1"]
    two.wait(["a"], timedelta(seconds=5))
    assert two.get("a") == b"1"
    assert one.delete_key("key") and not one.delete_key("key")
    one.close()
    two.close()


def test_get_waits_until_the_key_is_set(server: ServerThread) -> None:
    one, two = store(server), store(server)
    values: list[bytes] = []
    waiting = threading.Thread(target=lambda: values.append(one.get("late")))
    waiting.start()
    two.set("late", b"value")
    waiting.join(60)
    assert values == [b"value"]
    one.close()
    two.close()


def test_a_wait_times_out_and_the_connection_stays_open(server: ServerThread) -> None:
    one = store(server, timeout_s=0.05)
    with pytest.raises(StoreError, match=r"no 'never' within 0\.05 s"):
        one.get("never")
    one.set("key", b"value")
    assert one.get("key") == b"value"
    one.close()


def test_close_from_another_thread_ends_a_wait_at_once(server: ServerThread) -> None:
    one = store(server, timeout_s=300.0)
    errors: list[StoreError] = []

    def wait() -> None:
        try:
            one.get("never")
        except StoreError as error:
            errors.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    time.sleep(0.05)
    one.close()
    waiting.join(60)
    assert len(errors) == 1


def test_generations_have_their_own_name_spaces_and_old_ones_end(server: ServerThread) -> None:
    old = store(server, 1)
    old.set("key", b"old")
    errors: list[str] = []

    def wait() -> None:
        try:
            old.get("never")
        except StoreError as error:
            errors.append(str(error))

    waiting = threading.Thread(target=wait)
    waiting.start()
    time.sleep(0.05)
    new = store(server, 2)
    waiting.join(60)
    assert "generation 1 is superseded" in errors[0]
    assert not new.check(["key"])
    with pytest.raises(StoreError, match="generation 1 is over; 2 is forming"):
        store(server, 1)
    assert server.server.generations == (2,)
    old.close()
    new.close()


def test_the_keys_of_a_generation_are_removed_with_its_last_connection(server: ServerThread) -> None:
    one = store(server)
    one.set("key", b"value")
    assert server.server.generations == (1,)
    one.close()
    until(lambda: server.server.generations == ())


def test_a_wrong_token_is_rejected(server: ServerThread) -> None:
    with pytest.raises(StoreError, match="wrong secret"):
        StoreConnection(meeting(server, token="guess"), 0, 5.0)


def test_no_server_listens() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with pytest.raises(StoreError, match=f"no rendezvous at 127.0.0.1:{port}"):
        RendezvousStore(Rendezvous(host="127.0.0.1", port=port, token="", generation=1), 0, 1.0)


@pytest.mark.parametrize(
    "data",
    [
        frames.encode(s.StoreSet(key="key", value=b"")),
        b"\xff\xff\xff\xff",
        b"\x00\x00\x00\x03abc",
        b"GET / HTTP/1.1\r\n\r\n",
    ],
    ids=["no hello", "oversized", "malformed", "another protocol"],
)
def test_unknown_clients_are_rejected_and_the_server_keeps_running(server: ServerThread, data: bytes) -> None:
    with socket.create_connection(("127.0.0.1", server.port), 30) as stranger:
        stranger.sendall(data)
        answer = b""
        while part := stranger.recv(4096):
            answer += part
    assert isinstance(frames.Decoder[s.StoreReply](s.StoreReply).feed(answer)[0], s.StoreRejected)
    one = store(server)
    one.set("key", b"value")
    one.close()


def test_limits(server: ServerThread, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "MAX_KEYS", 2)
    monkeypatch.setattr(rendezvous, "MAX_STORED_BYTES", 100)
    one = store(server)
    one.set("a", b"x" * 90)
    one.set("a", b"x" * 95)
    with pytest.raises(StoreError, match="bytes"):
        one.set("b", b"x" * 10)
    two = store(server)
    two.set("c", b"")
    two.set("d", b"")
    with pytest.raises(StoreError, match="2 keys"):
        two.set("e", b"")
    one.close()
    two.close()


def test_a_second_hello_and_a_value_that_is_no_number(server: ServerThread) -> None:
    one = StoreConnection(meeting(server), 0, 5.0)
    with pytest.raises(StoreError, match="second StoreHello"):
        one.request(s.StoreHello(proof=s.make_proof(TOKEN, 1), generation=1, rank=0))
    two = StoreConnection(meeting(server), 0, 5.0)
    two.request(s.StoreSet(key="text", value=b"abc"))
    with pytest.raises(StoreError, match="holds no number"):
        two.request(s.StoreAdd(key="text", amount=1))
    one.close()
    two.close()


def test_another_service_at_the_address_is_a_store_error() -> None:
    """Its greeting is not a frame. The caller that waits for a group must get the error, instead of a thread
    that just ends.
    """
    with socket.create_server(("127.0.0.1", 0)) as other:

        def greet() -> None:
            with other.accept()[0] as peer:
                peer.sendall(b"SSH-2.0-OpenSSH_9.6\r\n")

        thread = threading.Thread(target=greet)
        thread.start()
        place = Rendezvous(host="127.0.0.1", port=other.getsockname()[1], token=TOKEN, generation=1)
        with pytest.raises(StoreError, match="rendezvous connection lost"):
            StoreConnection(place, 0, 30.0)
        thread.join()
