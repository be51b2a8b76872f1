//! What a process asks of CUDA's driver, counted by CUPTI, which comes with CUDA's toolkit.

use std::collections::BTreeMap;
use std::ffi::{CStr, c_char, c_int, c_void};
use std::path::PathBuf;
use std::sync::{Mutex, OnceLock, PoisonError};

use libloading::Library;

/// How often a process called which function of the driver, as `cuLaunchKernel`.
#[derive(Debug, Default)]
pub struct Calls(BTreeMap<String, usize>);

impl Calls {
    /// The calls of functions whose names begin with one of `names`.
    pub fn of(&self, names: &[&str]) -> usize {
        let wanted = |name: &str| names.iter().any(|start| name.starts_with(start));
        self.0.iter().filter(|(name, _)| wanted(name)).map(|(_, times)| times).sum()
    }
}

/// A process has one subscriber, and its calls come from any thread.
static COUNTED: Mutex<Calls> = Mutex::new(Calls(BTreeMap::new()));
static SUBSCRIBED: Mutex<()> = Mutex::new(());

const DRIVER_API: c_int = 1;
const ENTER: c_int = 0;

/// The beginning of `CUpti_CallbackData`.
#[repr(C)]
struct CallbackData {
    site: c_int,
    function: *const c_char,
}

type Callback = unsafe extern "C" fn(*mut c_void, c_int, u32, *const CallbackData);
type Subscribe = unsafe extern "C" fn(*mut *mut c_void, Callback, *mut c_void) -> c_int;
type EnableDomain = unsafe extern "C" fn(u32, *mut c_void, c_int) -> c_int;
type Unsubscribe = unsafe extern "C" fn(*mut c_void) -> c_int;

/// # Safety
///
/// `data` is that of a call of the driver.
unsafe extern "C" fn count(_: *mut c_void, _: c_int, _: u32, data: *const CallbackData) {
    // SAFETY: CUPTI hands such data, since that domain alone is enabled.
    let (site, name) = unsafe { ((*data).site, CStr::from_ptr((*data).function)) };
    if site == ENTER {
        let mut calls = COUNTED.lock().unwrap_or_else(PoisonError::into_inner);
        *calls.0.entry(name.to_string_lossy().into_owned()).or_default() += 1;
    }
}

/// Subscribed until it is dropped.
struct Subscribed(*mut c_void, Unsubscribe);

impl Drop for Subscribed {
    fn drop(&mut self) {
        // SAFETY: it is a subscriber, and the library is never unloaded.
        let _ = unsafe { self.1(self.0) };
    }
}

/// The calls of the driver while `work` runs, from all of the process's threads.
///
/// # Errors
///
/// Why CUPTI could not count.
pub fn driver_calls(work: impl FnOnce()) -> Result<Calls, String> {
    let _one = SUBSCRIBED.lock().unwrap_or_else(PoisonError::into_inner);
    let library = library()?;
    let asked = |function: &str, status: c_int| match status {
        0 => Ok(()),
        _ => Err(format!("{function} returned {status}")),
    };
    let missing = |e: libloading::Error| e.to_string();
    // SAFETY: the types above are those of cupti_callbacks.h, and the library stays until they are no longer called.
    unsafe {
        let subscribe = library.get::<Subscribe>(b"cuptiSubscribe").map_err(missing)?;
        let enable = library.get::<EnableDomain>(b"cuptiEnableDomain").map_err(missing)?;
        let unsubscribe = library.get::<Unsubscribe>(b"cuptiUnsubscribe").map_err(missing)?;
        let mut subscriber = std::ptr::null_mut();
        asked("cuptiSubscribe", subscribe(&mut subscriber, count, std::ptr::null_mut()))?;
        // Also if `work` panics.
        let _subscribed = Subscribed(subscriber, *unsubscribe);
        *COUNTED.lock().unwrap_or_else(PoisonError::into_inner) = Calls::default();
        asked("cuptiEnableDomain", enable(1, subscriber, DRIVER_API))?;
        work();
    }
    Ok(std::mem::take(&mut COUNTED.lock().unwrap_or_else(PoisonError::into_inner)))
}

static LIBRARY: OnceLock<Library> = OnceLock::new();

/// CUPTI where the loader finds it, else in the toolkit's folders; it stays loaded, since the driver keeps parts of it.
fn library() -> Result<&'static Library, String> {
    if let Some(library) = LIBRARY.get() {
        return Ok(library);
    }
    let roots = ["CUDA_PATH", "CUDA_HOME"].into_iter().filter_map(std::env::var_os);
    let roots = roots.map(PathBuf::from).chain([PathBuf::from("/usr/local/cuda")]);
    let folders = roots.flat_map(|root| [root.join("extras/CUPTI/lib64"), root.join("lib64")]);
    let mut first = None;
    for folder in [PathBuf::new()].into_iter().chain(folders) {
        for name in ["libcupti.so", "libcupti.so.13", "libcupti.so.12"] {
            // SAFETY: CUPTI is made to be loaded into a process.
            match unsafe { Library::new(folder.join(name)) } {
                Ok(library) => return Ok(LIBRARY.get_or_init(|| library)),
                Err(error) => _ = first.get_or_insert(error.to_string()),
            }
        }
    }
    Err(format!("no CUPTI: {}", first.unwrap_or_default()))
}
