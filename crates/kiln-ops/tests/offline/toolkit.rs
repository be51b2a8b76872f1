//! NVRTC and ptxas, where they are: from CUDA C++ to registers and spills, without a GPU.

use cudarc::nvrtc::{CompileOptions, compile_ptx_with_opts};
use std::path::PathBuf;
use std::process::Command;

/// A CUDA toolkit: NVRTC is found by the dynamic loader, headers and ptxas below a folder.
pub struct Toolkit {
    folder: PathBuf,
    /// What its ptxas calls itself.
    pub name: String,
}

/// What ptxas says of a kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Usage {
    pub registers: u32,
    /// Bytes stored to local memory because registers ran out, and bytes of arrays there.
    pub spilled: u32,
    pub stack: u32,
}

impl Toolkit {
    /// That of `KILN_CUDA_TOOLKIT`.
    pub fn find() -> Option<Self> {
        let folder: PathBuf = std::env::var_os("KILN_CUDA_TOOLKIT")?.into();
        let out = Command::new(folder.join("bin/ptxas")).arg("--version").output();
        let out = out.expect("KILN_CUDA_TOOLKIT names a folder with bin/ptxas").stdout;
        let name = String::from_utf8_lossy(&out).lines().last().unwrap_or_default().into();
        Some(Self { folder, name })
    }

    /// Compiles for compute capability 8.0 or 9.0, as the runtime does.
    pub fn usage(&self, code: &str, capability: u32) -> Result<Usage, String> {
        let arch = if capability == 90 { "sm_90a" } else { "sm_80" };
        let include = |path: &str| self.folder.join(path).to_string_lossy().into_owned();
        let options = CompileOptions {
            options: vec![format!("--gpu-architecture={arch}"), "-lineinfo".into()],
            include_paths: vec![include("include"), include("include/cccl")],
            ..Default::default()
        };
        let ptx = compile_ptx_with_opts(code, options).map_err(|e| format!("NVRTC: {e:?}"))?;
        let file = tempfile::Builder::new().suffix(".ptx").tempfile().map_err(|e| e.to_string())?;
        std::fs::write(file.path(), ptx.to_src()).map_err(|e| e.to_string())?;
        let cubin = file.path().with_extension("cubin");
        let out = Command::new(self.folder.join("bin/ptxas"))
            .args(["-v", "-arch", arch, "-o"])
            .args([&cubin, file.path()])
            .output()
            .map_err(|e| format!("ptxas: {e}"))?;
        let _ = std::fs::remove_file(cubin);
        let text = String::from_utf8_lossy(&out.stderr);
        // C75xx: wgmma whose products are made one after the other.
        if !out.status.success() || text.contains("warning") || text.contains("(C75") {
            return Err(format!("ptxas: {text}"));
        }
        let number = |after: &str, unit: &str| {
            let line = text.lines().find(|line| line.contains(unit))?;
            let words: Vec<_> = line[line.find(after).unwrap_or(0)..].split_whitespace().collect();
            let at = words.iter().position(|w| unit.starts_with(w.trim_end_matches(',')))?;
            words.get(at.checked_sub(1)?)?.parse().ok()
        };
        let registers = number("Used", "registers").ok_or(format!("ptxas said: {text}"))?;
        let bytes = |what: &str| -> u32 {
            let find = |line: &str| {
                let at = line.find(what)?;
                line[..at].split_whitespace().last()?.parse().ok()
            };
            text.lines().find_map(find).unwrap_or(0)
        };
        Ok(Usage {
            registers,
            spilled: bytes("bytes spill stores"),
            stack: bytes("bytes stack frame"),
        })
    }
}
