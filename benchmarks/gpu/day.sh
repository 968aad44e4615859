#!/usr/bin/env bash
# What needs a GPU, on a machine that has torch and reaches no package index: the tests, then the figures.
#
#     benchmarks/gpu/day.sh [tests] [figures]     both, where none is named; MORE in BENCH is for the figures
#
# All output is kept in $OUT, or else in build/gpu; the figures as JSON in its folder results. Nothing stops at the first failure, and each part has a
# limit: ten minutes together.
set -u
cd "$(dirname "$0")/../.." || exit 1
PYTHON=${GPU_PYTHON:-python3}
WHEELS=${WHEELS:-build/wheels}
SITE=$PWD/build/gpu-site-$("$PYTHON" -c 'import platform; print(platform.python_version())')
OUT=${OUT:-build/gpu}
TESTS_S=${TESTS_S:-300}
FIGURES_S=${FIGURES_S:-240}
mkdir -p "$OUT"
OUT=$(cd "$OUT" && pwd)

export SWIFT_GPU_FAILURES=$OUT/failures.txt
export PYTHONPATH=$PWD:$PWD/examples:$SITE${PYTHONPATH:+:$PYTHONPATH}
export PATH=$SITE/bin:$PATH PYTHONUNBUFFERED=1

# Packages of Python that are missing here, from wheels that `make wheels` has brought together.
if [ -d "$WHEELS" ]; then
    mapfile -t missing < <("$PYTHON" -m tests.support.wheels missing "$WHEELS")
    if [ -n "${missing[*]}" ]; then
        "$PYTHON" -m pip install --quiet --disable-pip-version-check --no-index --no-deps --no-compile \
            --upgrade --target "$SITE" "${missing[@]}" 2>&1 | tee "$OUT/wheels.txt"
    fi
fi
{
    nvidia-smi || echo "no nvidia-smi"
    "$PYTHON" -c "import sys, torch; print(sys.version, torch.__version__, torch.version.cuda, torch.cuda.is_available())"
} 2>&1 | tee "$OUT/machine.txt"

# What a part that was cut off leaves behind would disturb the next one.
export SWIFT_GPU_DAY=$$
end_all() {
    local environment
    for environment in /proc/[0-9]*/environ; do
        if grep -qz "^SWIFT_GPU_DAY=$SWIFT_GPU_DAY\$" "$environment" 2>/dev/null; then
            kill -KILL "$(basename "$(dirname "$environment")")" 2>/dev/null
        fi
    done
}

failed=0
part() {  # NAME SECONDS COMMAND...: its output is shown and kept, and it is ended when its time is over
    local name=$1 limit=$2 began=$SECONDS code
    shift 2
    : >"$OUT/$name.txt"
    timeout --kill-after=30 "$limit" "$@" >"$OUT/$name.txt" 2>&1 &
    tail --pid=$! -n +1 -f "$OUT/$name.txt"  # no pipe: whoever kept it open would hold up the next part
    wait $!
    code=$?
    end_all
    [ "$code" -eq 0 ] || failed=1
    echo "# $name: exit code $code after $((SECONDS - began)) s (limit $limit s)" | tee -a "$OUT/parts.txt"
}

for what in "${@:-tests figures}"; do
    for one in $what; do
        # shellcheck disable=SC2086  # TESTS, FILES and BENCH are several words
        case $one in
        tests)
            OMP_NUM_THREADS=1 part tests "$TESTS_S" "$PYTHON" -m pytest ${TESTS:--n 4 --dist loadfile} \
                -p no:benchmark -v --durations=15 -k "not cpu" ${FILES:-tests/gpu tests/unit/undo/test_optim_db.py}
            ;;
        figures)
            record=(--record "$OUT/results")
            [[ " ${BENCH:-} " == *" --small "* ]] && record=()  # a trial's figures say nothing
            part figures "$FIGURES_S" "$PYTHON" -m benchmarks.gpu.figures "${record[@]}" ${BENCH:-}
            ;;
        *) echo "day.sh: tests or figures, not $one" >&2; failed=1 ;;
        esac
    done
done
exit $failed
