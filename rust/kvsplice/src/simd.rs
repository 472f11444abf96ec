//! Loops compiled once for each instruction set and chosen at run time. The crate's only `unsafe` is here.
//!
//! A loop is written once, as an ordinary function; [`per_simd`] makes a copy of it for each instruction set and a
//! dispatcher. There is nothing to keep in step by hand, and as the loops are integer arithmetic, all copies
//! agree bit for bit.

/// An instruction set that this processor has. Only detection makes one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Simd(pub(crate) Kind);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(not(target_arch = "x86_64"), allow(dead_code))]
pub(crate) enum Kind {
    /// What the build assumes.
    Baseline,
    /// x86-64-v3: AVX2, BMI1 and BMI2.
    V3,
    /// x86-64-v4: the above with AVX-512 F, DQ and VL.
    V4,
}

impl Simd {
    /// The widest that this processor has.
    pub fn detect() -> Self {
        Self::available().pop().unwrap_or(Self(Kind::Baseline))
    }

    /// All that this processor has, narrowest first.
    pub fn available() -> Vec<Self> {
        let mut found = vec![Self(Kind::Baseline)];
        #[cfg(target_arch = "x86_64")]
        {
            use std::arch::is_x86_feature_detected as has;
            if has!("avx2") && has!("bmi1") && has!("bmi2") {
                found.push(Self(Kind::V3));
                if has!("avx512f") && has!("avx512dq") && has!("avx512vl") {
                    found.push(Self(Kind::V4));
                }
            }
        }
        found
    }

    /// Its usual name.
    pub fn name(self) -> &'static str {
        match self.0 {
            Kind::Baseline => "baseline",
            Kind::V3 => "avx2",
            Kind::V4 => "avx512",
        }
    }
}

/// Asks for the cache line of `value`, which will be read soon.
#[inline]
pub(crate) fn prefetch<T>(value: &T) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a prefetch reads nothing as far as the program can tell, and faults at no address.
    unsafe {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        _mm_prefetch::<_MM_HINT_T0>((&raw const *value).cast());
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = value;
}

/// Defines `fn name(simd, arguments)` that runs `body` (an `#[inline(always)]` function) on the given instruction set.
macro_rules! per_simd {
    ($(#[$meta:meta])* fn $name:ident($($arg:ident: $type:ty),* $(,)?) $(-> $result:ty)? = $body:expr;) => {
        $(#[$meta])*
        fn $name(simd: $crate::simd::Simd, $($arg: $type),*) $(-> $result)? {
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,bmi1,bmi2")]
            fn v3($($arg: $type),*) $(-> $result)? {
                $body($($arg),*)
            }
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,bmi1,bmi2,avx512f,avx512dq,avx512vl")]
            fn v4($($arg: $type),*) $(-> $result)? {
                $body($($arg),*)
            }
            match simd.0 {
                #[cfg(target_arch = "x86_64")]
                // SAFETY: a `Simd` of this kind exists only where its features were detected.
                $crate::simd::Kind::V3 => unsafe { v3($($arg),*) },
                #[cfg(target_arch = "x86_64")]
                // SAFETY: as above.
                $crate::simd::Kind::V4 => unsafe { v4($($arg),*) },
                _ => $body($($arg),*),
            }
        }
    };
}

pub(crate) use per_simd;
