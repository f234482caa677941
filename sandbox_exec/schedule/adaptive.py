"""The adaptive order: each variant gets the task that says most about it, until its ability is known well enough.

Item response theory: a task has a difficulty (`task.item`), a variant an ability on the same scale, and the two say how
likely it is solved. Each repeat of a variant is a session of its own:

  choice      the task with the most Fisher information at the ability as estimated so far; of equals, the first one
  estimate    the mean of the posterior, with a wide normal prior. So there is one for all right and all wrong too,
              which have no maximum of the likelihood; catsim gives the curves, but has no such estimator
  error       the posterior's deviation and a tenth of it, as the parameters of tasks are estimates too. With exact ones
              the interval of 1.96 errors to each side holds the truth 96 to 97 times of 100
  end         at `standard_error`, after `min_tasks` answers; at `max_tasks` chosen; with the last task; when it is
              skipped, as its variant was pruned or the run is over

The schedule is a sequence of rounds, each with one cell for every session that has not ended. There are `look_ahead`
rounds that are not committed as a whole; when one is, the next is chosen, from what is committed then. So a choice
depends on commits alone, whatever runs at the same time, and one that was chosen ahead is run even if its session ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from sandbox_exec.contracts.experiment import Experiment
from sandbox_exec.contracts.queue import AdaptiveSettings, ItemParameters
from sandbox_exec.contracts.status import Blame, Status
from sandbox_exec.contracts.words import Cell, Task, TrialCompletion
from sandbox_exec.errors import InvalidExperiment
from sandbox_exec.schedule.queues import SequentialQueue

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]
    Flags = NDArray[np.bool_]

_PRIOR_DEVIATION: Final = 2.0  # twice what abilities are scaled to: pulls little, and agents are no random sample
_REACH: Final = 8.0  # abilities are looked for from minus to plus this: four deviations
_STEP: Final = 0.02
_MARGIN: Final = 1.1  # of the error
_NEVER_SURE: Final = 1e-9  # of a probability: what rounding makes 0 or 1 would rule abilities out
_DIGITS: Final = 9  # of what choices follow from: the last ones of a float may differ between machines
_NO_ANSWER: Final = "-"  # "1" and "0" are those that count
_GIVEN_UP: Final = "."  # the variant was pruned, or the run is over: it gets no further task


class Estimate(NamedTuple):
    """An ability, and how far off it may be."""

    ability: float
    standard_error: float


class AdaptiveQueue(SequentialQueue):
    """Chooses tasks by what is known of each variant. `observe` is for the cells that it gave, in their order."""

    def __init__(self, experiment: Experiment) -> None:
        super().__init__(experiment)
        self._settings = experiment.design.queue.adaptive
        self._model = _Model()
        self._task_ids: list[str] = []
        self._items = self._model.items(())
        self._sessions = self._fresh_sessions()
        self._rounds: list[int] = []  # how many of each are not yet committed; none of them is 0

    def submit(self, tasks: Sequence[Task]) -> Sequence[Cell]:
        self._add(tasks)
        cells: list[Cell] = []
        while len(self._rounds) < self._settings.look_ahead and (chosen := self._next_round()):
            cells += chosen
        return cells

    def observe(self, completion: TrialCompletion) -> Sequence[Cell]:
        slot = completion.slot
        self._sessions[slot.variant_id, slot.repeat].answer(self._answer(completion), self._items)
        self._rounds[0] -= 1
        if self._rounds[0]:
            return ()
        del self._rounds[0]
        return self._next_round()

    def should_continue(self) -> bool:
        return bool(self._rounds)  # a session that has not ended has a cell in the last one

    def report(self) -> list[dict[str, Any]]:
        """Return for each session how able its variant is, by how many tasks, and why it ended (None: it goes on)."""
        return [
            {
                "variant_id": variant_id,
                "repeat": repeat,
                "ability": session.estimate.ability,
                "standard_error": session.estimate.standard_error if session.counted else None,
                "tasks": session.counted,
                "chosen": len(session.chosen),
                "solved": session.answers.count("1"),
                "ended": session.ended,
            }
            for (variant_id, repeat), session in self._sessions.items()
        ]

    def snapshot(self) -> Any:
        sessions = [[session.chosen.copy(), session.answers] for session in self._sessions.values()]
        return {"rounds": self._rounds.copy(), "sessions": sessions}

    def restore(self, state: Any, tasks: Sequence[Task]) -> None:
        """As in the protocol; `tasks` are in the order in which they were submitted."""
        self._task_ids, self._items, self._sessions = [], self._model.items(()), self._fresh_sessions()
        self._add(tasks)
        self._rounds = list(state["rounds"])
        for session, (chosen, answers) in zip(self._sessions.values(), state["sessions"], strict=True):
            for number in chosen:
                session.reserve(number)
            for answer in answers:
                session.answer(answer, self._items)

    def _fresh_sessions(self) -> dict[tuple[str, int], _Session]:
        keys = [(variant_id, repeat) for variant_id in self._variant_ids for repeat in range(self._repeats)]
        return {key: _Session(self._model, self._settings) for key in keys}

    def _add(self, tasks: Sequence[Task]) -> None:
        self._task_ids += [task.id for task in tasks]
        self._items = self._model.joined(self._items, self._model.items(tasks))
        for session in self._sessions.values():
            session.free = self._model.joined(session.free, self._model.all_free(len(tasks)))

    def _next_round(self) -> list[Cell]:
        cells = [
            Cell(variant_id, self._task_ids[session.choose(self._items)], repeat)
            for (variant_id, repeat), session in self._sessions.items()
            if session.ended is None
        ]
        if cells:
            self._rounds.append(len(cells))
        return cells

    def _answer(self, completion: TrialCompletion) -> str:
        if completion.status is Status.SKIPPED and completion.error is not None and completion.error.type == "Skipped":
            return _GIVEN_UP
        if completion.blame not in (None, Blame.AGENT):
            return _NO_ANSWER
        grade = completion.grade
        if grade is None:
            return "0"
        passed = grade.passed if grade.passed is not None else grade.score >= self._settings.pass_score
        return "1" if passed else "0"


class _Session:
    """What is known of one repeat of a variant. Answers come in the order of the choices."""

    def __init__(self, model: _Model, settings: AdaptiveSettings) -> None:
        self._model = model
        self._settings = settings
        self._enough = False  # for good: what was chosen ahead may raise the error again
        self._log_posterior = model.log_prior
        self.estimate = model.estimate(self._log_posterior)
        self.free = model.all_free(0)
        self.chosen: list[int] = []
        self.answers = ""

    @property
    def counted(self) -> int:
        return len(self.answers) - self.answers.count(_NO_ANSWER) - self.answers.count(_GIVEN_UP)

    @property
    def ended(self) -> str | None:
        if self._enough:
            return "standard_error"
        if _GIVEN_UP in self.answers:
            return "skipped"
        if self._settings.max_tasks is not None and len(self.chosen) >= self._settings.max_tasks:
            return "max_tasks"
        return "no tasks left" if len(self.chosen) == len(self.free) else None

    def choose(self, items: Floats) -> int:
        number = self._model.best(items, self.free, self.estimate.ability)
        self.reserve(number)
        return number

    def reserve(self, number: int) -> None:
        self.free[number] = False
        self.chosen.append(number)

    def answer(self, answer: str, items: Floats) -> None:
        number = self.chosen[len(self.answers)]
        self.answers += answer
        if answer in (_NO_ANSWER, _GIVEN_UP):
            return
        self._log_posterior = self._log_posterior + self._model.log_likelihood(items[number], solved=answer == "1")
        self.estimate = self._model.estimate(self._log_posterior)
        wanted = self._settings.standard_error
        if wanted is not None and self.counted >= self._settings.min_tasks:
            self._enough |= self.estimate.standard_error <= wanted


class _Model:
    """All that is asked of numpy and catsim, which are loaded for this order only. Curves are over `_grid`."""

    def __init__(self) -> None:
        try:
            import numpy
            from catsim import irt
        except ImportError as error:
            raise InvalidExperiment("order: adaptive needs catsim: pip install 'sandbox-exec[adaptive]'") from error
        self._numpy = numpy
        self._irt = irt
        self._grid: Floats = numpy.linspace(-_REACH, _REACH, round(2 * _REACH / _STEP) + 1)
        self.log_prior: Floats = -0.5 * (self._grid / _PRIOR_DEVIATION) ** 2

    def items(self, tasks: Sequence[Task]) -> Floats:
        """A row for each task, with the columns that catsim wants."""
        default = ItemParameters()
        rows = [
            (item.discrimination, item.difficulty, item.guessing, item.upper)
            for item in (task.item or default for task in tasks)
        ]
        items: Floats = self._numpy.array(rows, dtype=float).reshape(-1, 4)
        return items

    def all_free(self, count: int) -> Flags:
        flags: Flags = self._numpy.ones(count, dtype=bool)
        return flags

    def joined(self, first: Any, second: Any) -> Any:
        return self._numpy.concatenate([first, second])

    def best(self, items: Floats, free: Flags, ability: float) -> int:
        """The number of the free item with the most information at this ability; of equals, the first."""
        # Where an answer is certain, catsim divides 0 by 0. Half of the digits: of equals the last ones may differ.
        information = self._numpy.nan_to_num(self._irt.inf_hpc(ability, items)).astype("float32")
        information[~free] = -1.0
        return int(information.argmax())

    def log_likelihood(self, item: Floats, *, solved: bool) -> Floats:
        """How likely this answer is at each ability of the grid."""
        likely = self._irt.icc_hpc(self._grid, item.reshape(1, 4))
        if not solved:
            likely = 1.0 - likely
        logarithms: Floats = self._numpy.log(likely.clip(_NEVER_SURE, 1.0))
        return logarithms

    def estimate(self, log_posterior: Floats) -> Estimate:
        weights = self._numpy.exp(log_posterior - log_posterior.max())
        weights /= weights.sum()
        ability = float((weights * self._grid).sum())
        deviation = float((weights * (self._grid - ability) ** 2).sum()) ** 0.5
        # + 0.0: no minus before a zero.
        return Estimate(round(ability, _DIGITS) + 0.0, round(_MARGIN * deviation, _DIGITS))
