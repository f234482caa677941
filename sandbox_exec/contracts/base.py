"""What every contract shares: frozen, no unknown fields, no NaN; and the types for sizes and durations."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from sandbox_exec.units import parse_bytes, parse_seconds

Bytes = Annotated[
    int,
    BeforeValidator(parse_bytes, json_schema_input_type=int | str),
    Field(description='Bytes: a whole number, or text such as "512MiB".'),
]
Seconds = Annotated[
    float,
    BeforeValidator(parse_seconds, json_schema_input_type=float | str),
    Field(description='Seconds: a number, or text such as "30s".'),
]


class Contract(BaseModel):
    """A frozen message or setting. Frozen is shallow: it does not reach into a mapping that a field holds."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)
