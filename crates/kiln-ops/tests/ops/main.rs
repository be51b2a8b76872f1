//! The operators on every device, each in a module of its own: one program, since each links all of Burn.

#[path = "../common/mod.rs"]
mod common;

mod adamw;
mod add_rms_norm;
mod bk;
mod cross_entropy;
mod embedding;
mod kasmina;
mod kasmina_mlp;
mod kasmina_seeds;
mod matmul;
mod mhc_post;
mod mhc_post_pre;
mod mhc_pre;
mod muon;
mod newton_schulz;
mod rms_norm;
mod rope;
mod sum_squares;
mod swiglu;
mod swiglu_mlp;
mod thin;
mod tril_matmul;
