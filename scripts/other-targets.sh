#!/usr/bin/env bash
# The crate on machines that this one is not: what compiles there, and the tests that can be run here all the same. Each
# part takes the target's standard library as rustup installed it; else it compiles that library from its sources, by any
# toolchain here that has them (rustup's component rust-src, or a distribution's packages); and says which it was.
#
#   scripts/other-targets.sh [PART…]      all of: check i686 aarch64
#   scripts/other-targets.sh short        what CI runs: some targets' library, and the unit tests with 32-bit addresses
set -euo pipefail
cd "$(dirname "$0")/.."
export CARGO_TERM_COLOR=never CARGO_INCREMENTAL=0 CARGO_PROFILE_DEV_DEBUG=0
export CARGO_TARGET_DIR=$PWD/target/other-targets RUSTFLAGS='-D warnings'

skip() { printf 'skipped: %s\n' "$1"; }
has() { command -v "$1" >/dev/null 2>&1; }
sources() { [[ -d $("$@" --print sysroot 2>/dev/null)/lib/rustlib/src/rust/library ]]; }

# A distribution's compiler can be older than the crate allows.
new_enough() {
    local oldest
    oldest=$(sed -n 's/^rust-version = "\(.*\)"/\1/p' Cargo.toml)
    printf '%s\n' "$oldest" "$("$1" --version | cut -d ' ' -f 2)" | sort -VC
}

# toolchain TARGET: `cargo`, the command that builds for it, and `std`, its options.
toolchain() {
    local name folder
    cargo=(cargo) std=()
    if has rustup && rustup target list --installed 2>/dev/null | grep -qx "$1"; then
        how="the standard library that rustup installed"
        return
    fi
    std=(-Zbuild-std)
    if has rustup; then
        for name in $(rustup toolchain list | cut -d ' ' -f 1); do
            if sources rustc "+$name"; then
                cargo=(env RUSTC_BOOTSTRAP=1 cargo "+$name")
                how="the standard library compiled by $name"
                return
            fi
        done
    fi
    for name in $(type -ap rustc); do
        folder=$(dirname "$name")
        if [[ -x $folder/cargo ]] && sources "$name" && new_enough "$name"; then
            cargo=(env RUSTC_BOOTSTRAP=1 RUSTC="$name" "$folder/cargo")
            how="the standard library compiled by $("$name" --version | cut -d ' ' -f 1,2) of $folder"
            return
        fi
    done
    skip "$1: neither its standard library is here, nor a toolchain with the sources of that"
    return 1
}

# check TARGET OPTION…: compiles without warnings, and links nothing.
check() {
    toolchain "$1" || return 0
    "${cargo[@]}" check -q -p pinring --all-features "${std[@]}" --target "$@"
    echo "it compiles for $1: ${*:2} (by $how)"
}

