"""`python -m sandbox_exec` is `sandbox-exec`."""

from sandbox_exec.cli import main

main()
