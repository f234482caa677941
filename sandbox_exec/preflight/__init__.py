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

from sandbox_exec.preflight.cache import cache_folder
from sandbox_exec.preflight.checks import preflight, quick_check
from sandbox_exec.preflight.findings import Finding, Preflight
from sandbox_exec.preflight.static import Machine

__all__ = ["Finding", "Machine", "Preflight", "cache_folder", "preflight", "quick_check"]
