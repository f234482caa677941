"""Asks a pretended provider, which turns it away now and then, and says so in the trace.

A shell can do the same: echo '{"type": "usage", "tokens": 120}' > "$SANDBOX_EXEC_TRACE".
"""

import json
import os
import random
import sys
from pathlib import Path

TRY_AGAIN_LATER = 75  # the exit code that says so

trace = Path(os.environ["SANDBOX_EXEC_TRACE"])
if random.random() < float(os.environ.get("TURNED_AWAY", "0")):  # not by the seed: the next attempt may be luckier
    trace.write_text(json.dumps({"type": "rate_limited", "retry_after_s": 0.1}) + "\n")
    sys.exit(TRY_AGAIN_LATER)
task = json.loads(Path(os.environ["SANDBOX_EXEC_IN"], "task.json").read_text())
trace.write_text(json.dumps({"type": "usage", "tokens": 100 + len(task["input"])}) + "\n")
Path(os.environ["SANDBOX_EXEC_OUT"], "result.json").write_text(json.dumps({"words": len(task["input"].split())}))
