"""Where a phase of a trial runs. `process` is a keeper and its agents; `base` is what every kind is."""
