"""What a run says about its variants: how often they passed, how well, at what cost, what failed, and which is better.

Reads what is committed in run.db, and nothing else: no trial's folder, no coordinator, no clock. The same commits give
the same report, byte for byte; what is random is seeded by the experiment.

What counts
  judged      a trial with a grade is judged by its grade, whatever its status (`grade_on: always` grades partial work)
  failed      one without a grade that its agent is to blame for (agent_error, task_timeout, *_exceeded) has not passed,
              and scores 0: to leave it out would reward a variant for dying on what is hard
  not counted all others: nobody knows what the agent would have done (setup_failed, grade_error, rate_limited,
              environment_error, worker_lost, cancelled, skipped), or nobody judged it (success without a grade)
  passed      is what the grader says in `passed`; a score is never turned into one. A grade without it counts for the
              mean score only, and a run in which no grade has it has no pass rate. So it is by task: one whose grades
              never say `passed`, or whose successes are not graded, has no failures either

Only the last attempt at a trial is looked at, as that is what was committed. Numbers have nine digits.
"""

from __future__ import annotations

import importlib.metadata
import itertools
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, NamedTuple

from pydantic import Field

from sandbox_exec.contracts import Blame, Contract, Experiment, Isolation, Status, derive_seed
from sandbox_exec.dispatching import IMAGE
from sandbox_exec.experiment import json_digest
from sandbox_exec.figures import Z, clustered_mean, paired_bootstrap, pass_at_k, percentiles, wilson
from sandbox_exec.ledger import QUEUE, experiment_of
from sandbox_exec.schedule.adaptive import AdaptiveQueue
from sandbox_exec.store import RunStore
from sandbox_exec.store.db import Progress, Run

EXAMPLES: Final = 2  # trials that are named for each group of failures
MAX_MESSAGE: Final = 200  # characters of a failure's message
MAX_TYPE: Final = 100  # characters of its type, which agents choose too
MAX_GROUPS: Final = 100  # of failures: agents choose their messages, and could make one each
EVERY_K: Final = 10  # pass@k has every k up to here, then 20, 50, 100, 200 and so on, and the last
MAX_ALL_PAIRS: Final = 12  # variants, up to which each is compared with each other: 66 comparisons
MAX_SCORE: Final = 1e100  # beyond it, sums and squares leave what a float can hold

_READ_MESSAGE: Final = 1000  # characters of a message that are looked at: agents can write more
_MIN_ID: Final = 3  # characters of a task's id that is looked for in messages; "a" is in all of them

# One statement is one snapshot. What was committed of a skipped slot is no attempt, though it may have had some.
# Of a trial that was retried, the last try that was run and is committed counts.
_COUNTS: Final = """
    s.schedule_idx NOT IN (
        SELECT r.retry_of FROM schedule r JOIN commits d ON d.schedule_idx = r.schedule_idx
        WHERE r.retry_of IS NOT NULL AND d.status != 'skipped')
    AND NOT (s.retry_of IS NOT NULL AND c.status IS 'skipped')"""
_QUERY: Final = f"""
    SELECT s.trial_id, s.variant_id, s.task_id, c.status, c.error_type, c.grade, a.completion
    FROM commits c
    JOIN schedule s ON s.schedule_idx = c.schedule_idx
    LEFT JOIN attempts a ON a.schedule_idx = c.schedule_idx AND a.attempt = c.attempt AND c.status != 'skipped'
    WHERE {_COUNTS}
    ORDER BY c.schedule_idx"""


# --- the contract ---


class PassRate(Contract):
    """How many of the trials that count passed."""

    passed: int
    n: int
    rate: float
    low: float = Field(description="Of the Wilson interval, 95 %. It takes repeats of a task for independent.")
    high: float
    stderr: float | None = Field(description="Clustered by task, so that repeats are not taken for independent.")


class MeanScore(Contract):
    """The mean score of the trials that count."""

    n: int
    mean: float
    stderr: float | None = Field(description="Clustered by task. None: there is one task only.")
    low: float | None = Field(description="Of the interval of 95 %: 1.96 standard errors below the mean.")
    high: float | None


