#!/usr/bin/env bash
# Runs, on a GPU host, what scripts/package-gpu.sh packed: the tests, the GPU tests, the examples that have to do with a GPU, and the benches.
# Needs no Rust and no network, only this folder, and xz or python3. One log goes to the terminal and to gpu.log (or $LOG).
#
#   bash run.sh                     everything, benches in short
#   bash run.sh tests gpu           only these parts; parts are: host tests gpu examples pin ingest unroll handoff
#                                   h2d dispatch_stall
#
#   GIB=8          GiB of the ring in the GPU tests and the pin bench
#   BENCH="…"      arguments of the benches but pin; "--quick" if unset, "" for all of it
#   RUNTIMES=a:b   CUDA runtimes to test beside the one that the search finds; if unset, those that lie in the usual places
#   LIMIT=300      seconds for each program
#
# The programs are unpacked into a folder for temporary files, which is removed at the end.
set -uo pipefail
here=$(cd "$(dirname "$0")" && pwd)
log=${LOG:-$here/gpu.log}
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
if command -v xz >/dev/null; then
    tar -C "$place" -xJf "$here/programs.tar.xz" || exit 2
else
    python3 -c 'import sys, tarfile; tarfile.open(sys.argv[1]).extractall(sys.argv[2])' "$here/programs.tar.xz" "$place" || exit 2
fi

gib=${GIB:-8}
bench=${BENCH---quick}
limit=${LIMIT:-300}
export PINRING_FAKE_CUDA=$place/fake_cuda.so PINRING_GPU_BYTES=$((gib << 30))
parts=("$@")
[[ ${#parts[@]} -gt 0 ]] || parts=(host tests gpu examples pin ingest unroll handoff h2d dispatch_stall)
results=()

# run NAME COMMAND…: one program, its output, its result.
run() {
    local name=$1 begun=$SECONDS code=0
    shift
    printf '\n== %s\n' "$name"
    timeout -k 10 "$limit" "$@" 2>&1 || code=$?
    [[ $code == 124 || $code == 137 ]] && echo "ended after $limit s"
    results+=("$(printf '%-28s %-8s %s s' "$name" "$([[ $code == 0 ]] && echo ok || echo "code $code")" $((SECONDS - begun)))")
    [[ $code == 0 ]] || failed=1
}

# CUDA runtimes in toolkits and in the packages of this host's Pythons: one of each file name.
usual_runtimes() {
    local sites
    sites=$(python3 -c 'import sys; print("\n".join(p for p in sys.path if p.endswith("-packages")))' 2>/dev/null)
    {
        ls -d /usr/local/cuda*/lib64/libcudart.so.1[23] /usr/local/cuda*/targets/*/lib/libcudart.so.1[23]
        while read -r site; do
            [[ -n $site ]] && ls -d "$site"/nvidia/cu13/lib/libcudart.so.13 \
                "$site"/nvidia/cuda_runtime/lib/libcudart.so.12 "$site"/*.libs/libcudart*.so.1[23]
        done <<<"$sites"
    } 2>/dev/null | while read -r path; do
        readlink -f "$path"
    done | sort -u | paste -sd :
}

host() {
    printf '\n== host\n'
    date -u '+%Y-%m-%d %H:%M UTC'
    cat "$here/BUILT"
    uname -srm
    grep -h PRETTY_NAME /etc/os-release
    printf 'glibc %s\n' "$(ldd --version | sed -n '1s/.* //p')"
    printf '%s cores, %s\n' "$(nproc)" "$(sed -n 's/^model name[^:]*: //p' /proc/cpuinfo | head -n 1)"
    grep -E 'MemTotal|MemAvailable' /proc/meminfo
    cat /sys/kernel/mm/transparent_hugepage/enabled
    nvidia-smi --query-gpu=name,driver_version,pcie.link.gen.current,pcie.link.width.current,memory.total --format=csv,noheader ||
        echo "no nvidia-smi"
}

# Tests that write to the terminal what they found.
tests() {
    local test
    for test in tests/*; do
        [[ $test == tests/gpu* ]] || run "$test" "./$test" --test-threads "${THREADS:-4}"
    done
}

gpu() {
    export PINRING_GPU_RUNTIMES=${RUNTIMES-$(usual_runtimes)} PINRING_GPU_REQUIRED=1
    printf '\nruntimes: %s\n' "${PINRING_GPU_RUNTIMES:-none}"
    local test
    for test in tests/gpu*; do
        run "$test" "./$test" --nocapture --test-threads 1
    done
}

examples() {
    local name
    for name in 03_when_pinning_fails 04_where_time_goes 06_on_a_gpu pinning_explained; do
        [[ ! -x examples/$name ]] || run "examples/$name" "./examples/$name"
    done
}

bench() {
    if [[ ! -x benches/$1 ]]; then
        printf '\n== benches/%s\nnot packed\n' "$1"
        return
    fi
    if [[ $1 == pin ]]; then
        run benches/pin ./benches/pin --bench --gib 1 --gib "$gib"
    else
        # shellcheck disable=SC2086 # words, and none if it is empty
        run "benches/$1" "./benches/$1" --bench $bench
    fi
}

all() {
    local part failed=0
    for part in "${parts[@]}"; do
        case $part in
            host | tests | gpu | examples) "$part" ;;
            pin | ingest | unroll | handoff | h2d | dispatch_stall) bench "$part" ;;
            *) echo "no part is called $part"; failed=1 ;;
        esac
    done
    printf '\n== results\n'
    printf '%s\n' "${results[@]}"
    return "$failed"
}

cd "$place" || exit 2
all 2>&1 | tee "$log"
exit "${PIPESTATUS[0]}"
