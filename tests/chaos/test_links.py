"""The links of a run hear who answers, and only on connections made after a death."""

import contextlib
import socket
import threading
import time

import pytest
from links import Link, Links, ProxyProcess

pytestmark = pytest.mark.processes

PATIENCE_S = 30.0


@contextlib.contextmanager
def echo(path):
    """A server that answers each piece with itself."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()

        def serve():
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = listener.accept()
                    threading.Thread(target=answer, args=(connection,), daemon=True).start()

        threading.Thread(target=serve, daemon=True).start()
        yield
        listener.shutdown(socket.SHUT_RDWR)


def answer(connection) -> None:
    with connection, contextlib.suppress(OSError):
        while piece := connection.recv(64):
            connection.sendall(piece)


def ask(path) -> None:
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(PATIENCE_S)
        client.connect(path)
        client.sendall(b"question")
        client.recv(64)


@pytest.fixture
def links(tmp_path):
    link = Link("caller", "called", f"unix:{tmp_path}/in", f"unix:{tmp_path}/out")
    with echo(f"{tmp_path}/out"):
        carried = Links([link], ProxyProcess([link]))
        yield carried
        carried.stop()


@pytest.mark.parametrize("member", ["caller", "called"])
def test_a_member_is_back_with_the_first_answer_on_a_new_connection(
    links, tmp_path, member
) -> None:
    ask(f"{tmp_path}/in")
    died = time.monotonic()
    assert links.recovered(member, died, timeout_s=0.1) is None

    ask(f"{tmp_path}/in")

    assert links.recovered(member, died, timeout_s=PATIENCE_S) <= time.monotonic() - died


def test_who_is_on_no_link_is_not_heard_of(links) -> None:
    assert links.hears_of("called")
    assert links.hears_of("caller")
    assert not links.hears_of("payloads")