class PassAtK(Contract):
    """The chance that one of k trials of a task passes: the unbiased estimate, in the mean over tasks."""

    k: int
    tasks: int = Field(description="Those with k trials that count, or more.")
    value: float


class Percentiles(Contract):
    """Of the trials that have been measured."""

    n: int
    p50: float
    p90: float
    p99: float


class MetricMean(Contract):
    """Of the graded trials that have it."""

    n: int
    mean: float


class VariantReport(Contract):
    """What is known of one variant."""

    variant_id: str
    slots: int = Field(description="Of the schedule.")
    trials: int = Field(description="Committed.")
    by_status: Mapping[Status, int]
    graded: int = Field(description="Trials that have a grade.")
    counted: int = Field(description="Trials that are in the pass rate or in the mean score.")
    not_counted: Mapping[Status, int] = Field(description="The others.")
    pass_rate: PassRate | None
    score: MeanScore | None
    pass_at_k: tuple[PassAtK, ...] = Field(description="Empty without a pass rate.")
    wall_s: Percentiles | None = Field(description="Of the agent's phase.")
    peak_memory_bytes: Percentiles | None
    metrics: Mapping[str, MetricMean]


class TagReport(Contract):
    """One variant on the tasks with one tag."""

    tag: str
    variant_id: str
    tasks: int
    trials: int
    counted: int
    pass_rate: PassRate | None
    score: MeanScore | None


class Paired(Contract):
    """A difference on the same tasks: of the means over tasks, each task being the mean of its trials."""

    difference: float
    low: float | None = Field(description="Of the bootstrap's interval, 95 %. None: there is one task only.")
    high: float | None
    above: float | None = Field(description="The share of rounds in which the difference is above 0; ties are half.")
    tasks: int = Field(description="Those that both have trials of which count.")
    rounds: int


class Comparison(Contract):
    """What `variant_id` has more than `against`."""

    variant_id: str
    against: str
    pass_rate: Paired | None
    score: Paired | None


class FailureGroup(Contract):
    """Trials that failed alike."""

    status: Status
    blame: Blame
    error_type: str | None
    message: str = Field(description="Numbers, paths and ids are replaced by <n>, <path>, <hex>, <id>, <task>.")
    count: int
    by_variant: Mapping[str, int]
    examples: tuple[str, ...] = Field(description="Trial ids: the first of them.")


class SeenIsolation(Contract):
    """What was in force around so many trials, in the agent's or in the grading phase."""

    phase: str
    trials: int
    isolation: Isolation


class Conditions(Contract):
    """What one must know of a run to believe its numbers, or to make it again."""

    experiment: str
    experiment_digest: str = Field(description="Of all that the experiment says, but for its concurrency.")
    inputs_digest: str = Field(description="Of the digests of all inputs: that, every file and folder, the images.")
    created_at: str = Field(description="When the run was made, UTC.")
    seed: int
    tasks: int
    repeats: int
    sandbox: str
    images: Mapping[str, str] = Field(description="By name, what they were at the start of the run.")
    image_ids: Mapping[str, int] = Field(description="In how many trials each was used.")
    grader_digests: Mapping[str, int] = Field(description="How many trials each graded.")
    isolation: tuple[SeenIsolation, ...]
    sandbox_exec: str = Field(description="Version of what made this report.")


class Ability(Contract):
    """What the adaptive order has found out of a repeat of a variant."""

    variant_id: str
    repeat: int
    ability: float
    standard_error: float | None = Field(description="None: nothing is known of it yet.")
    tasks: int = Field(description="How many answers it is from.")
    solved: int
    ended: str | None = Field(description="Why no further task was chosen. None: there are more to come.")


