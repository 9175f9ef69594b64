//! Marks the library as one that is never unloaded: what it handed out may be freed at any time until the process ends, and
//! threads that called it run its destructors when they end. A `dlclose` of it then does nothing.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rustc-cdylib-link-arg=-Wl,-z,nodelete");
}
