//! Tests that share what a process has one of, so that some run by themselves: audits, plans that are heard,
//! limits of devices, what is allocated.

#[path = "../common/mod.rs"]
#[allow(dead_code)] // of what the tests share
mod common;

mod attention;
mod decoding;
mod in_place;
mod linear_cross_entropy;
mod matmul_add;
mod scan;

use std::sync::{PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

static PROCESS: RwLock<()> = RwLock::new(());

/// No other test runs as long as this is held.
fn alone() -> RwLockWriteGuard<'static, ()> {
    PROCESS.write().unwrap_or_else(PoisonError::into_inner)
}

/// No test that is alone runs as long as this is held.
fn beside_others() -> RwLockReadGuard<'static, ()> {
    PROCESS.read().unwrap_or_else(PoisonError::into_inner)
}
