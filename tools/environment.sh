# shellcheck shell=bash
# The project's virtual environment, for the scripts beside this file to source.

root=$(cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.." && pwd)
venv=$root/.venv
constraints=$root/tools/constraints.txt

# Make $venv hold jobkit and its extras $@. Takes no time when it does: a stamp says what was installed.
ensure_environment() {
    local wanted python=${PYTHON:-python3}
    wanted=$(cd "$root" && cat setup.cfg pyproject.toml "$constraints" | sha256sum)
    is_installed "$wanted" "$@" && return

    command -v "$python" >/dev/null || { echo "PYTHON=$python: there is no such program" >&2 && exit 2; }
    if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
        echo "jobkit needs Python 3.11 or newer; set PYTHON to one. Found: $("$python" --version 2>&1)" >&2
        exit 2
    fi
    # A second first call waits here for the first one to finish.
    (flock 9 && { is_installed "$wanted" "$@" || install "$python" "$wanted" "$@"; }) 9<"$root"
}

is_installed() {
    local wanted=$1 extra
    shift
    [[ -x $venv/bin/python && $(cat "$venv/installed" 2>/dev/null) == "$wanted"* ]] || return 1
    for extra; do
        grep --quiet --word-regexp "$extra" "$venv/installed" || return 1
    done
}

install() {
    local python=$1 wanted=$2 clear=() extras had
    shift 2
    had=$(cat "$venv/installed" 2>/dev/null) || had="" # pip keeps what earlier calls installed
    [[ $had == "$wanted"* && ! -e $venv/incomplete ]] || had=$wanted
    # An install that was interrupted may leave half a package, which pip would take for a whole one.
    [[ ! -e $venv/incomplete ]] || clear=(--clear)
    trap 'exit 130' INT TERM # pip itself ends with 0 after these
    echo "Installing into $venv; this happens once." >&2
    mkdir -p "$venv"
    touch "$venv/incomplete"
    rm -f "$venv/installed"
    "$python" -m venv "${clear[@]}" "$venv"
    touch "$venv/incomplete"
    extras=$(IFS=, && echo "$*")
    if ! "$venv/bin/python" -m pip install --quiet --no-input --disable-pip-version-check \
        --constraint "$constraints" --editable "${root}${extras:+[$extras]}" >&2; then
        rm "$venv/incomplete" # pip itself restored the packages that were installed before
        exit 1
    fi
    echo "$had $*" >"$venv/installed"
    rm "$venv/incomplete"
}
