"""Preflight: what would go wrong with an experiment, found before the first trial and told with what to do about it.

Three parts, each dearer than the one before:

  static   what the experiment says, against itself, its files, the environment and the machine. Reads names and modes,
           and of archives the manifest. Takes milliseconds; `quick_check` is this part alone
  images   for docker: each image is there or can be pulled, is for this machine, has the programs that are named, and
           holds nothing of the grading, in no layer. Nothing of the image runs for this: its files are looked at
           through a container that is created and never started, its layers as the archive that `docker save` gives
  smoke    trials in the same sandboxes as a run's, by the same workers. In each image one that writes to /workspace and
           /out; for each image and variant one whose agent does nothing, which must not pass; where a task names a
           reference solution, the grading of that, which must pass. Each grading twice: a grader that says two things
           of the same input is no measure. No agent under test is ever started

What was found in order by the last two is kept in the user's cache folder, by the digest of what went in, for a week.
What was not is looked at again each time.

Limits. What programs load in turn is not seen, neither by the search for programs nor by the digests. A file of the
grading is found in an image by its content, or by its place below a folder of the same name; renamed and changed, or in
an archive, it is not. A grader that passes the one agent that does nothing may be right about all others, and wrong.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from sandbox_exec.contracts import Rung
from sandbox_exec.contracts.experiment import Experiment
from sandbox_exec.errors import InvalidValue
from sandbox_exec.experiment import load_experiment
from sandbox_exec.preflight.cache import Cache, cache_folder
from sandbox_exec.preflight.files import Files
from sandbox_exec.preflight.findings import Finding, Found, Preflight, has_error, told
from sandbox_exec.preflight.images import Images
from sandbox_exec.preflight.smoke import Smoke
from sandbox_exec.preflight.static import Machine, slots_of, static

__all__ = ["Finding", "Machine", "Preflight", "cache_folder", "preflight", "quick_check"]

PathLike = str | os.PathLike[str]


def preflight(
    experiment: Experiment | PathLike,
    *,
    quick: bool = False,
    say: Callable[[str], None] = lambda line: None,
    runs: PathLike = "runs",
    containment: str = "auto",
    cache: PathLike | Literal[True] | None = True,
) -> Preflight:
    """Look at all of an experiment, or of the file that holds one; with `quick`, at what takes no time.

    say: gets lines of progress.
    runs: the folder below which a run would be made: is there room?
    containment: as for `run`.
    cache: the folder for what was in order; True: the user's own, None: none.

    Raises `InvalidExperiment` for a file that is none, `InvalidValue` for no containment. All else is a finding.
    """
    began_s = time.monotonic()
    if containment not in ("auto", *Rung):
        raise InvalidValue(f"there is no containment {containment!r}; allowed: auto, {', '.join(Rung)}")
    if not isinstance(experiment, Experiment):
        experiment = load_experiment(experiment)
    tasks, variants = len(experiment.tasks), len(experiment.variants)
    checked = [f"{tasks} tasks x {variants} variants: {slots_of(experiment)} trials"]
    found = [*static(experiment, Machine.here(), Path(runs), None, containment)]
    kept = Cache(cache_folder() if cache is True else Path(cache) if cache is not None else None)
    if not quick:
        files = Files(experiment)
        found += files.look()
        images = Images(experiment, files, kept, say)
        found += images.look()
        checked += [f"image {name}: {image.id}, {image.platform}" for name, image in images.there.items()]
        if has_error(found):
            what = "no trial was tried: what is wrong already would be found again by each of them"
            found.append(Found("note", "smoke", what, "put the errors right, then try again"))
        else:
            smoke = Smoke(experiment, images.there, containment, kept, say)
            found += smoke.look()
            checked += smoke.checked
    return Preflight(
        experiment=experiment.name,
        quick=quick,
        findings=tuple(told(found)),
        checked=tuple(checked),
        from_cache=kept.hits,
        wall_s=round(time.monotonic() - began_s, 3),
    )


def quick_check(
    experiment: Experiment,
    *,
    runs: PathLike = "runs",
    workers: int | None = None,
    containment: str = "auto",
    machine: Machine | None = None,
) -> list[Finding]:
    """What the static part finds, errors first. `workers`: trials at once, in place of the design's."""
    return told(static(experiment, machine or Machine.here(), Path(runs), workers, containment))
