"""Solves a task with the chance that item response theory gives an agent of its ability."""

import json
import math
import os
import random
from pathlib import Path

task = json.loads(Path(os.environ["SANDBOX_EXEC_IN"], "task.json").read_text())
chance = 1 / (1 + math.exp(-2 * (float(os.environ["ABILITY"]) - task["input"]["difficulty"])))
solved = random.Random(task["seed"]).random() < chance
Path(os.environ["SANDBOX_EXEC_OUT"], "result.json").write_text(json.dumps({"solved": solved}))
