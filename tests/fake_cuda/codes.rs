//! The names and texts of codes, and which functions an error that stays leaves alone.

use std::ffi::CStr;

/// Code, the runtime's name, the driver's name, text.
const CODES: &[(i32, &CStr, &CStr, &CStr)] = &[
    (0, c"cudaSuccess", c"CUDA_SUCCESS", c"no error"),
    (1, c"cudaErrorInvalidValue", c"CUDA_ERROR_INVALID_VALUE", c"invalid argument"),
    (2, c"cudaErrorMemoryAllocation", c"CUDA_ERROR_OUT_OF_MEMORY", c"out of memory"),
    (3, c"cudaErrorInitializationError", c"CUDA_ERROR_NOT_INITIALIZED", c"initialization error"),
    (4, c"cudaErrorCudartUnloading", c"CUDA_ERROR_DEINITIALIZED", c"driver shutting down"),
    (34, c"cudaErrorStubLibrary", c"CUDA_ERROR_STUB_LIBRARY", c"CUDA driver is a stub library"),
    (
        35,
        c"cudaErrorInsufficientDriver",
        c"CUDA_ERROR_INSUFFICIENT_DRIVER",
        c"CUDA driver version is insufficient for CUDA runtime version",
    ),
    (
        46,
        c"cudaErrorDevicesUnavailable",
        c"CUDA_ERROR_DEVICE_UNAVAILABLE",
        c"CUDA-capable device(s) is/are busy or unavailable",
    ),
    (100, c"cudaErrorNoDevice", c"CUDA_ERROR_NO_DEVICE", c"no CUDA-capable device is detected"),
    (101, c"cudaErrorInvalidDevice", c"CUDA_ERROR_INVALID_DEVICE", c"invalid device ordinal"),
    (201, c"cudaErrorDeviceUninitialized", c"CUDA_ERROR_INVALID_CONTEXT", c"invalid device context"),
    (218, c"cudaErrorInvalidPtx", c"CUDA_ERROR_INVALID_PTX", c"a PTX JIT compilation failed"),
    (400, c"cudaErrorInvalidResourceHandle", c"CUDA_ERROR_INVALID_HANDLE", c"invalid resource handle"),
    (
        401,
        c"cudaErrorIllegalState",
        c"CUDA_ERROR_ILLEGAL_STATE",
        c"the operation cannot be performed in the present state",
    ),
    (500, c"cudaErrorSymbolNotFound", c"CUDA_ERROR_NOT_FOUND", c"named symbol not found"),
    (600, c"cudaErrorNotReady", c"CUDA_ERROR_NOT_READY", c"device not ready"),
    (700, c"cudaErrorIllegalAddress", c"CUDA_ERROR_ILLEGAL_ADDRESS", c"an illegal memory access was encountered"),
    (709, c"cudaErrorContextIsDestroyed", c"CUDA_ERROR_CONTEXT_IS_DESTROYED", c"context is destroyed"),
    (
        712,
        c"cudaErrorHostMemoryAlreadyRegistered",
        c"CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED",
        c"part or all of the requested memory range is already mapped",
    ),
    (
        713,
        c"cudaErrorHostMemoryNotRegistered",
        c"CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED",
        c"pointer does not correspond to a registered memory region",
    ),
    (
        803,
        c"cudaErrorSystemDriverMismatch",
        c"CUDA_ERROR_SYSTEM_DRIVER_MISMATCH",
        c"system has unsupported display driver / cuda driver combination",
    ),
    (
        804,
        c"cudaErrorCompatNotSupportedOnDevice",
        c"CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE",
        c"forward compatibility was attempted on non supported HW",
    ),
    (
        900,
        c"cudaErrorStreamCaptureUnsupported",
        c"CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED",
        c"operation not permitted when stream is capturing",
    ),
    (
        901,
        c"cudaErrorStreamCaptureInvalidated",
        c"CUDA_ERROR_STREAM_CAPTURE_INVALIDATED",
        c"operation failed due to a previous error during capture",
    ),
    (
        905,
        c"cudaErrorStreamCaptureIsolation",
        c"CUDA_ERROR_STREAM_CAPTURE_ISOLATION",
        c"dependency created on uncaptured work in another stream",
    ),
    (
        906,
        c"cudaErrorStreamCaptureImplicit",
        c"CUDA_ERROR_STREAM_CAPTURE_IMPLICIT",
        c"operation would make the legacy stream depend on a capturing blocking stream",
    ),
    (
        907,
        c"cudaErrorCapturedEvent",
        c"CUDA_ERROR_CAPTURED_EVENT",
        c"operation not permitted on an event last recorded in a capturing stream",
    ),
    (
        908,
        c"cudaErrorStreamCaptureWrongThread",
        c"CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD",
        c"attempt to terminate a thread-local capture sequence from another thread",
    ),
];

pub fn runtime_name(code: i32) -> Option<&'static CStr> {
    CODES.iter().find(|c| c.0 == code).map(|c| c.1)
}

pub fn driver_name(code: i32) -> Option<&'static CStr> {
    CODES.iter().find(|c| c.0 == code).map(|c| c.2)
}

pub fn text(code: i32) -> Option<&'static CStr> {
    CODES.iter().find(|c| c.0 == code).map(|c| c.3)
}

/// Whether a function works with what is in a context, so that an error which stays is its answer too.
pub fn needs_context(function: &str) -> bool {
    !matches!(
        function,
        "cuInit"
            | "cuDriverGetVersion"
            | "cuDeviceGet"
            | "cuDeviceGetCount"
            | "cuDeviceGetName"
            | "cuDeviceGetPCIBusId"
            | "cuDevicePrimaryCtxRelease_v2"
            | "cuDevicePrimaryCtxReset_v2"
            | "cuCtxGetCurrent"
            | "cuCtxPushCurrent_v2"
            | "cuCtxPopCurrent_v2"
            | "cuThreadExchangeStreamCaptureMode"
            | "cudaDeviceReset"
            | "cudaDriverGetVersion"
            | "cudaGetDevice"
            | "cudaGetDeviceCount"
            | "cudaGetLastError"
            | "cudaPeekAtLastError"
            | "cudaRuntimeGetVersion"
    )
}
