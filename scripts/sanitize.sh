#!/usr/bin/env bash
# The tests under a sanitizer of a nightly toolchain. `address` (with the search for leaks): what works with memory of its
# own, against the fake CUDA. `thread`: what passes between threads. docs/checks.md says what each sees and what not.
#
#   scripts/sanitize.sh address [short]      short: what CI runs
#   scripts/sanitize.sh thread [short]
set -euo pipefail
cd "$(dirname "$0")/.."
export CARGO_TERM_COLOR=never CARGO_INCREMENTAL=0
export CARGO_PROFILE_DEV_DEBUG=line-tables-only CARGO_PROFILE_DEV_OPT_LEVEL=1

kind=${1:-address}
host=$(rustc -vV | sed -n 's/^host: //p')
sysroot=$(rustc +nightly --print sysroot 2>/dev/null || true)
if [[ -z $sysroot ]]; then
    echo "skipped: ${kind^}Sanitizer: there is no nightly toolchain"
    exit 0
fi

# Tests that leave memory behind on purpose: what a copy without a known end may still read (invariant 4), what was still
# allocated when an allocator was dropped, and what a panic carried, whose drop might panic too. They run without the search
# for leaks.
leaving=(
    feed::tests::whatever_a_panic_carries_it_is_told
    feeding::tests::slots_under_the_copies_of_a_thread_that_panicked_are_never_used_again
    a_slot_whose_copys_end_cannot_be_learned_is_given_up_once
    a_download_that_never_ends_is_given_up_at_the_stop
    a_snapshot_whose_end_cannot_be_learned_is_never_handed_over
    a_slot_whose_event_could_not_be_recorded_is_never_used_again
    one_failed_call_loses_only_what_it_was_about
    an_error_that_stays_ends_every_wait_at_whatever_call_it_begins
    a_stop_gives_up_copies_that_never_end
    after_a_device_reset_nothing_is_waited_for
    a_fault_of_one_device_ends_all_at_the_same_round
    a_gather_that_fails_ends_the_feed_and_its_slot_is_quarantined
    calls_while_a_graph_is_captured_leave_it_intact
    an_allocator_that_is_dropped_first_takes_no_memory_away
    whichever_call_fails_nothing_is_lost_and_the_next_turn_succeeds
)

probe() {
    local folder=target/thread code=0
    # shellcheck disable=SC2086
    rustc +nightly --edition 2024 -O --target "$host" $RUSTFLAGS scripts/thread-sanitizer-probe.rs -o "$folder/probe"
    "$folder/probe" || { echo "the sanitizer sees a race where there is none"; return 1; }
    "$folder/probe" race >"$folder/probe.log" 2>&1 || code=$?
    [[ $code == 66 ]] || { echo "the sanitizer does not see a race that there is (it ended with $code)"; return 1; }
    echo "the sanitizer sees a race, and none where locks are"
}

case $kind in
address)
    if ! ls "$sysroot/lib/rustlib/$host/lib/"librustc*_rt.asan.a >/dev/null 2>&1; then
        echo "skipped: AddressSanitizer: this nightly toolchain has no runtime of it"
        exit 0
    fi
    files=(memory_pin feeding_faults feeding_downloads mapped mapped_faults replay_mapped fuzz_checkpoint)
    if [[ ${2:-} != short ]]; then
        files+=(cuda_fake cuda_ladder feed_exit feed_failures feed_pinning feed_start feeding_capture feeding_copies
            feeding_flow feeding_life feeding_rounds mapped_order replay_life fuzz_declare)
    fi
    export RUSTFLAGS='-Zsanitizer=address'
    run=(cargo +nightly test -q -p pinring --target "$host" --target-dir target/address --all-features --no-fail-fast
        --lib "${files[@]/#/--test=}")
    skip=("${leaving[@]/#/--skip=}")
    PINRING_FUZZ_INPUTS=100 ASAN_OPTIONS=detect_leaks=1:detect_stack_use_after_return=1 "${run[@]}" -- "${skip[@]}"
    [[ ${#leaving[@]} == 0 ]] || ASAN_OPTIONS=detect_leaks=0 "${run[@]}" -- --exact "${leaving[@]}"
    ;;
thread)
    tests=(data_batches data_when_full replay_concurrent)
    if [[ ${2:-} != short ]]; then
        for file in tests/data_*.rs tests/replay_*.rs tests/select_*.rs; do
            tests+=("$(basename "$file" .rs)")
        done
    fi
    flags='-Zsanitizer=thread'
    if [[ -d $sysroot/lib/rustlib/src/rust/library ]]; then
        build=(-Zbuild-std)
    else
        # The compiled standard library is made visible to the sanitizer: see the file of the wrappers.
        build=()
        flags+=' -Cunsafe-allow-abi-mismatch=sanitizer'
        names=$(nm -D "$sysroot/lib/rustlib/$host/lib/"libstd-*.so 2>/dev/null | awk '{ print $NF }' || true)
        one() { grep -E "$1" <<<"$names" || true; }
        lock=$(one '5mutex5futex.*5Mutex14lock_contended$')
        wait=$(one '7condvar5futex.*7Condvar4wait$')
        wait_timeout=$(one '7condvar5futex.*7Condvar12wait_timeout$')
        once=$(one '4once5futex.*4Once4call$')
        if ! command -v cc >/dev/null || [[ $(wc -w <<<"$lock $wait $wait_timeout $once") != 4 ]]; then
            echo "skipped: ThreadSanitizer: no rust-src, and no C compiler or a standard library that waits otherwise"
            exit 0
        fi
        mkdir -p target/thread
        object=$PWD/target/thread/std.o
        cc -O1 -c scripts/thread-sanitizer-std.c -o "$object" \
            -DLOCK="$lock" -DWAIT="$wait" -DWAIT_TIMEOUT="$wait_timeout" -DONCE="$once"
        flags+=" -Clink-arg=$object"
        for name in "$lock" "$wait" "$wait_timeout" "$once" __tsan_atomic64_fetch_sub __tsan_atomic_thread_fence; do
            flags+=" -Clink-arg=-Wl,--wrap=$name"
        done
    fi
    # The test harness is compiled without too: its own channel, the closure that it hands to a test's thread, and the list
    # of captured output, which threads of tests share (and is not made: nothing is captured).
    printf '%s\n' 'race:test::event::CompletedTest' 'race:Arc<std::sync::poison::mutex::Mutex<core::option::Option<test::' \
        'race:test::run_test_in_process' >target/thread/suppressions
    export RUSTFLAGS=$flags TSAN_OPTIONS="suppressions=$PWD/target/thread/suppressions"
    # What the sanitizer is to see and what not, seen on a program of a few lines: nothing where a lock is contended and a
    # thread waits, everything where there is no order.
    [[ ${#build[@]} -gt 0 ]] || probe
    run=(cargo +nightly test -q -p pinring "${build[@]}" --target "$host" --target-dir target/thread --all-features --no-fail-fast)
    # One test after the other: rings are mapped by system calls that the sanitizer does not see, so to it the ring of a feed
    # that comes behind another's, at the same address, is the same memory.
    "${run[@]}" "${tests[@]/#/--test=}" -- --test-threads=1 --nocapture
    # Of the unit tests those without a process of their own and without CUDA.
    "${run[@]}" --lib -- --test-threads=1 --nocapture gate:: intake:: lanes:: weights:: sync:: select:: store:: slots::
    ;;
*)
    echo "address or thread, not $kind"
    exit 1
    ;;
esac
