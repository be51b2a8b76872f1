//! The layers.
#![cfg(feature = "flex")]

mod bk_core;
mod hyper_connection;
mod kasmina;
mod modules;
