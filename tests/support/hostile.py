"""Hostile inputs that several tests share."""

from collections.abc import Callable
from typing import Any

import pytest

from picotron.console import UserError

CONFIG_FILES = [
    b"", b" ", b"{", b"[]", b"null", b'"text"', b"1", b"\xff\xfe", b"\x00", b"{}", b'{"a": 1}', b"[" * 100_000,
    b'{"model":' * 5_000, b'{"model": {"name": "a", "name": "b"}}', b'{"model": {}, "model": {}}', b'{"training": NaN}',
    b'{"training": {"learning_rate": NaN}}', b'{"training": {"learning_rate": 1e999}}', b'{"training": {"seed": 1' + b"0" * 5_000 + b"}}",
    b'{"environment": "hf_secret"}', b'{"environment": ["hf_secret"]}', b'{"hf_token": "hf_secret"}', b'{"environment": {"TOKEN": "hf_secret"}}',
    b'{"model": {"name": "a\\u0000b"}}', b'{"model": {"name": "\\ud800"}}', b'{"checkpoint": {"save_dir": ""}}', b'{"$schema": {"x": 1}}',
]  # fmt: skip


def assert_rejected(call: Callable[[], Any], capsys: pytest.CaptureFixture[str]) -> str:
    """Assert that a program ends with a UserError, or prints an error and exits. Returns the message."""
    try:
        call()
    except UserError as error:
        message = str(error)
    except SystemExit as error:
        message = error.code if isinstance(error.code, str) else capsys.readouterr().err
        if error.code in (0, None):
            pytest.fail("it succeeded")
    else:
        pytest.fail("it was accepted")
    assert "Traceback" not in message
    assert len(message) < 2_000
    return message
