#!/usr/bin/env bash
# Runs the GPU benches, the pinning example and the peers on a GPU host, from a folder of prebuilt binaries, and writes
# every log and JSON into another. About ten minutes; says for each program how long it should take, and ends one that takes much longer.
# Needs no Rust and no network there; the peers need PyTorch.
#
#   scripts/gpu-bench.sh --pack BIN          on a host with Rust: builds, and packs what is needed into the folder BIN
#   bash gpu-bench.sh BIN OUT [PART…]        on the GPU host; parts: check stall publish overhead h2d devices torn soak gather
#                                            explained peers; and of stall alone: L500 L2000 L10000 sweep graph
#
#   LONG=1           400 steps also where a step is long, and full peers; about thirteen minutes
#   SOAK=15          seconds of each of the two soaks: device memory, and everything at once
#   LIMIT=           seconds for each program, in place of twice its estimate and half a minute
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
    built+=$'\n'$(executables bin cargo build --release -p soak) || exit 1
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
    sed -n '2,/^set /s/^# \{0,1\}//p' "$0"
    exit 2
fi

bin=$(realpath "$1")
mkdir -p "$2" && out=$(realpath "$2") || exit 1
shift 2
parts=("$@")
[[ ${#parts[@]} -gt 0 ]] || parts=(check stall publish overhead h2d devices torn soak gather explained peers)
long=${LONG:-}
soak=${SOAK:-15}
results=()
failed=0

# run NAME SECONDS COMMAND…: one program that should take so long; its output goes to the terminal and to NAME.log.
run() {
    local name=$1 estimate=$2 begun=$SECONDS code limit
    shift 2
    limit=${LIMIT:-$((2 * estimate + 30))}
    printf '\n== %s: about %s s, at most %s s\n' "$name" "$estimate" "$limit"
    timeout -k 10 "$limit" "$@" 2>&1 | tee "$out/$name.log"
    code=${PIPESTATUS[0]}
    [[ $code == 124 || $code == 137 ]] && echo "ended after $limit s"
    results+=("$(printf '%-28s %-8s %s s, estimated %s s' "$name" "$([[ $code == 0 ]] && echo ok || echo "code $code")" $((SECONDS - begun)) "$estimate")")
    [[ $code == 0 ]] || failed=1
}

# stall NAME SECONDS STEPS WORD: one case of dispatch_stall.
stall() {
    run "dispatch_stall.$1" "$2" "$bin/dispatch_stall" --bench --json "$out/dispatch_stall.$1.json" --steps "$3" "$4"
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
# shellcheck disable=SC2068 # words
for part in ${parts[@]/#stall/L500 L2000 L10000 sweep graph}; do
    case $part in
        check)
            run dispatch_stall.check 5 "$bin/dispatch_stall" --test
            run h2d.check 20 "$bin/h2d" --test
            run gather.check 60 "$bin/gather" --test
            ;;
        L500) stall L500 15 400 L=500 ;;
        L2000) stall L2000 35 400 L=2000 ;;
        L10000) if [[ $long ]]; then stall L10000 130 400 L=10000; else stall L10000 55 150 L=10000; fi ;;
        sweep) stall sweep 40 400 sweep ;;
        graph) stall graph 25 400 graph ;;
        publish) stall publish 10 400 publish ;;
        overhead) stall overhead 10 400 overhead ;;
        h2d) run h2d 70 "$bin/h2d" --bench --json "$out/h2d.json" --pairs "${PAIRS:-5}" ;;
        devices)
            devices=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU ')
            if [[ $devices -ge 2 ]]; then
                run devices 20 "$bin/h2d" --bench --json "$out/devices.json" --pairs 9 --devices "$devices"
            else
                printf '\n== devices: skipped, since this host has %s\n' "$devices"
            fi
            ;;
        torn) run torn 20 "$bin/h2d" --bench --json "$out/torn.json" --torn "${TORN:-20000}" ;;
        soak)
            run soak $((soak + 10)) "$bin/h2d" --bench --json "$out/soak.json" --soak "$soak"
            run soak.all $((soak + 15)) "$bin/soak" --seconds "$soak" --device required
            ;;
        gather)
            run gather 300 "$bin/gather" --bench --json "$out/gather.json" --pairs "${PAIRS:-3}" --slice-ms 150 --store-mb 1024 device
            run sample 60 "$bin/sample" --bench --json "$out/sample.json"
            ;;
        explained) run pinning_explained 20 "$bin/pinning_explained" ;;
        peers)
            if [[ $long ]]; then
                run peers 60 "${PYTHON:-python3}" "$bin/peers/run.py"
            else
                run peers 15 "${PYTHON:-python3}" "$bin/peers/run.py" --quick
            fi
            run peers.pinring 10 "$bin/h2d" --bench --peers 50
            grep -h '^{' "$out/peers.log" "$out/peers.pinring.log" >"$out/peers.jsonl"
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
