//! Element types of leaves and columns.
//!
//! Owns the closed list of types that a leaf may have. What it does not do: convert. A leaf is stored in the type it
//! was declared with, bit for bit.

use std::fmt;
use std::str::FromStr;

mod sealed {
    pub trait Sealed {}
}

/// The element type of a leaf or a column, as data.
///
/// ```
/// use pinring::DType;
/// assert_eq!(DType::F32.size(), 4);
/// assert_eq!(DType::BF16.to_string(), "bf16");
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
#[allow(missing_docs)] // the names are the documentation
pub enum DType {
    Bool,
    U8,
    I8,
    U16,
    I16,
    U32,
    I32,
    U64,
    I64,
    F16,
    BF16,
    F32,
    F64,
}

impl DType {
    /// Bytes of one element.
    pub const fn size(self) -> usize {
        match self {
            DType::Bool | DType::U8 | DType::I8 => 1,
            DType::U16 | DType::I16 | DType::F16 | DType::BF16 => 2,
            DType::U32 | DType::I32 | DType::F32 => 4,
            DType::U64 | DType::I64 | DType::F64 => 8,
        }
    }

    /// The lower-case name that frameworks use: `"f32"`, `"bf16"`, `"bool"`.
    pub const fn name(self) -> &'static str {
        match self {
            DType::Bool => "bool",
            DType::U8 => "u8",
            DType::I8 => "i8",
            DType::U16 => "u16",
            DType::I16 => "i16",
            DType::U32 => "u32",
            DType::I32 => "i32",
            DType::U64 => "u64",
            DType::I64 => "i64",
            DType::F16 => "f16",
            DType::BF16 => "bf16",
            DType::F32 => "f32",
            DType::F64 => "f64",
        }
    }
}

/// A name that is no element type.
///
/// ```
/// use pinring::{DType, UnknownDType};
/// assert_eq!("f32".parse(), Ok(DType::F32));
/// assert_eq!("float32".parse::<DType>(), Err(UnknownDType("float32".into())));
/// ```
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` is no element type; they are bool, u8, i8, u16, i16, u32, i32, u64, i64, f16, bf16, f32 and f64")]
pub struct UnknownDType(pub String);

impl FromStr for DType {
    type Err = UnknownDType;

    /// Takes the names that [`name`](DType::name) gives.
    fn from_str(name: &str) -> Result<DType, UnknownDType> {
        const ALL: [DType; 13] = [
            DType::Bool,
            DType::U8,
            DType::I8,
            DType::U16,
            DType::I16,
            DType::U32,
            DType::I32,
            DType::U64,
            DType::I64,
            DType::F16,
            DType::BF16,
            DType::F32,
            DType::F64,
        ];
        ALL.into_iter().find(|dtype| dtype.name() == name).ok_or_else(|| UnknownDType(name.to_owned()))
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A type that a leaf may hold: `bool`, the integers up to 64 bits, `f32`, `f64`, and with the feature `half` also
/// `half::f16` and `half::bf16`.
///
/// The list is closed: every listed type is valid for the all-zero bit pattern, has no padding, and is aligned to its
/// size.
///
/// ```
/// use pinring::{DType, Element};
/// fn dtype_of<T: Element>() -> DType { T::DTYPE }
/// assert_eq!(dtype_of::<i64>(), DType::I64);
/// ```
pub trait Element: Copy + Send + Sync + fmt::Debug + Default + 'static + sealed::Sealed {
    /// The type as data.
    const DTYPE: DType;
    /// Whether the value is neither NaN nor infinite; always true for integers and `bool`.
    fn is_finite(self) -> bool;
    /// The value as `f64`, for sums of rewards; 64-bit integers above 2⁵³ are rounded.
    fn to_f64(self) -> f64;
}

macro_rules! element {
    ($($type:ty => $dtype:ident, |$value:ident| $finite:expr, $float:expr;)*) => {$(
        impl sealed::Sealed for $type {}
        impl Element for $type {
            const DTYPE: DType = DType::$dtype;
            #[inline]
            fn is_finite(self) -> bool {
                let $value = self;
                let _ = $value;
                $finite
            }
            #[inline]
            fn to_f64(self) -> f64 {
                let $value = self;
                $float
            }
        }
    )*};
}

element! {
    bool => Bool, |v| true, f64::from(u8::from(v));
    u8 => U8, |v| true, f64::from(v);
    i8 => I8, |v| true, f64::from(v);
    u16 => U16, |v| true, f64::from(v);
    i16 => I16, |v| true, f64::from(v);
    u32 => U32, |v| true, f64::from(v);
    i32 => I32, |v| true, f64::from(v);
    u64 => U64, |v| true, v as f64;
    i64 => I64, |v| true, v as f64;
    f32 => F32, |v| v.is_finite(), f64::from(v);
    f64 => F64, |v| v.is_finite(), v;
}

#[cfg(feature = "half")]
element! {
    half::f16 => F16, |v| v.is_finite(), v.to_f64();
    half::bf16 => BF16, |v| v.is_finite(), v.to_f64();
}

/// Calls `$body` with `$T` bound to the Rust type of `$dtype`; types whose feature is off fall to `$absent`.
macro_rules! with_element {
    ($dtype:expr, $T:ident => $body:expr, absent => $absent:expr) => {
        match $dtype {
            $crate::element::DType::Bool => {
                type $T = bool;
                $body
            }
            $crate::element::DType::U8 => {
                type $T = u8;
                $body
            }
            $crate::element::DType::I8 => {
                type $T = i8;
                $body
            }
            $crate::element::DType::U16 => {
                type $T = u16;
                $body
            }
            $crate::element::DType::I16 => {
                type $T = i16;
                $body
            }
            $crate::element::DType::U32 => {
                type $T = u32;
                $body
            }
            $crate::element::DType::I32 => {
                type $T = i32;
                $body
            }
            $crate::element::DType::U64 => {
                type $T = u64;
                $body
            }
            $crate::element::DType::I64 => {
                type $T = i64;
                $body
            }
            $crate::element::DType::F32 => {
                type $T = f32;
                $body
            }
            $crate::element::DType::F64 => {
                type $T = f64;
                $body
            }
            #[cfg(feature = "half")]
            $crate::element::DType::F16 => {
                type $T = half::f16;
                $body
            }
            #[cfg(feature = "half")]
            $crate::element::DType::BF16 => {
                type $T = half::bf16;
                $body
            }
            #[cfg(not(feature = "half"))]
            $crate::element::DType::F16 | $crate::element::DType::BF16 => $absent,
        }
    };
}
pub(crate) use with_element;