# The fake CUDA for a target; the tests compile it for themselves only where rustc has a standard library for it.
fake() {
    local folder=$CARGO_TARGET_DIR/fake
    mkdir -p "$folder/src"
    cp tests/fake_cuda/*.rs src/gather/emulate.rs src/gather/launch.rs "$folder/src"
    printf '%s\n' '[package]' 'name = "fake_cuda"' 'version = "0.0.0"' 'edition = "2021"' '[lib]' \
        'crate-type = ["cdylib"]' '[profile.dev]' 'opt-level = 1' 'strip = "symbols"' '[workspace]' >"$folder/Cargo.toml"
    "${cargo[@]}" rustc -q --manifest-path "$folder/Cargo.toml" "${std[@]}" --target "$1" -- \
        -A dead_code -C link-arg=-Wl,-soname,libpinring_fake_soname_placeholder.so
    export PINRING_FAKE_CUDA=$CARGO_TARGET_DIR/$1/debug/libfake_cuda.so
}

# tests TARGET OPTION…: tests of the crate, run one file after the other.
tests() { "${cargo[@]}" test -q -p pinring --all-features "${std[@]}" --no-fail-fast --target "$@"; }

# The files tests/PATTERN, as options of cargo.
files() {
    local file
    for file in "$@"; do
        for file in tests/$file.rs; do printf -- '--test=%s\n' "$(basename "$file" .rs)"; done
    done
}

# 32-bit addresses, on this processor.
links_i686() {
    export CARGO_TARGET_I686_UNKNOWN_LINUX_GNU_LINKER=cc
    if [[ $(uname -sm) != 'Linux x86_64' ]] || ! cc -m32 -x c - -o /dev/null <<<'int main(void) { return 0; }' 2>/dev/null; then
        skip "tests with 32-bit addresses: the C compiler links no 32-bit programs"
        return 1
    fi
}
i686() {
    local target=i686-unknown-linux-gnu
    { links_i686 && toolchain $target; } || return 0
    echo "by $how"
    fake $target
    mapfile -t chosen < <(files 'data_*' 'replay_*' 'select_*' 'feed_*' memory_pin fuzz_declare fuzz_checkpoint)
    tests $target --lib "${chosen[@]}"
}

# Another processor, as QEMU emulates it: its instructions and its system calls, not the orders of its memory. Left out is
# what begins a process of its own, which it cannot, and what asks the kernel for pages: it takes advice and does nothing.
aarch64() {
    local target=aarch64-unknown-linux-gnu
    if ! has qemu-aarch64 || ! has aarch64-linux-gnu-gcc; then
        skip "tests on aarch64: there is no qemu-aarch64, or no C compiler for it"
        return 0
    fi
    toolchain $target || return 0
    echo "by $how"
    export CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER=aarch64-linux-gnu-gcc
    export CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUNNER='qemu-aarch64 -L /usr/aarch64-linux-gnu'
    mapfile -t chosen < <(files data_batches data_when_full select_model)
    tests $target --lib "${chosen[@]}" -- --skip cuda:: --skip feed::tests --skip feeding::tests --skip memory::
}

all_checks() {
    local target
    for target in x86_64-apple-darwin aarch64-apple-darwin x86_64-pc-windows-msvc armv7-unknown-linux-gnueabihf \
        i686-unknown-linux-gnu aarch64-unknown-linux-gnu; do
        check $target --lib --tests --examples
    done
}

# What a distribution has, where CI may install it: fetched within half a minute, or left.
packages() {
    local set
    for set in 'rustc-web cargo-web rust-web-src' gcc-multilib; do
        # shellcheck disable=SC2086
        if timeout 30 apt-get install -qq -y --no-install-recommends --download-only $set >/dev/null 2>&1; then
            apt-get install -qq -y --no-install-recommends $set >/dev/null 2>&1 || true
        fi
    done
}
short() {
    if [[ $(id -u) == 0 ]] && has apt-get && ! toolchain i686-unknown-linux-gnu >/dev/null; then
        timeout 30 apt-get update -qq >/dev/null 2>&1 || true
        packages
    fi
    check aarch64-unknown-linux-gnu --lib
    check x86_64-apple-darwin --lib
    if links_i686; then
        toolchain i686-unknown-linux-gnu || return 0
        tests i686-unknown-linux-gnu --lib -- --skip cuda:: --skip feed::tests --skip feeding::tests
        echo "the unit tests pass with 32-bit addresses (by $how)"
    else
        check i686-unknown-linux-gnu --lib
    fi
}

for part in "${@:-check i686 aarch64}"; do
    for name in $part; do
        begun=$SECONDS
        printf '\n-- %s\n' "$name"
        case $name in
        check) all_checks ;;
        short | i686 | aarch64) "$name" ;;
        *)
            echo "check, i686, aarch64 or short, not $name"
            exit 1
            ;;
        esac
        printf -- '-- %s: %s s\n' "$name" $((SECONDS - begun))
    done
done
