"""Who runs dispatched trials. `base` is the boundary, `local` a pool of processes on this machine."""