class Report(Contract):
    """What a run says about its variants."""

    run_id: str
    finished: bool = Field(description="Whether all of the schedule is committed.")
    slots: int
    committed: int
    variants: tuple[VariantReport, ...] = Field(description="In the experiment's order, those without trials too.")
    abilities: tuple[Ability, ...] = Field(description="With order: adaptive; empty with all others.")
    tags: tuple[TagReport, ...]
    comparisons: tuple[Comparison, ...]
    failures: tuple[FailureGroup, ...] = Field(description="The most frequent first, up to 100.")
    conditions: Conditions
    notes: tuple[str, ...] = Field(description="What one should know before one cites a number.")


def report_of(folder: Path) -> Report:
    """Return the report of the run in `folder`, which may be worked at meanwhile. Raises `InvalidValue` without one."""
    with RunStore.open(folder, write=False) as store:
        run, progress = store.run(), store.progress()
        read = _Read()
        trials = [read.trial(*row) for row in store.query(_QUERY)]
        scheduled = dict(
            store.query(
                f"""SELECT s.variant_id, count(*) FROM schedule s LEFT JOIN commits c ON c.schedule_idx = s.schedule_idx
                    WHERE {_COUNTS} GROUP BY s.variant_id"""
            )
        )
        noted = store.query("SELECT data FROM events WHERE kind = 'pruned'")
        pruned = sorted({json.loads(data)["variant"] for (data,) in noted})
        experiment = experiment_of(store)
        state = store.state()
    judged = [*_judged(trials)]
    by_variant: dict[str, list[_Verdict]] = {variant.id: [] for variant in experiment.variants}
    for one in judged:
        by_variant.setdefault(one.trial.variant_id, []).append(one)
    comparisons = tuple(_comparisons(by_variant, experiment.seed))
    failures = read.failures()
    return Report(
        run_id=run.run_id,
        finished=progress.committed == progress.slots,
        slots=progress.slots,
        committed=progress.committed,
        variants=tuple(
            _variant(variant_id, scheduled.get(variant_id, 0), found, experiment.design.repeats)
            for variant_id, found in by_variant.items()
        ),
        abilities=tuple(_abilities(experiment, state)),
        tags=tuple(_tags(by_variant, experiment)),
        comparisons=comparisons,
        failures=failures[:MAX_GROUPS],
        conditions=read.conditions(run, experiment),
        notes=(
            *_notes(progress, experiment, judged, comparisons, pruned),
            *(
                [f"There are {len(failures)} kinds of failures: the rarest are not listed."]
                * (len(failures) > MAX_GROUPS)
            ),
        ),
    )


def _abilities(experiment: Experiment, state: Mapping[str, Any]) -> Iterator[Ability]:
    """What the queue knew at the last commit."""
    if experiment.design.order == "adaptive" and state.get(QUEUE) is not None:
        queue = AdaptiveQueue(experiment)
        queue.restore(state[QUEUE], experiment.tasks)
        for found in queue.report():
            yield Ability.model_validate({name: found[name] for name in Ability.model_fields})


# --- reading ---


class _Trial(NamedTuple):
    """What figures are made of."""

    variant_id: str
    task_id: str
    status: Status
    score: float | None
    passed: bool | None
    metrics: Mapping[str, float]
    wall_s: float | None
    memory_bytes: float | None


