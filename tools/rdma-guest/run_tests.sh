#!/usr/bin/env bash
# What `make test-verbs` runs inside the guest: the conformance kit, then the tests of fabric-ibverbs.
#
#   run_tests.sh                 all of it
#   run_tests.sh kit N           the kit with N NICs
#   run_tests.sh kit N I/K       of it the I-th of K parts (each some of its files), for machines that are wanted for other things too
#   run_tests.sh quick           a part of both: what CI has time for
#   run_tests.sh stand-in        the KV demo between two NICs, with a few lines in place of the model
#   run_tests.sh demo            the same with the model: kv_demo.sh calls it, with the memory that this needs
#   run_tests.sh -k burst ...    only the tests of fabric-ibverbs, with these arguments
#
# The emulated machine is slow and may be slower: deadlines are long, heartbeats rare. hypothesis's examples are few at this
# scale. VERBS_SLACK: how many times slower than a good machine this one may be. The kit runs as two halves at a time: a test in Python keeps one of the two processors busy.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
unset PYTHONDONTWRITEBYTECODE # the guest's root is thrown away, and each of the kit's peers imports the same
export PYTHONUNBUFFERED=1 FABRIC_VERBS_TIMEOUT=${FABRIC_VERBS_TIMEOUT:-18}
python=.venv/bin/python
# A post of a few MiB takes software RDMA seconds on a busy host: nobody is to be taken for dead meanwhile. But a death is found
# after two heartbeats, or the time for first contact, and has to be within the 20 s that the kit gives.
slow=(--fabric-scale quick --fabric-slack "${VERBS_SLACK:-20}" --fabric-set heartbeat=5 --fabric-set connect_timeout=10)
# the project's second watchdog ends a run in which one test takes 300 s; in here that one may be slow
pytest=("$python" -m pytest -p no:cacheprovider -q --tb=short -ra --durations 8 --timeout 300 -o faulthandler_timeout=1600)
logs=${VERBS_LOGS:-$(mktemp -d)}
status=0

kit() { # NICS, I/K, then pytest's arguments
    local nics=$1 part=${2%/*} of=${2#*/} half i rc
    shift 2
    local all=(packages/fabric-core/src/fabric_core/conformance/test_*.py) files=() parts=()
    ((part >= 1 && part <= of)) || { echo "run_tests.sh: part $part/$of: I/K with 1 <= I <= K" >&2; exit 2; }
    for ((i = part - 1; i < ${#all[@]}; i += of)); do files+=("${all[i]}"); done
    for half in 0 1; do
        local -a mine=()
        for ((i = half; i < ${#files[@]}; i += 2)); do mine+=("fabric_core.conformance.$(basename "${files[i]}" .py)"); done
        ((${#mine[@]})) || continue
        "${pytest[@]}" --pyargs "${mine[@]}" --fabric-backend ibverbs --fabric-nics "$nics" "${slow[@]}" \
            -k "${1-not torch}" "${@:2}" >"$logs/kit$nics-$half" 2>&1 &
        parts+=($!)
    done
    for half in "${!parts[@]}"; do
        wait "${parts[half]}"
        rc=$?
        ((rc == 0 || (rc == 5 && of > 1))) || status=1 # 5: none of these files has a test for so many NICs
        echo "== the kit with $nics NICs, part $part/$of, half $half"
        cat "$logs/kit$nics-$half"
    done
}
own() {
    echo "== the tests of fabric-ibverbs: $*"
    "${pytest[@]}" packages/fabric-ibverbs/tests "$@" || status=1
}

case "${1-}" in
'')
    kit 1 1/1
    kit 2 1/1 'not torch and 2nic'
    kit 4 1/1 'not torch and 4nic'
    own -k 'not same_tokens'
    ;;
kit) kit "$2" "${3-1/1}" "not torch$( (($2 > 1)) && echo " and ${2}nic")" ;;
quick)
    kit 1 1/1 "test_c07 or test_c10 or test_verbs_write or test_verbs_send or test_c06_bounds and revoked"
    own -k 'loss or burst or revoked or secret or garbage or refused'
    ;;
stand-in) own -s -k stand_in ;;
demo)
    read -r _ kib _ </proc/meminfo
    ((kib > 8000000)) || { echo "run_tests.sh: demo: $((kib >> 10)) MiB of memory, and two copies of the model need 8000: tools/rdma-guest/kv_demo.sh" >&2; exit 2; }
    own -s -k same_tokens -o faulthandler_timeout=7200
    ;;
*) own "$@" ;;
esac
exit $status
