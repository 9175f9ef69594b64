#!/usr/bin/env bash
# Fuzzes the targets of tests/fuzz, each for so many seconds, under AddressSanitizer. Needs cargo-fuzz and a nightly
# toolchain. What it found lies in target/fuzz/found/TARGET; a file of it is run again, without a fuzzer, by
# `PINRING_FUZZ_INPUT=FILE cargo test --test fuzz_TARGET`.
#
#   scripts/fuzz.sh [SECONDS] [TARGET…]      60 seconds of each of declare, checkpoint and allocator
set -euo pipefail
cd "$(dirname "$0")/.."

seconds=${1:-60}
shift || true
targets=("$@")
[[ ${#targets[@]} -gt 0 ]] || targets=(declare checkpoint allocator)
if ! cargo +nightly fuzz --version >/dev/null 2>&1; then
    echo "skipped: fuzzing needs a nightly toolchain and cargo-fuzz (cargo install cargo-fuzz)"
    exit 0
fi

root=$PWD
# The fake CUDA is built by whatever compiler runs, and without a sanitizer.
for target in "${targets[@]}"; do
    printf '\n-- %s, %s s\n' "$target" "$seconds"
    mkdir -p "target/fuzz/corpus/$target" "target/fuzz/found/$target"
    # Feeds are threads: what one leaves behind at the end of an input is no leak of it.
    (cd tests && cargo +nightly fuzz run --fuzz-dir "$root/tests/fuzz" --target-dir "$root/target/fuzz/build" "$target" \
        "$root/target/fuzz/corpus/$target" -- -max_total_time="$seconds" -artifact_prefix="$root/target/fuzz/found/$target/" \
        -detect_leaks=0 -max_len=512 -len_control=0 -malloc_limit_mb=256 -rss_limit_mb=2048 -timeout=60 -print_final_stats=1)
done
