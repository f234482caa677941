"""Doubles a number. What is no number is an error, and so a failed trial."""

import json
import os
from pathlib import Path

task = json.loads(Path(os.environ["SANDBOX_EXEC_IN"], "task.json").read_text())
number = int(task["input"])
Path(os.environ["SANDBOX_EXEC_OUT"], "result.json").write_text(json.dumps({"double": 2 * number}))
