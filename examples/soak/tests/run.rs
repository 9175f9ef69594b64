//! The soak in short, from outside: everything holds, and what is not known is refused.

use std::process::{Command, Output};

fn soak(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_soak")).args(arguments).output().expect("start the soak")
}

#[test]
fn ten_seconds_of_everything_hold() {
    let output = soak(&["--seconds", "10"]);
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{text}\n{}", String::from_utf8_lossy(&output.stderr));
    for what in ["writers killed in a step", "checkpoints loaded", "feeds stopped", "sources ended", "all of it held"] {
        assert!(text.contains(what), "{what} in {text}");
    }
    print!("{text}");
}

#[test]
fn what_is_not_known_is_refused() {
    for (arguments, text) in [
        (&["--hours", "1"][..], "--hours is not known"),
        (&["--seconds"], "--seconds needs a value"),
        (&["--seconds", "ten"], "--seconds ten: "),
        (&["--device", "gpu"], "known are auto, none, required and fake"),
    ] {
        let output = soak(arguments);
        assert_eq!(output.status.code(), Some(2), "{arguments:?}");
        assert!(String::from_utf8_lossy(&output.stderr).contains(text), "{output:?}");
    }
}
