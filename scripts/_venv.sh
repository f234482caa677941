# Sourced by the scripts beside it, from the root of the checkout: makes .venv and installs the package into it.
#
#   ensure_venv NAME              .venv with Python 3.11 or later; NAME is the script that asks, for messages
#   ensure_package NAME [EXTRA]   the package, with an extra of pyproject.toml if one is named
#
# PYTHON names the interpreter to make .venv with, if it is not the first suitable one on PATH.

python=.venv/bin/python

recent_enough() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; }

find_python() {
    local candidate
    for candidate in ${PYTHON:+"$PYTHON"} python3 python3.14 python3.13 python3.12 python3.11; do
        if recent_enough "$candidate"; then
            echo "$candidate"
            return
        fi
    done
    echo "$1: Python 3.11 or later is needed; 'python3' is $(python3 --version 2>&1 || true)." >&2
    echo "Install one, or name it: PYTHON=/path/to/python3.11 $1" >&2
    return 1
}

ensure_venv() {
    if recent_enough "$python"; then
        return
    fi
    local base_python
    base_python=$(find_python "$1")
    echo "$1: making .venv with $("$base_python" --version)" >&2
    if ! "$base_python" -m venv --clear .venv >&2; then
        rm -rf .venv # half of one would look whole to the next run
        return 1
    fi
}

ensure_package() {
    # The checkout's path is part of the key: a moved checkout must be installed again.
    local extra=${2:-} key stamp
    local stamps=(".venv/installed${extra:+-$extra}")
    [[ -n $extra ]] || stamps+=(.venv/installed-dev) # any extra brings the package too; this one is common
    key="$(cksum < pyproject.toml) $PWD"
    for stamp in "${stamps[@]}"; do
        if [[ "$(cat "$stamp" 2>/dev/null || true)" == "$key" ]]; then
            return
        fi
    done
    echo "$1: installing the package${extra:+ and its $extra extra} into .venv" >&2
    "$python" -m pip install --quiet --disable-pip-version-check -e ".${extra:+[$extra]}" >&2
    echo "$key" > "${stamps[0]}"
}
