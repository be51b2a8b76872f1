//! Compiles every CUDA kernel, for every operator and element type, without a GPU.
//!
//! The host code of the operators runs as it does on a GPU, on a device whose server turns each
//! launch into CUDA C++ and drops it. That alone shows what CubeCL refuses. With a CUDA toolkit, that
//! is NVRTC where the dynamic loader finds it and `KILN_CUDA_TOOLKIT` naming the folder of `include`
//! and `bin/ptxas`, the code goes on through both, and registers, spills and shared memory are
//! compared with the table recorded in `kernels.txt`. `scripts/offline` fetches the toolkit and runs
//! this test; `KILN_RECORD=1` writes the table anew, `KILN_ONLY=words` prints the rows of the calls with
//! these words in their names and compares nothing.

mod attention;
mod calls;
#[path = "../scan/ops.rs"]
mod ops;
mod server;
mod toolkit;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use toolkit::{Toolkit, Usage};

const TABLE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/offline/kernels.txt");

struct Kernel {
    name: String,
    capability: u32,
    code: String,
    shared: usize,
}

/// Compiles them on all cores.
fn compile(toolkit: &Toolkit, kernels: &[Kernel]) -> Vec<Result<Usage, String>> {
    let next = AtomicUsize::new(0);
    let work = || {
        let mut done = vec![];
        loop {
            let at = next.fetch_add(1, Ordering::Relaxed);
            let Some(kernel) = kernels.get(at) else { return done };
            done.push((at, toolkit.usage(&kernel.code, kernel.capability)));
        }
    };
    let workers = std::thread::available_parallelism().map_or(1, usize::from);
    let done: BTreeMap<_, _> = std::thread::scope(|scope| {
        let workers: Vec<_> = (0..workers).map(|_| scope.spawn(work)).collect();
        workers.into_iter().flat_map(|worker| worker.join().unwrap()).collect()
    });
    done.into_values().collect()
}

#[test]
fn every_kernel_compiles_as_recorded() {
    let toolkit = Toolkit::find();
    if toolkit.is_none() {
        eprintln!(
            "SKIPPED: no CUDA toolkit, kernels stop at CUDA C++; scripts/offline fetches one"
        );
    }
    let (mut errors, mut seen, mut kernels) = (vec![], BTreeSet::new(), vec![]);
    for capability in [90, 80] {
        let client = server::client(capability);
        let only = std::env::var("KILN_ONLY").unwrap_or_default();
        let wanted = |name: &str| only.is_empty() || name.contains(&only);
        for call in calls::all(&client).into_iter().filter(|call| wanted(&call.name)) {
            for source in server::compiled(&client, call.run) {
                // module::kernel::Kernel<generics>
                let path = source.kernel.split('<').next().unwrap_or(source.kernel);
                let kernel = path.rsplit("::").nth(1).unwrap_or(path);
                let mut name = format!("sm_{capability} {} {kernel}", call.name);
                while kernels.iter().any(|k: &Kernel| k.name == name) {
                    name += "'";
                }
                let code = match source.code {
                    Ok(code) => code,
                    Err(error) => {
                        errors.push(format!("{name}: {error}"));
                        continue;
                    }
                };
                if let Some(folder) = std::env::var_os("KILN_DUMP") {
                    let file = name.replace([' ', '/'], "_") + ".cu";
                    std::fs::write(Path::new(&folder).join(file), &code).unwrap();
                }
                if seen.insert((capability, source.id)) {
                    kernels.push(Kernel { name, capability, code, shared: source.shared });
                }
            }
        }
    }
    let usage = toolkit.as_ref().map(|toolkit| compile(toolkit, &kernels));
    let mut table = BTreeMap::new();
    for (kernel, usage) in kernels.iter().zip(usage.into_iter().flatten()) {
        match usage {
            Ok(usage) => {
                table.insert(kernel.name.clone(), (usage, kernel.shared));
            }
            Err(error) => errors.push(format!("{}: {error}", kernel.name)),
        }
    }
    assert!(errors.is_empty(), "{} kernels do not compile:\n{}", errors.len(), errors.join("\n"));
    let only = std::env::var_os("KILN_ONLY").is_some();
    assert!(only || seen.len() > 20, "only {} kernels were launched", seen.len());
    eprintln!("{} kernels compiled", seen.len());
    if toolkit.is_none() {
        return;
    }
    let mut text = String::from("registers  spilled  stack  shared  kernel\n");
    for (name, (usage, shared)) in &table {
        let (registers, spilled, stack) = (usage.registers, usage.spilled, usage.stack);
        writeln!(text, "{registers:>9} {spilled:>8} {stack:>6} {shared:>7}  {name}").unwrap();
    }
    if only {
        eprint!("{text}");
        return;
    }
    if std::env::var_os("KILN_RECORD").is_some() {
        std::fs::write(TABLE, &text).unwrap();
        return;
    }
    let recorded = std::fs::read_to_string(TABLE).unwrap_or_default();
    let new: Vec<_> = text.lines().filter(|line| !recorded.lines().any(|r| r == *line)).collect();
    let gone: Vec<_> = recorded.lines().filter(|line| !text.lines().any(|t| t == *line)).collect();
    assert!(
        new.is_empty() && gone.is_empty(),
        "kernels differ from {TABLE} (KILN_RECORD=1 records them):\n+ {}\n- {}",
        new.join("\n+ "),
        gone.join("\n- ")
    );
}
