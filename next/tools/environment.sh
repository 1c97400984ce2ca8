# shellcheck shell=bash
# The project's virtual environment, for the scripts beside this file to source.

root=$(cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.." && pwd)
constraints=$root/tools/constraints.txt
venv_options=()

# Make $root/.venv hold jobkit and its extras $@. Takes no time when it does: a stamp tells what was installed.
ensure_environment() {
    local wanted python=${PYTHON:-python3}
    wanted=$(cd "$root" && cat setup.cfg pyproject.toml tools/constraints.txt | sha256sum)
    is_installed "$wanted" "$@" && return

    if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))'; then
        echo "jobkit needs Python 3.10 or newer; set PYTHON to one. Found: $("$python" --version 2>&1)" >&2
        exit 2
    fi
    # A second first call waits here for the first one to finish.
    (flock 9 && { is_installed "$wanted" "$@" || install "$python" "$wanted" "$@"; }) 9<"$root"
}

# The same with a torch that sees a GPU: this machine's own where it has such a one, else what pip installs, which is
# the build for CUDA where pip is not told otherwise. Ends with 2 and one line where there is none.
ensure_gpu_environment() {
    local python=${PYTHON:-python3} own=$root/.venv/bin/python
    if ! compgen -G '/dev/nvidia[0-9]*' >/dev/null && [[ ! -e /dev/dxg ]]; then
        echo "error: this machine has no NVIDIA GPU (no /dev/nvidia0): run it where there is one" >&2
        exit 2
    fi
    if [[ ! -x $own ]] && sees_gpu "$python"; then
        venv_options=(--system-site-packages)
        constraints=$(mktemp)
        grep --invert-match --extended-regexp '^torch(vision)?==' "$root/tools/constraints.txt" >"$constraints"
    fi
    ensure_environment "$@"
    if ! sees_gpu "$own"; then
        echo "error: torch.cuda.is_available() is false for $("$own" -c 'import torch; print(torch.__version__)') in" \
            "$root/.venv: install a build for your driver there (pytorch.org/get-started), or remove .venv and set PYTHON" \
            "to a Python whose torch sees the GPU" >&2
        exit 2
    fi
}

sees_gpu() {
    "$1" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' 2>/dev/null
}

is_installed() {
    local wanted=$1 extra
    shift
    for extra; do
        [[ -x $root/.venv/bin/python && $(cat "$root/.venv/installed-$extra" 2>/dev/null) == "$wanted" ]] || return 1
    done
}

install() {
    local python=$1 wanted=$2 extra clear=() extras
    shift 2
    # An install that was interrupted may have left half a package, which pip would take for a whole one.
    [[ ! -e $root/.venv/incomplete ]] || clear=(--clear)
    trap 'exit 130' INT TERM # pip ends as if nothing was wrong with what it leaves
    echo "Installing into $root/.venv; this happens once." >&2
    mkdir -p "$root/.venv"
    touch "$root/.venv/incomplete"
    rm -f "$root"/.venv/installed-*
    "$python" -m venv "${clear[@]}" "${venv_options[@]}" "$(readlink -f "$root/.venv")" # where it may be a link to: venv takes none
    touch "$root/.venv/incomplete"
    extras=$(IFS=, && echo "$*")
    if ! "$root/.venv/bin/python" -m pip install --quiet --no-input --disable-pip-version-check \
        --constraint "$constraints" --editable "${root}[$extras]" >&2; then
        rm "$root/.venv/incomplete" # pip itself has put back what was there
        exit 1
    fi
    for extra; do echo "$wanted" >"$root/.venv/installed-$extra"; done
    rm "$root/.venv/incomplete"
}
