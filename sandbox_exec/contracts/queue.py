"""Which trial next, and how fast: the settings of queues, lanes and alerts."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, Final, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from sandbox_exec.contracts.base import Contract, Seconds
from sandbox_exec.contracts.limits import Count
from sandbox_exec.errors import InvalidValue

LEVELS: Final[Mapping[str, int]] = MappingProxyType({"low": -10, "normal": 0, "high": 10, "critical": 20})
LONGEST_RETRY_AFTER_S: Final = 3600.0  # that a provider, or an agent in its name, can ask for
WINDOW_S: Final = 60.0  # what "a minute" is in a lane's limits: any 60 seconds, not those of the clock


def _priority(value: Any) -> Any:
    if isinstance(value, str):
        if value not in LEVELS:
            raise InvalidValue(f"{value!r} is no priority; allowed: a whole number, {', '.join(LEVELS)}")
        return LEVELS[value]
    return value


Priority = Annotated[
    int,
    BeforeValidator(_priority, json_schema_input_type=int | Literal["low", "normal", "high", "critical"]),
    Field(strict=True, ge=-(2**31), lt=2**31),
]
Positive = Annotated[Seconds, Field(gt=0)]
Finite = Annotated[float, Field(strict=True, ge=-20, le=20)]


class ItemParameters(Contract):
    """How hard a task is, for the adaptive order: the four parameters of item response theory."""

    difficulty: Finite = 0.0
    discrimination: Annotated[float, Field(strict=True, gt=0, le=20)] = 1.0
    guessing: Annotated[float, Field(strict=True, ge=0, lt=1)] = 0.0
    upper: Annotated[float, Field(strict=True, gt=0, le=1)] = 1.0

    @model_validator(mode="after")
    def _some_room(self) -> Self:
        if self.guessing >= self.upper:
            raise InvalidValue(f"guessing is {self.guessing} and upper {self.upper}: it must be the larger one")
        return self


class AdaptiveSettings(Contract):
    """When the adaptive order has seen enough of a variant."""

    standard_error: Annotated[float, Field(strict=True, gt=0)] | None = Field(
        default=0.3, description="Stop once the ability is known so well. None: only by count."
    )
    min_tasks: Count = Field(default=5, description="Before this many, the error is not asked for.")
    max_tasks: Count | None = Field(default=None, description="At most so many for each variant. None: all there are.")
    look_ahead: Count = Field(
        default=4,
        description="Tasks of a variant chosen before the results of the earlier ones are known: as many run at once.",
    )
    pass_score: Annotated[float, Field(strict=True)] = Field(
        default=0.5, description="The score from which a task counts as solved, where its grade does not say `passed`."
    )


class AlertSettings(Contract):
    """What of a run is worth an event of its own. None: never."""

    depth: Count | None = Field(default=None, description="Trials that wait.")
    stuck_s: Positive | None = Field(default=None, description="An attempt that has run for so long.")
    failure_rate: Annotated[float, Field(strict=True, gt=0, le=1)] | None = Field(
        default=None, description="Share of a variant's last trials that failed."
    )
    failure_window: Annotated[int, Field(strict=True, ge=1, le=1000)] = Field(
        default=20, description="How many last trials of a variant that share is of."
    )


class QueueSettings(Contract):
    """What waits, for how long, and how much of it there may be."""

    promote_after_s: Positive | None = Field(
        default=300.0,
        description="For order: priority. What has waited so long goes up to the next priority there is, and again.",
    )
    urgent_within_s: Seconds = Field(
        default=60.0, description="For order: priority. So long before its deadline_s, a task goes before all others."
    )
    max_waiting: Count | None = Field(
        default=None, description="Trials that may wait. A submission that would make it more is refused."
    )
    quotas: Mapping[str, Count] = Field(
        default_factory=dict, description="The same for one priority: a level's name, or a number as text."
    )
    when_full: Literal["refuse", "displace"] = Field(
        default="refuse",
        description="displace: what has the lowest priority, and of that the oldest, makes room for what has a higher "
        "one. It goes to the dead letters.",
    )
    duplicates: Literal["merge", "reject", "keep"] = Field(
        default="merge", description="What to do with a submitted task that says the same as one of the run's."
    )
    failed_dependency: Literal["skip", "block"] = Field(
        default="skip",
        description="block: a task that others need and that failed is not committed. The run stops there until it "
        "is retried or given up.",
    )
    adaptive: AdaptiveSettings = AdaptiveSettings()
    alerts: AlertSettings = AlertSettings()

    @model_validator(mode="after")
    def _known_quotas(self) -> Self:
        _ = self.quota_of
        return self

    @property
    def quota_of(self) -> dict[int, int]:
        """The quotas by priority."""
        found: dict[int, int] = {}
        for name, count in self.quotas.items():
            try:
                priority = LEVELS[name] if name in LEVELS else int(name)
            except ValueError:
                raise InvalidValue(
                    f"quotas: {name!r} is no priority; allowed: a whole number, {', '.join(LEVELS)}"
                ) from None
            if priority in found:
                raise InvalidValue(f"quotas: {name!r} is named twice, by its level and by its number")
            found[priority] = count
        return found


class LaneSettings(Contract):
    """The rate scope of a provider: what all variants that name it may use together. None: as much as they like."""

    max_concurrent: Count | None = Field(default=None, description="Trials in flight.")
    rpm: Annotated[float, Field(gt=0)] | None = Field(
        default=None, description="Starts in any minute, or requests, where trials report them."
    )
    tpm: Annotated[float, Field(gt=0)] | None = Field(default=None, description="Tokens in any minute.")
    min_gap_s: Seconds = Field(default=0.0, description="Between two starts.")
    adaptive: bool = Field(
        default=False,
        description="Halve the trials in flight when the provider turns one away, and add one after each round of "
        "successes, up to max_concurrent.",
    )

    @model_validator(mode="after")
    def _bounded(self) -> Self:
        if self.adaptive and self.max_concurrent is None:
            raise InvalidValue("adaptive needs max_concurrent: what to halve, and up to where to grow again")
        return self
