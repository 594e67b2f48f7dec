"""Connection to the hub: what happens without one."""

import logging
import socket
import time
from collections.abc import Iterator

import pytest
from huggingface_hub import constants

from workbench.run import hub


@pytest.fixture
def silent_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An endpoint that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}")
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setenv("HF_HUB_OFFLINE", "0")
        hub.is_reachable.cache_clear()
        yield
        hub.is_reachable.cache_clear()


@pytest.mark.usefixtures("silent_server")
def test_a_hub_that_does_not_answer_is_given_up_soon(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(hub, "SECONDS", 0.5)
    start = time.monotonic()
    with caplog.at_level(logging.INFO, "picotron"):
        hub.connect("nobody/model")
        hub.connect("nobody/data")
    assert time.monotonic() - start < 3
    assert constants.HF_HUB_OFFLINE
    assert [message.split(" (")[0] for message in caplog.messages] == [
        "nobody/model is not a local folder; looking for it on the Hugging Face Hub",
        "no connection to the Hugging Face Hub",
        "nobody/data is not a local folder; looking for it on the Hugging Face Hub",
    ]
