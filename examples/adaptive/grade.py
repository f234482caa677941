"""Says whether it was solved. A real grader would look for itself; this one takes the agent's word."""

import json
import os
from pathlib import Path

result = json.loads(Path(os.environ["SANDBOX_EXEC_OUT"], "result.json").read_text())
grade = {"score": float(result["solved"]), "passed": result["solved"]}
Path(os.environ["SANDBOX_EXEC_GRADE"]).write_text(json.dumps(grade))
