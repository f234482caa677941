"""Compares what the agent wrote with the hidden answer. Nothing that the agent left is executed."""

import json
import os
import sys
from pathlib import Path

hidden = json.loads(Path(os.environ["SANDBOX_EXEC_GRADING"], "answer.json").read_text())
due = hidden["due"]
try:
    found = json.loads(Path(os.environ["SANDBOX_EXEC_WORKSPACE"], hidden["file"]).read_text())
except (OSError, ValueError):
    found = None
if isinstance(found, list):
    found = {str(place): item for place, item in enumerate(found)}
right = sum(found.get(key) == value for key, value in due.items()) if isinstance(found, dict) else 0
whole = found == due
score = float(whole) if "--strict" in sys.argv else right / len(due)
grade = {"score": score, "passed": whole, "metrics": {"right": right}}
Path(os.environ["SANDBOX_EXEC_GRADE"]).write_text(json.dumps(grade))
