#!/usr/bin/env bash
# The KV demo with its real model (SmolLM2, 135 million parameters, float32) between two software RDMA NICs: a prefiller on one, a
# decoder on the other, and the same prompt once more in one process. Ends well if text, tokens, keys and values, and the logits are
# equal to the last bit. Root, Debian 12, and 10 GiB of memory.
#
# Every floating-point operation is emulated: README.md says how long that takes. VERBS_DEMO_TOKENS (6) are generated. A
# folder given as VERBS_DEMO_FOLDER gets the file `progress`.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
more=()
if [[ ${VERBS_DEMO_FOLDER-} ]]; then
    mkdir -p "$VERBS_DEMO_FOLDER"
    export VERBS_DEMO_LOG=$VERBS_DEMO_FOLDER/progress
    more=(--rw "$VERBS_DEMO_FOLDER")
fi
exec tools/rdma-guest/run_in_guest.py --install --nics 2 --mem "${VERBS_DEMO_MEM:-10240}" --timeout 7200 --stats "${more[@]}" -- \
    tools/rdma-guest/run_tests.sh demo