class _Read:
    """Takes commits one by one, and keeps of each only what is needed: there may be a million."""

    def __init__(self) -> None:
        self._groups: dict[tuple[Status, str | None, str], Counter[str]] = {}
        self._examples: dict[tuple[Status, str | None, str], list[str]] = {}
        self._image_ids: Counter[str] = Counter()
        self._graders: Counter[str] = Counter()
        self._isolation: Counter[tuple[str, str]] = Counter()

    def trial(
        self,
        trial_id: str,
        variant_id: str,
        task_id: str,
        status_name: str,
        error_type: str | None,
        grade_json: str | None,
        completion_json: str | None,
    ) -> _Trial:
        status = Status(status_name)
        completion = json.loads(completion_json) if completion_json else {}
        grade = json.loads(grade_json) if grade_json else {}
        usage, grading = completion.get("usage") or {}, completion.get("grading") or {}
        if status is not Status.SUCCESS:
            message = normalised(_why(completion), task_id)
            group = (status, error_type and error_type[:MAX_TYPE], message)
            self._groups.setdefault(group, Counter())[variant_id] += 1
            examples = self._examples.setdefault(group, [])
            if len(examples) < EXAMPLES:
                examples.append(trial_id)
        if completion.get("image_id"):
            self._image_ids[completion["image_id"]] += 1
        if grade and grading.get("grader_digest"):
            self._graders[grading["grader_digest"]] += 1
        for phase, seen in (("agent", completion.get("isolation")), ("grade", grading.get("isolation"))):
            if seen:
                # A uid of its own for each worker would make as many conditions as there are workers.
                self._isolation[phase, json.dumps({**seen, "uid": None}, sort_keys=True)] += 1
        return _Trial(
            variant_id=variant_id,
            task_id=task_id,
            status=status,
            score=grade.get("score"),
            passed=grade.get("passed"),
            metrics=grade.get("metrics") or {},
            wall_s=usage.get("wall_s"),
            memory_bytes=usage.get("peak_memory_bytes"),
        )

    def failures(self) -> tuple[FailureGroup, ...]:
        groups = [
            FailureGroup(
                status=status,
                blame=status.blame or Blame.AGENT,
                error_type=error_type,
                message=message,
                count=counts.total(),
                by_variant=dict(counts),
                examples=tuple(self._examples[status, error_type, message]),
            )
            for (status, error_type, message), counts in self._groups.items()
        ]
        return tuple(sorted(groups, key=lambda group: -group.count))  # stable: of equal ones, the first to happen

    def conditions(self, run: Run, experiment: Experiment) -> Conditions:
        said = experiment.model_dump(mode="json", exclude={"base", "sources"}, exclude_defaults=True)
        said.get("design", {}).pop("max_concurrency", None)
        images = {name.removeprefix(IMAGE): one for name, one in run.digests.items() if name.startswith(IMAGE)}
        return Conditions(
            experiment=experiment.name,
            experiment_digest=json_digest(said),
            inputs_digest=json_digest(run.digests),
            created_at=f"{datetime.fromtimestamp(run.created_at, UTC):%Y-%m-%dT%H:%M:%SZ}",
            seed=experiment.seed,
            tasks=len(experiment.tasks),
            repeats=experiment.design.repeats,
            sandbox=experiment.sandbox.kind,
            images=dict(sorted(images.items())),
            image_ids=dict(sorted(self._image_ids.items())),
            grader_digests=dict(sorted(self._graders.items())),
            isolation=tuple(
                SeenIsolation(phase=phase, trials=count, isolation=Isolation.model_validate_json(seen))
                for (phase, seen), count in sorted(self._isolation.items())
            ),
            sandbox_exec=_version(),
        )


def _why(completion: Mapping[str, Any]) -> str:
    error = completion.get("error") or {}
    if error.get("message"):
        return str(error["message"])
    if completion.get("signal") is not None:
        return f"signal {completion['signal']}"
    return "" if completion.get("exit_code") is None else f"exit code {completion['exit_code']}"


_KEPT: Final = re.compile(r"(?:exit code|signal|status) -?\d+")  # numbers that say what happened
_IDS: Final = re.compile(r"\b[0-9a-f]{8}-(?:[0-9a-f]{4}-){3}[0-9a-f]{12}\b", re.IGNORECASE)
_URLS: Final = re.compile(r"\b[a-z][a-z0-9+.-]{0,20}://[^\s'\"<>|)]+", re.IGNORECASE)
_PATHS: Final = re.compile(r"(?<![\w/<>])(?:~|\.{1,2})?/[^\s'\"<>|:,;()\[\]]+")
_HEX: Final = re.compile(r"\b(?:0x[0-9a-f]+|(?=[a-f]*\d)(?=\d*[a-f])[0-9a-f]{8,})\b", re.IGNORECASE)
_NUMBERS: Final = re.compile(r"(?:(?<!\w)[-+])?\d+(?:[.,]\d+)*(?:e[-+]?\d+\b)?", re.IGNORECASE)


