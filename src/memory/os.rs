//! The calls to the operating system that the ring needs, and nothing else: reserve, open, advise, fault in, give
//! back.
//!
//! Every platform difference of the memory module is in this file. Linux has all of it; other unixes have no
//! transparent huge pages, no wipe-on-fork and no populate, and say so by returning `false` or doing without;
//! elsewhere nothing can be mapped, and `reserve` says that. This file decides nothing: order, alignment and
//! roll-back belong to `mapping.rs`.

#[cfg(unix)]
pub(super) use self::unix::*;

#[cfg(not(unix))]
pub(super) use self::other::*;

#[cfg(unix)]
mod unix {
    use std::ffi::c_void;
    use std::io;
    use std::ptr::{self, NonNull};

    use rustix::mm::{MapFlags, MprotectFlags, ProtFlags};

    /// Size of a page of this system in bytes.
    pub(in crate::memory) fn page_bytes() -> usize {
        rustix::param::page_size()
    }

    /// Reserves `bytes` of address space that can be neither read nor written. Rounds up to whole pages, as the
    /// kernel does.
    pub(in crate::memory) fn reserve(bytes: usize) -> io::Result<NonNull<u8>> {
        // SAFETY: the kernel chooses the address (null hint, no MAP_FIXED), so no memory of anybody's is replaced.
        let address =
            unsafe { rustix::mm::mmap_anonymous(ptr::null_mut(), bytes, ProtFlags::empty(), MapFlags::PRIVATE) }?;
        NonNull::new(address.cast::<u8>()).ok_or_else(|| io::Error::other("mapped at address 0"))
    }

    /// Makes `bytes` from `start` readable and writable.
    ///
    /// # Safety
    /// The range is whole pages of a reservation that the caller owns.
    pub(in crate::memory) unsafe fn open(start: NonNull<u8>, bytes: usize) -> io::Result<()> {
        let flags = MprotectFlags::READ | MprotectFlags::WRITE;
        // SAFETY: the caller owns the range; more access to one's own memory breaks nobody.
        unsafe { rustix::mm::mprotect(start.as_ptr().cast::<c_void>(), bytes, flags) }?;
        Ok(())
    }

    /// Gives `bytes` from `start` back to the system.
    ///
    /// # Safety
    /// The range is whole pages that the caller owns, and nobody reads or writes them any more, no device either.
    pub(in crate::memory) unsafe fn unmap(start: NonNull<u8>, bytes: usize) -> io::Result<()> {
        // SAFETY: the caller owns the range and it has no users left.
        unsafe { rustix::mm::munmap(start.as_ptr().cast::<c_void>(), bytes) }?;
        Ok(())
    }

    /// Asks for transparent huge pages; `false` where there are none.
    ///
    /// # Safety
    /// The range is whole pages that the caller owns.
    pub(in crate::memory) unsafe fn ask_huge_pages(start: NonNull<u8>, bytes: usize) -> bool {
        #[cfg(any(target_os = "linux", target_os = "android"))]
        {
            // SAFETY: the caller owns the range; this advice changes no content.
            unsafe { advise(start, bytes, rustix::mm::Advice::LinuxHugepage) }.is_ok()
        }
        #[cfg(not(any(target_os = "linux", target_os = "android")))]
        {
            let _ = (start, bytes);
            false
        }
    }

    /// Makes a forked child read zeros here; `false` where the system cannot.
    ///
    /// # Safety
    /// The range is whole pages that the caller owns.
    pub(in crate::memory) unsafe fn wipe_on_fork(start: NonNull<u8>, bytes: usize) -> bool {
        #[cfg(any(target_os = "linux", target_os = "android"))]
        {
            // SAFETY: the caller owns the range; this advice changes no content in this process.
            unsafe { advise(start, bytes, rustix::mm::Advice::LinuxWipeOnFork) }.is_ok()
        }
        #[cfg(not(any(target_os = "linux", target_os = "android")))]
        {
            let _ = (start, bytes);
            false
        }
    }

