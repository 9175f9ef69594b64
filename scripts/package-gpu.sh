#!/usr/bin/env bash
# Builds the release tests, benches and examples, and packs them with what they need into target/gpu/: a folder for a GPU
# host that has no Rust and no network. Run it on an x86-64 Linux with a glibc no newer than that host's, copy the folder,
# and there: `bash run.sh` (see scripts/gpu-run.sh for its settings). The folder is checked to stay below 60 MiB.
set -euo pipefail
cd "$(dirname "$0")/.."

limit_mib=60
out=target/gpu
programs=$out/programs

# executables KIND COMMAND…: prints `name path` for every binary of that kind that the cargo command builds.
executables() {
    local kind=$1
    shift
    "$@" --message-format=json-render-diagnostics |
        sed -n 's/.*"kind":\["'"$kind"'"\].*"name":"\([^"]*\)".*"executable":"\([^"]*\)".*/\1 \2/p'
}

rm -rf "$out"
mkdir -p "$programs"/{tests,benches,examples}

# pack FOLDER LINES: copies what `executables` printed.
pack() {
    local name path
    while read -r name path; do
        cp "$path" "$programs/$1/$name"
        strip "$programs/$1/$name"
    done <<<"$2"
}

# Tests: the library's own, and those in tests/ but for the ones that read this repository.
built=$(executables lib cargo test --release -p pinring --lib --no-run)
pack tests "$built"
built=$(executables test cargo test --release -p pinring --tests --no-run)
pack tests "$(grep -vE '^(docs|layering) ' <<<"$built")"
built=$(executables test cargo test --release -p beside-cudarc --test gpu_cudarc --no-run)
pack tests "$built"
built=$(executables bench cargo bench -p pinring --benches --no-run)
pack benches "$built"
built=$(executables example cargo build --release -p pinring --examples)
pack examples "$built"

# The fake CUDA runtime, which the tests would otherwise compile: built here by the test that uses it most.
fakes=$(cargo metadata --no-deps --format-version 1 | sed 's/.*"target_directory":"\([^"]*\)".*/\1/')/tmp/pinring-fake-cuda
rm -f "$fakes"/fake-*.so
cargo test -q --release -p pinring --test cuda_fake two_copies_share_nothing >/dev/null
cp "$fakes"/fake-*.so "$programs/fake_cuda.so"

for folder in tests benches examples; do
    [[ -n $(ls "$programs/$folder") ]] || { echo "nothing was built for $folder"; exit 1; }
done
list=$(cd "$programs" && ls -d */* fake_cuda.so)
# The programs have most of their code in common: a dictionary as long as all of them finds that.
tar -C "$programs" -cf - . | xz --lzma2=preset=2,dict=256MiB >"$out/programs.tar.xz"
rm -r "$programs"
cp scripts/gpu-run.sh "$out/run.sh"
{
    printf 'commit %s\n' "$(git rev-parse HEAD 2>/dev/null || echo unknown)"
    if [[ -n $(git status --porcelain 2>/dev/null) ]]; then
        echo "with changes that are not committed"
    fi
    rustc --version
    printf 'glibc %s\n' "$(ldd --version | sed -n '1s/.* //p')"
} >"$out/BUILT"

mib=$(du -sm "$out" | cut -f 1)
[[ $mib -le $limit_mib ]] || { echo "$out has $mib MiB, more than $limit_mib"; exit 1; }
printf '%s\n' "$list"
cat "$out/BUILT"
echo "$out: $mib MiB"