def normalised(message: str, task_id: str = "") -> str:
    """Return a message without what differs between failures that are alike, on one line and not too long.

    Exit codes, signals and HTTP statuses are kept, as they say what happened. Relative paths are not recognised.
    """
    text = " ".join(message[:_READ_MESSAGE].split())
    if len(task_id) >= _MIN_ID and not task_id.isdigit():
        text = re.sub(rf"(?<!\w){re.escape(task_id)}(?!\w)", "<task>", text)
    kept: list[str] = []
    pieces = []
    at = 0
    for match in _KEPT.finditer(text):
        pieces.append(text[at : match.start()])
        kept.append(match.group())
        at = match.end()
    pieces.append(text[at:])
    done = [_NUMBERS.sub("<n>", _HEX.sub("<hex>", _places_out(_IDS.sub("<id>", piece)))) for piece in pieces]
    joined = "".join(itertools.chain.from_iterable(itertools.zip_longest(done, kept, fillvalue="")))
    return joined if len(joined) <= MAX_MESSAGE else f"{joined[: MAX_MESSAGE - 3]}..."


def _places_out(text: str) -> str:
    return _PATHS.sub("<path>", _URLS.sub("<url>", text))


def _version() -> str:
    try:
        return importlib.metadata.version("sandbox-exec")
    except importlib.metadata.PackageNotFoundError:  # it runs from its sources
        return "unknown"


# --- judging ---


class _Verdict(NamedTuple):
    """A trial and what it counts as. None: it does not count there."""

    trial: _Trial
    score: float | None
    passed: bool | None

    @property
    def counts(self) -> bool:
        return self.score is not None or self.passed is not None


class _Task:
    """What a task's trials show about its grading."""

    def __init__(self) -> None:
        self.says_passed = self.graded = self.left_ungraded = False


def _judged(trials: Sequence[_Trial]) -> Iterator[_Verdict]:
    """Decide what each trial counts as: see "What counts"."""
    run, tasks = _Task(), {trial.task_id: _Task() for trial in trials}
    for trial in trials:
        for of in (run, tasks[trial.task_id]):
            of.graded |= trial.score is not None
            of.says_passed |= trial.passed is not None
            of.left_ungraded |= trial.status is Status.SUCCESS and trial.score is None
    for trial in trials:
        task = tasks[trial.task_id]
        if trial.status.blame not in (None, Blame.AGENT):
            yield _Verdict(trial, None, None)
        elif trial.score is not None:
            yield _Verdict(trial, trial.score, trial.passed)
        elif trial.status is Status.SUCCESS:
            yield _Verdict(trial, None, None)
        else:
            # Of a task on which every agent died nothing is known, and it is taken for one like the others.
            like_others = not task.graded and not task.left_ungraded
            scored = task.graded or (run.graded and like_others)
            decided = task.says_passed or (run.says_passed and like_others)
            yield _Verdict(trial, 0.0 if scored else None, False if decided else None)


# --- figures ---


def _variant(variant_id: str, slots: int, found: Sequence[_Verdict], repeats: int) -> VariantReport:
    trials = [one.trial for one in found]
    metrics: dict[str, list[float]] = {}
    for trial in trials:
        for name, value in trial.metrics.items():
            metrics.setdefault(name, []).append(value)
    return VariantReport(
        variant_id=variant_id,
        slots=slots,
        trials=len(found),
        by_status=_in_order(Counter(trial.status for trial in trials)),
        graded=sum(trial.score is not None for trial in trials),
        counted=sum(one.counts for one in found),
        not_counted=_in_order(Counter(one.trial.status for one in found if not one.counts)),
        pass_rate=_pass_rate(found),
        score=_mean_score(found),
        pass_at_k=tuple(_pass_at_k(found, repeats)),
        wall_s=_percentiles([trial.wall_s for trial in trials]),
        peak_memory_bytes=_percentiles([trial.memory_bytes for trial in trials]),
        metrics={
            name: MetricMean(n=len(values), mean=_short(clustered_mean([values]).mean))
            for name, values in sorted(metrics.items())
        },
    )