    /// Faults every page of the range in for writing. `Ok(false)`: this system has no such call, touch the pages
    /// instead.
    ///
    /// # Safety
    /// The range is whole pages, open for writing, that the caller owns.
    pub(in crate::memory) unsafe fn populate(start: NonNull<u8>, bytes: usize) -> io::Result<bool> {
        #[cfg(any(target_os = "linux", target_os = "android"))]
        {
            use rustix::io::Errno;
            // SAFETY: the caller owns the range; populating changes no content.
            match unsafe { advise(start, bytes, rustix::mm::Advice::LinuxPopulateWrite) } {
                Ok(()) => Ok(true),
                // Kernels before 5.14 and emulations of Linux do not know the call; "again" means exactly that, and
                // touching is the other way to get the same pages.
                Err(Errno::INVAL | Errno::NOSYS | Errno::AGAIN | Errno::INTR) => Ok(false),
                Err(refused) => Err(refused.into()),
            }
        }
        #[cfg(not(any(target_os = "linux", target_os = "android")))]
        {
            let _ = (start, bytes);
            Ok(false)
        }
    }

    /// # Safety
    /// The range is whole pages that the caller owns, and the advice does not change what they hold.
    #[cfg(any(target_os = "linux", target_os = "android"))]
    unsafe fn advise(start: NonNull<u8>, bytes: usize, advice: rustix::mm::Advice) -> rustix::io::Result<()> {
        // SAFETY: the caller owns the range and vouches for the advice.
        unsafe { rustix::mm::madvise(start.as_ptr().cast::<c_void>(), bytes, advice) }
    }

    /// The soft `ulimit -l` of this process in bytes; `None` = no limit.
    pub(in crate::memory) fn memlock_limit() -> Option<u64> {
        rustix::process::getrlimit(rustix::process::Resource::Memlock).current
    }

    /// This process's id.
    pub(in crate::memory) fn process_id() -> u32 {
        rustix::process::getpid().as_raw_nonzero().get().cast_unsigned()
    }
}

#[cfg(not(unix))]
mod other {
    use std::io;
    use std::ptr::NonNull;

    fn unsupported() -> io::Error {
        io::Error::new(
            io::ErrorKind::Unsupported,
            "pinring maps its ring with mmap, which this operating system does not have; Linux is the supported host",
        )
    }

    pub(in crate::memory) fn page_bytes() -> usize {
        4096
    }

    pub(in crate::memory) fn reserve(_bytes: usize) -> io::Result<NonNull<u8>> {
        Err(unsupported())
    }

    /// # Safety
    /// Never reached with a reservation, since `reserve` gives none.
    pub(in crate::memory) unsafe fn open(_start: NonNull<u8>, _bytes: usize) -> io::Result<()> {
        Err(unsupported())
    }

    /// # Safety
    /// Never reached with a reservation, since `reserve` gives none.
    pub(in crate::memory) unsafe fn unmap(_start: NonNull<u8>, _bytes: usize) -> io::Result<()> {
        Err(unsupported())
    }

    /// # Safety
    /// Never reached with a reservation, since `reserve` gives none.
    pub(in crate::memory) unsafe fn ask_huge_pages(_start: NonNull<u8>, _bytes: usize) -> bool {
        false
    }

    /// # Safety
    /// Never reached with a reservation, since `reserve` gives none.
    pub(in crate::memory) unsafe fn wipe_on_fork(_start: NonNull<u8>, _bytes: usize) -> bool {
        false
    }

    /// # Safety
    /// Never reached with a reservation, since `reserve` gives none.
    pub(in crate::memory) unsafe fn populate(_start: NonNull<u8>, _bytes: usize) -> io::Result<bool> {
        Err(unsupported())
    }

    pub(in crate::memory) fn memlock_limit() -> Option<u64> {
        None
    }

    pub(in crate::memory) fn process_id() -> u32 {
        std::process::id()
    }
}
