#!/usr/bin/env bash
# Runs the GPU benches, the pinning example and the peers on a GPU host, from a folder of prebuilt binaries, and writes
# every log and JSON into another. About ten minutes. Needs no Rust and no network there; the peers need PyTorch.
#
#   scripts/gpu-bench.sh --pack BIN          on a host with Rust: builds, and packs what is needed into the folder BIN
#   bash gpu-bench.sh BIN OUT [PART…]        on the GPU host; parts: check stall publish overhead h2d torn soak
#                                          gather explained peers
#
#   LONG=1           400 steps also where a step is long, and full peers; about ten minutes
#   LIMIT=240        seconds for each program
#   PYTHON=python3   the Python that has PyTorch
#
# The figures are then drawn by `python3 scripts/plots/plot.py OUT docs`.
set -uo pipefail

pack() {
    local bin=$1
    cd "$(dirname "$0")/.." || exit 1
    mkdir -p "$bin"
    # executables KIND COMMAND…: `name path` of every binary of that kind that the cargo command builds.
    executables() {
        local kind=$1
        shift
        "$@" --message-format=json-render-diagnostics |
            sed -n 's/.*"kind":\["'"$kind"'"\].*"name":"\([^"]*\)".*"executable":"\([^"]*\)".*/\1 \2/p'
    }
    local built
    built=$(executables bench cargo bench -p pinring --bench dispatch_stall --bench h2d --bench gather --bench sample --no-run) || exit 1
    built+=$'\n'$(executables example cargo build --release -p pinring --example pinning_explained) || exit 1
    while read -r name path; do
        cp "$path" "$bin/$name" && strip "$bin/$name" || exit 1
    done <<<"$built"
    cp -r scripts/peers "$bin/"
    rm -rf "$bin/peers/__pycache__"
    cp scripts/gpu-bench.sh "$bin/"
    {
        printf 'commit %s\n' "$(git rev-parse HEAD 2>/dev/null || echo unknown)"
        if [[ -n $(git status --porcelain 2>/dev/null) ]]; then
            echo "with changes that are not committed"
        fi
        rustc --version
    } >"$bin/BUILT"
    du -sh "$bin"
    ls "$bin"
}

if [[ ${1:-} == --pack && $# == 2 ]]; then
    pack "$(realpath -m "$2")"
    exit
fi
if [[ $# -lt 2 ]]; then
    sed -n '2,15s/^# \{0,1\}//p' "$0"
    exit 2
fi

bin=$(realpath "$1")
mkdir -p "$2" && out=$(realpath "$2") || exit 1
shift 2
parts=("$@")
[[ ${#parts[@]} -gt 0 ]] || parts=(check stall publish overhead h2d torn soak gather explained peers)
limit=${LIMIT:-240}
long=${LONG:-}
results=()
failed=0

# run NAME COMMAND…: one program; its output goes to the terminal and to NAME.log.
run() {
    local name=$1 begun=$SECONDS code
    shift
    printf '\n== %s\n' "$name"
    timeout -k 10 "$limit" "$@" 2>&1 | tee "$out/$name.log"
    code=${PIPESTATUS[0]}
    [[ $code == 124 || $code == 137 ]] && echo "ended after $limit s"
    results+=("$(printf '%-28s %-8s %s s' "$name" "$([[ $code == 0 ]] && echo ok || echo "code $code")" $((SECONDS - begun)))")
    [[ $code == 0 ]] || failed=1
}

# stall NAME STEPS WORD: one case of dispatch_stall.
stall() {
    run "dispatch_stall.$1" "$bin/dispatch_stall" --bench --json "$out/dispatch_stall.$1.json" --steps "$2" "$3"
}

host() {
    date -u '+%Y-%m-%d %H:%M UTC'
    cat "$bin/BUILT" 2>/dev/null
    uname -srm
    grep -h PRETTY_NAME /etc/os-release
    printf '%s cores, %s\n' "$(nproc)" "$(sed -n 's/^model name[^:]*: //p' /proc/cpuinfo | head -n 1)"
    grep -E 'MemTotal|MemAvailable' /proc/meminfo
    cat /sys/kernel/mm/transparent_hugepage/enabled
    nvidia-smi --query-gpu=name,driver_version,pcie.link.gen.current,pcie.link.width.current,memory.total --format=csv,noheader ||
        echo "no nvidia-smi"
}

host | tee "$out/host.txt"
export PINRING_GPU_REQUIRED=1
for part in "${parts[@]}"; do
    case $part in
        check)
            run dispatch_stall.check "$bin/dispatch_stall" --test
            run h2d.check "$bin/h2d" --test
            run gather.check "$bin/gather" --test
            ;;
        stall)
            stall L500 400 L=500
            stall L2000 400 L=2000
            stall L10000 "$([[ $long ]] && echo 400 || echo 150)" L=10000
            stall sweep 400 sweep
            stall graph 400 graph
            ;;
        publish) stall publish 400 publish ;;
        overhead) stall overhead 400 overhead ;;
        h2d) run h2d "$bin/h2d" --bench --json "$out/h2d.json" --pairs "${PAIRS:-5}" ;;
        torn) run torn "$bin/h2d" --bench --json "$out/torn.json" --torn "${TORN:-20000}" ;;
        soak) run soak "$bin/h2d" --bench --json "$out/soak.json" --soak "${SOAK:-15}" ;;
        gather)
            run gather "$bin/gather" --bench --json "$out/gather.json" --pairs "${PAIRS:-3}" --slice-ms 150 --store-mb 1024
            run sample "$bin/sample" --bench --json "$out/sample.json"
            ;;
        explained) run pinning_explained "$bin/pinning_explained" ;;
        peers)
            # shellcheck disable=SC2046 # a word or none
            run peers "${PYTHON:-python3}" "$bin/peers/run.py" $([[ $long ]] || echo --quick)
            grep '^{' "$out/peers.log" >"$out/peers.jsonl"
            ;;
        *)
            echo "no part is called $part"
            failed=1
            ;;
    esac
done
printf '\n== results\n'
printf '%s\n' "${results[@]}" | tee "$out/results.txt"
exit "$failed"