def _in_order(counts: Mapping[Status, int]) -> dict[Status, int]:
    return {status: counts[status] for status in Status if counts.get(status)}


def _passes(found: Iterable[_Verdict]) -> dict[str, list[float]]:
    """By task, 1.0 for each trial that passed and 0.0 for each that did not."""
    return _by_task(found, lambda one: None if one.passed is None else float(one.passed))


def _scores(found: Iterable[_Verdict]) -> dict[str, list[float]]:
    by_task = _by_task(found, lambda one: one.score)
    too_large = any(abs(score) > MAX_SCORE for scores in by_task.values() for score in scores)
    return {} if too_large else by_task


def _by_task(found: Iterable[_Verdict], value_of: Callable[[_Verdict], float | None]) -> dict[str, list[float]]:
    by_task: dict[str, list[float]] = {}
    for one in found:
        value = value_of(one)
        if value is not None:
            by_task.setdefault(one.trial.task_id, []).append(value)
    return by_task


def _pass_rate(found: Iterable[_Verdict]) -> PassRate | None:
    by_task = _passes(found)
    if not by_task:
        return None
    clustered = clustered_mean(by_task.values())
    passed = round(sum(map(sum, by_task.values())))
    low, high = wilson(passed, clustered.n)
    return PassRate(
        passed=passed,
        n=clustered.n,
        rate=_short(passed / clustered.n),
        low=_short(low),
        high=_short(high),
        stderr=_short_or_none(clustered.stderr),
    )


def _mean_score(found: Iterable[_Verdict]) -> MeanScore | None:
    by_task = _scores(found)
    if not by_task:
        return None
    n, mean, stderr = clustered_mean(by_task.values())
    return MeanScore(
        n=n,
        mean=_short(mean),
        stderr=_short_or_none(stderr),
        low=None if stderr is None else _short(mean - Z * stderr),
        high=None if stderr is None else _short(mean + Z * stderr),
    )


def _pass_at_k(found: Iterable[_Verdict], repeats: int) -> Iterator[PassAtK]:
    counts = Counter((len(passes), round(sum(passes))) for passes in _passes(found).values())
    for k in _ks(repeats):
        able = [(pass_at_k(n, c, k), tasks) for (n, c), tasks in sorted(counts.items()) if n >= k]
        tasks = sum(count for _, count in able)
        if tasks:
            yield PassAtK(k=k, tasks=tasks, value=_short(sum(value * count for value, count in able) / tasks))


def _ks(repeats: int) -> list[int]:
    steps = (digit * 10**power for power in range(1, 8) for digit in (1, 2, 5))
    return sorted({*range(1, min(repeats, EVERY_K) + 1), *(k for k in steps if k <= repeats), repeats})


def _percentiles(values: Iterable[float | None]) -> Percentiles | None:
    known = [value for value in values if value is not None]
    if not known:
        return None
    p50, p90, p99 = map(_short, percentiles(known))
    return Percentiles(n=len(known), p50=p50, p90=p90, p99=p99)


def _tags(by_variant: Mapping[str, Sequence[_Verdict]], experiment: Experiment) -> Iterator[TagReport]:
    tagged: dict[str, set[str]] = {}
    for task in experiment.tasks:
        for tag in task.protocol.tags:
            tagged.setdefault(tag, set()).add(task.id)
    for tag, tasks in sorted(tagged.items()):
        for variant_id, found in by_variant.items():
            mine = [one for one in found if one.trial.task_id in tasks]
            yield TagReport(
                tag=tag,
                variant_id=variant_id,
                tasks=len(tasks),
                trials=len(mine),
                counted=sum(one.counts for one in mine),
                pass_rate=_pass_rate(mine),
                score=_mean_score(mine),
            )


