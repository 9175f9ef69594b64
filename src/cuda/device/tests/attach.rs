//! Attaching: what is asked, what can fail, and that a failure leaves nothing retained.

use super::{assert_nothing_is_left, attached, fake};
use crate::cuda::common::fake::{self as fakes, Fake};
use crate::cuda::common::{alone, is_child, scratch};
use crate::cuda::device::{Device, DeviceError};
use crate::cuda::types::{CudaSearch, Rung};
use crate::cuda::{Cuda, CudaError};
use std::error::Error;

#[test]
fn a_device_is_retained_and_nothing_stays_current() {
    let (fake, search) = fake("attach", 2);
    let device = Device::attach(&search, 1).unwrap();
    assert_eq!((device.ordinal(), device.name().as_str()), (1, "Fake GPU 1"));
    assert_eq!(format!("{device:?}"), r#"Device(1, "Fake GPU 1")"#);
    assert_eq!((fake.retained(0), fake.retained(1), fake.current_device()), (0, 1, None));
    let again = Device::attach(&search, 1).unwrap();
    assert_eq!(fake.retained(1), 2);
    assert!(device.is(&again), "one context, however often it is attached");
    assert!(!device.is(&Device::attach(&search, 0).unwrap()));
    drop(device.clone());
    drop(again);
    assert_eq!(fake.retained(1), 1);
    drop(device);
    assert_eq!(fake.retained(1), 0);
    assert_nothing_is_left(&fake);
}

#[test]
fn a_number_that_is_no_devices_is_an_error_with_the_number_and_the_count() {
    for (count, ordinal, seen) in
        [(1, 1, "1 device is visible"), (2, -1, "2 devices are visible"), (2, i32::MAX, "2 d")]
    {
        let (fake, search) = fake("ordinal", count);
        let error = Device::attach(&search, ordinal).unwrap_err();
        assert_eq!(error, DeviceError::NoSuchDevice { ordinal, count });
        let text = error.to_string();
        for part in [format!("there is no device {ordinal}: {seen}").as_str(), "CUDA_VISIBLE_DEVICES"] {
            assert!(text.contains(part), "{text}");
        }
        assert_nothing_is_left(&fake);
    }
}

#[test]
fn each_call_may_fail_and_leaves_nothing_retained() {
    for (function, operation) in [
        ("cuInit", "cuInit"),
        ("cuDeviceGetCount", "cuDeviceGetCount"),
        ("cuDeviceGet", "cuDeviceGet"),
        ("cuDeviceGetName", "cuDeviceGetName"),
        ("cuDevicePrimaryCtxRetain", "cuDevicePrimaryCtxRetain"),
    ] {
        let (fake, search) = fake("attach-fails", 1);
        fake.inject(function, 1, 46);
        let error = Device::attach(&search, 0).unwrap_err();
        let DeviceError::Call { ordinal: 0, error: call } = &error else { panic!("{error}") };
        assert_eq!((call.operation(), call.code()), (operation, 46));
        assert_eq!(call.symbol(), "CUDA_ERROR_DEVICE_UNAVAILABLE", "the driver's name");
        assert!(error.to_string().ends_with(&call.to_string()), "{error}");
        assert_eq!(error.source().unwrap().to_string(), call.to_string());
        assert_nothing_is_left(&fake);
        // A failure is not kept.
        drop(Device::attach(&search, 0).unwrap());
        assert_nothing_is_left(&fake);
    }
    let (fake, search) = fake("no-device", 0);
    let text = Device::attach(&search, 0).unwrap_err().to_string();
    for part in ["device 0 could not be attached: cuInit returned 100 CUDA_ERROR_NO_DEVICE", "CUDA_VISIBLE_DEVICES"] {
        assert!(text.contains(part), "{text}");
    }
    drop(fake);
}

#[test]
fn a_driver_that_is_not_there_or_lacks_a_function_is_named() {
    let dir = scratch("driver-missing");
    let nowhere = dir.join("libcuda.so.1");
    let error = Device::attach(&CudaSearch::new().driver(&nowhere), 3).unwrap_err();
    assert!(matches!(&error, DeviceError::NotLoaded { ordinal: 3, library, reason }
        if *library == nowhere && reason.contains("libcuda.so.1")));
    let text = error.to_string();
    for part in ["device 3 needs the CUDA driver", "No such file", "--gpus all"] {
        assert!(text.contains(part), "{text}");
    }
    for symbol in ["cuThreadExchangeStreamCaptureMode", "cuMemcpyHtoDAsync_v2", "cuGetErrorString"] {
        let path = fakes::place_without(&dir, symbol, symbol);
        let error = Device::attach(&CudaSearch::new().driver(&path), 0).unwrap_err();
        assert!(matches!(&error, DeviceError::MissingSymbol { symbol: s, .. } if *s == symbol), "{error}");
        let text = error.to_string();
        for part in [symbol, path.to_str().unwrap(), "Update the driver"] {
            assert!(text.contains(part), "{text}");
        }
        assert_eq!(Fake::open(&path).calls(), [], "nothing was called");
    }
}

#[test]
fn a_driver_is_opened_once_and_never_closed() {
    let (fake, search) = fake("driver-kept", 1);
    drop(Device::attach(&search, 0).unwrap());
    std::fs::remove_file(fake.path()).unwrap();
    drop(Device::attach(&search, 0).unwrap());
    assert_nothing_is_left(&fake);
}

#[test]
fn devices_go_to_any_thread() {
    fn check<T: Send + Sync>() {}
    check::<Device>();
    check::<super::super::Stream>();
    check::<super::super::Event>();
    check::<super::super::DeviceMemory>();
    check::<CudaError>();
    let (fake, device) = attached("any-thread");
    let event = std::thread::spawn(move || device.event().unwrap()).join().unwrap();
    assert!(event.device().query(&event).unwrap());
    drop(event);
    assert_nothing_is_left(&fake);
}

/// The driver that is named is also the search's last rung. Alone, since other tests' fakes would come first.
#[test]
fn the_driver_that_is_named_is_the_last_rung_of_the_search() {
    const TEST: &str = "cuda::device::tests::attach::the_driver_that_is_named_is_the_last_rung_of_the_search";
    if !is_child(TEST) {
        alone(TEST, |_| {});
        return;
    }
    let path = fakes::place(&scratch("rung"), "libcuda.so.1");
    let search = CudaSearch::new().driver(&path);
    let cuda = Cuda::find(&search).unwrap();
    if cuda.rung() != Rung::Driver {
        println!("skipped: this host has a CUDA runtime of its own, {}", cuda.library().display());
        return;
    }
    assert_eq!(cuda.library(), path);
    let fake = Fake::open(&path);
    assert_eq!(fake.retained(0), 1, "for the life of the process");
    let device = Device::attach(&search, 0).unwrap();
    assert_eq!(fake.retained(0), 2, "of the same driver");
    drop(device);
    assert_eq!(fake.retained(0), 1);
}
