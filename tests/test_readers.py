"""Readers answer any bytes with a value or a UserError, never with another exception."""

import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from picotron.console import UserError
from workbench.files import parse_json, read_object
from workbench.pipelines.layouts import parse_stages
from workbench.run.checkpoint.checkpoint import read_state
from workbench.run.checkpoint.safetensors_folder import SafetensorsFolder
from workbench.run.run_folder import read_records
from workbench.schedules.schedule_csv import read_csv
from workbench.schedules.trace import read_settings, read_trace

VALUES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
JSON = st.recursive(VALUES, lambda v: st.lists(v, max_size=4) | st.dictionaries(st.text(max_size=6), v, max_size=4))
ANY_BYTES = st.binary(max_size=200) | JSON.map(lambda data: json.dumps(data).encode())


def accepts_or_rejects(read: Callable[..., Any], *arguments: Any) -> None:
    with contextlib.suppress(UserError):
        read(*arguments)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("readers")


any_input = settings(max_examples=150, suppress_health_check=list(HealthCheck))


@any_input
@given(data=ANY_BYTES)
def test_any_bytes_are_a_value_or_an_error(folder: Path, data: bytes) -> None:
    accepts_or_rejects(parse_json, data, "the input")
    for name, read in {
        "a.json": lambda path: read_object(path),
        "own.csv": lambda path: read_csv(str(path)),
        "trainer_state.json": lambda path: read_state(path.parent),
        "model.safetensors.index.json": lambda path: SafetensorsFolder(path.parent),
        "model.safetensors": lambda path: SafetensorsFolder(path.parent),
        "trace_step_00000001.jsonl": lambda path: read_trace(path.parent),
        "trace_step_00000002.jsonl": lambda path: read_settings(path.parent),
        "metrics.jsonl": lambda path: read_records(path),
    }.items():
        (folder / name).write_bytes(data)
        accepts_or_rejects(read, folder / name)
        (folder / name).unlink()


@any_input
@given(text=st.text(alphabet="EtL|()*0123456789 x", max_size=24), layers=st.integers(1, 9), stages=st.integers(1, 4))
def test_any_layout_is_parsed_or_an_error(text: str, layers: int, stages: int) -> None:
    accepts_or_rejects(parse_stages, text, layers, stages)