def _comparisons(by_variant: Mapping[str, Sequence[_Verdict]], seed: int) -> Iterator[Comparison]:
    passes = {variant_id: _task_means(_passes(found)) for variant_id, found in by_variant.items()}
    scores = {variant_id: _task_means(_scores(found)) for variant_id, found in by_variant.items()}
    pairs = itertools.combinations(by_variant, 2)
    for against, variant_id in pairs if len(by_variant) <= MAX_ALL_PAIRS else _with_first([*by_variant]):
        # One seed for both: where scores are 1 for passed and 0 for not, they must not differ by chance.
        own = derive_seed(seed, f"report: {against} and {variant_id}")
        rate = _paired(passes[against], passes[variant_id], own)
        same = passes[against] == scores[against] and passes[variant_id] == scores[variant_id]
        score = rate if same else _paired(scores[against], scores[variant_id], own)
        if rate is not None or score is not None:
            yield Comparison(variant_id=variant_id, against=against, pass_rate=rate, score=score)


def _with_first(names: Sequence[str]) -> Iterator[tuple[str, str]]:
    return ((names[0], other) for other in names[1:])


def _task_means(by_task: Mapping[str, Sequence[float]]) -> dict[str, float]:
    return {task_id: sum(values) / len(values) for task_id, values in by_task.items()}


def _paired(first: Mapping[str, float], second: Mapping[str, float], seed: int) -> Paired | None:
    shared = sorted(first.keys() & second.keys())  # not in the order in which a set happens to be
    if not shared:
        return None
    found = paired_bootstrap([(first[task_id], second[task_id]) for task_id in shared], seed)
    several = found.pairs > 1
    return Paired(
        difference=_short(found.mean),
        low=_short(found.low) if several else None,
        high=_short(found.high) if several else None,
        above=_short(found.above) if several else None,
        tasks=found.pairs,
        rounds=found.rounds,
    )


def _notes(
    progress: Progress,
    experiment: Experiment,
    judged: Sequence[_Verdict],
    comparisons: Sequence[Comparison],
    pruned: Sequence[str],
) -> Iterator[str]:
    if progress.committed < progress.slots:
        yield (
            f"The run is not finished: {progress.committed} of {progress.slots} trials are committed, in the "
            "schedule's order, so what comes later in it is not among them."
        )
    if len(judged) < progress.committed:
        yield f"Trials that were retried, of which the last try counts: {progress.committed - len(judged)}."
    if not any(one.trial.score is not None for one in judged):
        yield "No trial has a grade: there is no pass rate and no score."
        return
    if not any(one.passed is not None for one in judged):
        yield "No grade says whether it passed: there is no pass rate."
    failed = sum(one.counts and one.trial.score is None for one in judged)
    if failed:
        yield f"Trials that failed by their agent and have no grade count as not passed, and as score 0: {failed}."
    left_out = sum(not one.counts for one in judged)
    if left_out:
        yield f"Trials that do not count, as they say nothing about the agent or were not graded: {left_out}."
    if failed and any(one.score is not None and one.score < 0 for one in judged):
        yield "Some scores are below 0, and a failed trial counts as 0: compare scores with care."
    if any(one.score is not None and abs(one.score) > MAX_SCORE for one in judged):
        yield f"Some scores are beyond {MAX_SCORE:g}: where they are, there is no mean score."
    if pruned:
        yield f"Pruned after failures in a row, so that the rest was skipped: {', '.join(pruned)}."
    if experiment.design.repeats > 1 and any(one.passed is not None for one in judged):
        yield "Wilson intervals take repeats of a task for independent; the standard errors do not."
    if experiment.design.order == "adaptive":
        yield "The adaptive order gave each variant tasks of its own choice: compare abilities, not pass rates."
    if len(comparisons) > 1:
        yield f"Intervals of differences are not corrected for there being {len(comparisons)} comparisons."
    if len(experiment.variants) > MAX_ALL_PAIRS:
        yield f"With more than {MAX_ALL_PAIRS} variants, each is compared with the first only."


def _short(number: float) -> float:
    """Nine digits: what summing in another way would change is not among them."""
    return float(f"{number:.9g}")


def _short_or_none(number: float | None) -> float | None:
    return None if number is None else _short(number)
