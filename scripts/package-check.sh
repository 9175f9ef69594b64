#!/usr/bin/env bash
# Whether the crate can be published as it is: what it depends on, its interface, the files in it, its features, the oldest
# dependencies, its pages. Parts whose tool is not here say so and pass; docs/checks.md says how to get them.
#
#   scripts/package-check.sh [PART…]      all of: dependencies interface features oldest package pages
set -euo pipefail
cd "$(dirname "$0")/.."
export CARGO_TERM_COLOR=never

skip() { printf 'skipped: %s\n' "$1"; }
nightly() { cargo +nightly --version >/dev/null 2>&1; }

# Licences, sources, bans and, where the database of advisories can be had, those.
dependencies() {
    if ! cargo deny --version >/dev/null 2>&1; then
        skip "licences and bans: there is no cargo-deny"
        return
    fi
    cargo deny --all-features --log-level warn --config .cargo/deny.toml check licenses bans sources
    local log=target/advisories.log
    if timeout 120 cargo deny --all-features --config .cargo/deny.toml check advisories >"$log" 2>&1; then
        tail -n 1 "$log"
    elif grep -qiE 'failed to (fetch|load|clone|open|acquire)|advisory database' "$log"; then
        skip "advisories: their database could not be fetched"
    else
        cat "$log"
        return 1
    fi
}

# Nothing that programs use is taken away within a version. The baseline is the newest release; before there is one, the commit
# that `.cargo/interface-baseline` names. Whoever breaks the interface on purpose says so in the changelog, and names the
# commit that does it there.
interface() {
    if ! cargo semver-checks --version >/dev/null 2>&1; then
        skip "the interface: there is no cargo-semver-checks"
        return
    fi
    local baseline
    baseline=$(git describe --tags --abbrev=0 --match 'v*' 2>/dev/null || true)
    if [[ -z $baseline ]]; then
        baseline=$(git rev-parse --verify -q "$(cat .cargo/interface-baseline)^{commit}" || true)
    fi
    if [[ -z $baseline ]]; then
        skip "the interface: this checkout has no history to compare with"
        return
    fi
    echo "compared with $(git log -1 --format='%h %s' "$baseline")"
    CARGO_TARGET_DIR=target/interface cargo semver-checks -p pinring --baseline-rev "$baseline" --all-features
}

# Every set of features compiles.
features() {
    if ! cargo hack --version >/dev/null 2>&1; then
        skip "sets of features: there is no cargo-hack"
        return
    fi
    cargo hack check -q -p pinring --feature-powerset --exclude-features default --lib
}

# The oldest versions that Cargo.toml allows of the crate's own dependencies.
oldest() {
    if ! nightly; then
        skip "the oldest dependencies: there is no nightly toolchain to resolve them"
        return
    fi
    local copy=target/oldest-dependencies
    rm -rf "$copy"
    mkdir -p "$copy/benches"
    cp -r Cargo.toml src README.md docs "$copy"
    # By itself: the examples' packages have requirements of their own.
    sed -i -e '/^members = /d' -e '/^default-members = /d' -e '/^\[\[bench\]\]/,/^$/d' "$copy/Cargo.toml"
    (cd "$copy" && cargo +nightly update -q -Z direct-minimal-versions && cargo tree -e normal --depth 1 --all-features &&
        cargo check -q --lib --all-features --target-dir "$OLDPWD/target/oldest")
}

# What would be uploaded: complete, small, and able to compile with its tests.
package() {
    local crate folder size
    cargo package -q -p pinring --allow-dirty --no-verify --target-dir target/package-check
    crate=$(ls -t target/package-check/package/pinring-*.crate | head -n 1)
    size=$(stat -c %s "$crate")
    folder=target/package-check/package/$(basename "$crate" .crate)
    rm -rf "$folder"
    tar -xzf "$crate" -C target/package-check/package
    printf '%s: %s files, %s KB\n' "$(basename "$crate")" "$(find "$folder" -type f | wc -l)" $((size / 1024))
    local file
    for file in README.md CHANGELOG.md LICENSE-MIT LICENSE-APACHE src/lib.rs src/gather/kernel.cu src/gather/kernel.ptx \
        docs/safety.md examples/01_fill_and_take.rs; do
        [[ -f $folder/$file ]] || { echo "$file is not in it"; return 1; }
    done
    if (cd "$folder" && find . -type f ! -name .cargo_vcs_info.json \( -path './docs/raw/*' -o -path './.*' -o -path './tests/fuzz*' -o -path './scripts/peers/*' \
        -o -size +256k \) | grep .); then
        echo "these do not belong into a published crate: see \`exclude\` in Cargo.toml"
        return 1
    fi
    [[ $size -le 1048576 ]] || { echo "that is more than a megabyte"; return 1; }
    printf '\n[workspace]\n' >>"$folder/Cargo.toml" # it lies inside this one
    (cd "$folder" && cargo check -q --all-targets --all-features --target-dir "$OLDPWD/target")
}

# The pages as docs.rs makes them: a nightly toolchain, all features, their labels.
pages() {
    if ! nightly; then
        skip "the pages of docs.rs: there is no nightly toolchain"
        return
    fi
    RUSTDOCFLAGS='--cfg docsrs -D warnings' cargo +nightly doc -q -p pinring --no-deps --all-features --target-dir target/pages
    local labels
    labels=$(grep -rlE 'Available on <strong>crate feature' target/pages/doc/pinring | wc -l)
    echo "$labels pages have a feature's label"
    [[ $labels -gt 5 ]] || { echo "the features' labels are missing"; return 1; }
}

for part in "${@:-dependencies interface features oldest package pages}"; do
    for name in $part; do
        begun=$SECONDS
        printf '\n-- %s\n' "$name"
        "$name"
        printf -- '-- %s: %s s\n' "$name" $((SECONDS - begun))
    done
done
