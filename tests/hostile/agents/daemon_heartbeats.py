"""Wants to outlive a supervisor that is killed: a detached daemon that keeps writing to a file.

The daemon holds an exclusive `flock` on `$SANDBOX_EXEC_OUT/heartbeat`: who gets that lock knows, without
a clock, that the daemon is gone.
"""

import fcntl
import os
import signal
import time
from collections.abc import Callable


def attack(ready: Callable[[dict[str, object]], object]) -> None:
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            path = os.path.join(os.environ.get("SANDBOX_EXEC_OUT", "."), "heartbeat")
            with open(path, "w") as file:
                fcntl.flock(file, fcntl.LOCK_EX)
                for beat in range(30000):
                    os.pwrite(file.fileno(), b"%d\n" % beat, 0)
                    if beat == 1:
                        ready({"heartbeat": path})
                    time.sleep(0.01)
        os._exit(0)
    os.wait()
    time.sleep(300)


if __name__ == "__main__":
    __import__("_common").command(attack)
