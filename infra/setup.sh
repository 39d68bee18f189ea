# Sourced by infra/demo and infra/test: makes .venv with the extras asked for, and does nothing when they are there.
#
#   PYTHON               the Python to build .venv with (default: the first of python3, python3.14 … python3.11 that is >= 3.11)
#   PAGEMILL_TORCH_INDEX a pip index that serves CPU builds of torch, e.g. https://download.pytorch.org/whl/cpu;
#                        without it pip takes whatever torch its own index has, on Linux a CUDA build of gigabytes

say() { printf '\033[2m· %s\033[0m\n' "$*" >&2; }
die() { printf 'pagemill: %s\n' "$*" >&2; exit 1; }

find_python() {
    local candidate
    for candidate in ${PYTHON:-python3 python3.14 python3.13 python3.12 python3.11}; do
        if "$candidate" -c 'import sys; raise SystemExit(sys.version_info < (3, 11))' 2>/dev/null; then
            command -v "$candidate"
            return
        fi
    done
    die "needs Python 3.11 or newer; none was found (set PYTHON=/path/to/python3)"
}

# set_up EXTRA: .venv holds pagemill[EXTRA] from this checkout, as pyproject.toml asks for it now.
set_up() {
    local extra=$1 python stamp want
    want=$(cksum < pyproject.toml)
    stamp=.venv/.pagemill-$extra
    if [ -x .venv/bin/python ]; then
        # The test extra holds every other one.
        [ "$(cat "$stamp" 2>/dev/null)" != "$want" ] || return 0
        [ "$(cat .venv/.pagemill-test 2>/dev/null)" != "$want" ] || return 0
    fi
    python=$(find_python) || exit 1
    if [ ! -x .venv/bin/python ]; then
        say "making .venv with $("$python" --version)"
        "$python" -m venv .venv || die "cannot make a virtual environment with $python (on Debian: apt-get install python3-venv)"
    fi
    say "installing torch into .venv: 200 MB to fetch as a CPU build, gigabytes with CUDA's libraries (once; pip is silent meanwhile)"
    # torch first and by itself: the index of CPU builds holds torch alone.
    pip_install 'torch>=2.11,<2.14' ${PAGEMILL_TORCH_INDEX:+--index-url "$PAGEMILL_TORCH_INDEX"}
    say "installing pagemill[$extra] and what else it needs (once)"
    pip_install -e ".[$extra]"
    printf '%s\n' "$want" > "$stamp"
}

pip_install() {
    local log
    log=$(mktemp)
    if ! .venv/bin/python -m pip install --quiet --disable-pip-version-check "$@" > "$log" 2>&1; then
        cat "$log" >&2
        rm -f "$log"
        die "pip could not install $*; its own words stand above"
    fi
    rm -f "$log"
}
