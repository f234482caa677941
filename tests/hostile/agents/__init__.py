"""One attack a file, named after what it tries.

Never run one outside of a sandbox, nor in a plain subprocess: some write to every descriptor they inherit.
"""
