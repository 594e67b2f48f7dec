"""Types that the sections of the config share."""

import json
import re
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationInfo, WithJsonSchema, field_validator

from picotron.errors import InvalidValue
from picotron.schedules.schedules import SCHEDULES, check_name

Positive = Annotated[int, Field(gt=0, le=2**40)]
NonNegative = Annotated[int, Field(ge=0, le=2**40)]
Processes = Annotated[int, Field(gt=0, le=4096)]
ScheduleName = Annotated[
    str,
    AfterValidator(check_name),
    WithJsonSchema({"anyOf": [{"enum": [*SCHEDULES, "auto"]}, {"type": "string", "pattern": "^csv:."}]}),
]


class Section(BaseModel):
    # strict: no conversions, so "4" is not accepted for 4, nor 1 for true
    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )

    @field_validator("*")
    @classmethod
    def check_text(cls, value: Any, info: ValidationInfo) -> Any:
        empty = value == "" and info.field_name != "load_path"
        if empty or (isinstance(value, str) and re.search("[\0\ud800-\udfff]", value)):
            raise ValueError(f"{value!r} should be UTF-8 text with at least one character, and no null character")
        return value

    if not TYPE_CHECKING:  # type checkers would accept any name
        # Called for keys that the object lacks, because their values are invalid, see `config_reader.parse_config`.
        def __getattr__(self, name: str) -> Any:
            if name in type(self).model_fields:
                raise InvalidValue(name)
            return super().__getattr__(name)


def read_string(value: Any) -> Any:
    """Parse a string that holds JSON ("4" is 4, "false" is False). Any other value is returned unchanged."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        return value
