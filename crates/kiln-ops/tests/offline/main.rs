//! Compiles every CUDA kernel, for every operator and element type, without a GPU.
//!
//! The host code of the operators runs as it does on a GPU, on a device whose server turns each
//! launch into CUDA C++ and drops it. That alone shows what CubeCL refuses. With a CUDA toolkit, that
//! is NVRTC where the dynamic loader finds it and `KILN_CUDA_TOOLKIT` naming the folder of `include`
//! and `bin/ptxas`, the code goes on through both, and registers, spills and shared memory are
//! compared with the table recorded in `kernels.txt`. What stands there with a hash of the same code, made by the
//! same ptxas, is not compiled again. `scripts/offline` fetches the toolkit and runs this test; `KILN_RECORD=1` writes
//! the table anew, `KILN_ALL=1` compiles all, `KILN_ONLY=words` prints the rows of the calls with these words in
//! their names and compares nothing; `KILN_OFFLINE=skip` is for those who run `scripts/offline` anyway.

mod attention;
mod calls;
mod hyper;
#[path = "../alone/scan/ops.rs"]
mod ops;
mod optimizer;
mod seeds;
mod server;
mod table;
mod toolkit;

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use table::{Row, Table, hash};
use toolkit::{Toolkit, Usage};

const TABLE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/offline/kernels.txt");

#[derive(Clone)]
struct Kernel {
    name: String,
    capability: u32,
    code: String,
    source: String,
    shared: usize,
}

/// What each uses: as recorded, or compiled, on all cores.
fn usages(toolkit: &Toolkit, kernels: &[Kernel], recorded: &Table) -> Vec<Result<Usage, String>> {
    let (next, compiled) = (AtomicUsize::new(0), AtomicUsize::new(0));
    let usage = |kernel: &Kernel| match recorded.known(&toolkit.name, &kernel.name, &kernel.source)
    {
        Some(usage) => Ok(usage),
        None => {
            compiled.fetch_add(1, Ordering::Relaxed);
            toolkit.usage(&kernel.code, kernel.capability)
        }
    };
    let work = || {
        let mut done = vec![];
        loop {
            let at = next.fetch_add(1, Ordering::Relaxed);
            let Some(kernel) = kernels.get(at) else { return done };
            done.push((at, usage(kernel)));
        }
    };
    let workers = std::thread::available_parallelism().map_or(1, usize::from);
    let done: BTreeMap<_, _> = std::thread::scope(|scope| {
        let workers: Vec<_> = (0..workers).map(|_| scope.spawn(work)).collect();
        workers.into_iter().flat_map(|worker| worker.join().unwrap()).collect()
    });
    let compiled = compiled.into_inner();
    eprintln!(
        "{compiled} of {} kernels compiled by NVRTC and ptxas, the others are known",
        kernels.len()
    );
    done.into_values().collect()
}

/// What all wanted calls launch on a device of this compute capability, and the errors of CubeCL.
fn launched(capability: u32) -> (Vec<Kernel>, Vec<String>) {
    let (mut kernels, mut errors): (Vec<Kernel>, _) = (vec![], vec![]);
    let client = server::client(capability);
    let only = std::env::var("KILN_ONLY").unwrap_or_default();
    let wanted = |name: &str| only.is_empty() || name.contains(&only);
    for call in calls::all(&client).into_iter().filter(|call| wanted(&call.name)) {
        for source in server::compiled(&client, capability, call.run) {
            // module::kernel::Kernel<generics>
            let path = source.kernel.split('<').next().unwrap_or(source.kernel);
            let kernel = path.rsplit("::").nth(1).unwrap_or(path);
            let mut name = format!("sm_{capability} {} {kernel}", call.name);
            while kernels.iter().any(|kernel| kernel.name == name) {
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
            let (source, shared) = (hash(&code), source.shared);
            kernels.push(Kernel { name, capability, code, source, shared });
        }
    }
    (kernels, errors)
}

/// A forward or backward of the Kasmina layer copies nothing to the device or back.
#[test]
fn seeds_stay_on_the_device() {
    let client = server::client(89);
    let calls = || seeds::chunks_of(&client).into_iter();
    let uploads = server::uploads(&client, 89, || {
        for _ in 0..100 {
            calls().for_each(|call| (call.run)());
        }
    });
    assert_eq!(uploads, 0);
    // One that is there is seen.
    let upload = || drop(client.create_from_slice(&[1, 2, 3]));
    assert_eq!(server::uploads(&client, 89, upload), 1);
}

#[test]
fn every_kernel_compiles_as_recorded() {
    if std::env::var("KILN_OFFLINE").is_ok_and(|what| what == "skip") {
        return kiln_test::skip("offline", "KILN_OFFLINE=skip");
    }
    let toolkit = Toolkit::find();
    if toolkit.is_none() {
        let why = "there is none, kernels stop at CUDA C++; scripts/offline fetches one";
        kiln_test::skip("toolkit", why);
    }
    // Making CUDA C++ takes as long as compiling what is not known: each device has a thread.
    let (kernels, errors): (Vec<_>, Vec<_>) = std::thread::scope(|scope| {
        let devices = [90, 80].map(|capability| scope.spawn(move || launched(capability)));
        devices.into_iter().map(|device| device.join().unwrap()).unzip()
    });
    let (kernels, mut errors) = (kernels.concat(), errors.concat());
    let text = std::fs::read_to_string(TABLE).unwrap_or_default();
    let all = std::env::var_os("KILN_ALL").is_some();
    let known = if all { Table::default() } else { Table::parse(&text) };
    let usage = toolkit.as_ref().map(|toolkit| usages(toolkit, &kernels, &known));
    let name = toolkit.as_ref().map(|toolkit| toolkit.name.clone()).unwrap_or_default();
    let mut table = Table { toolkit: name, ..Table::default() };
    for (kernel, usage) in kernels.iter().zip(usage.into_iter().flatten()) {
        let (shared, source) = (kernel.shared, kernel.source.clone());
        match usage {
            Ok(usage) => {
                table.rows.insert(kernel.name.clone(), Row { usage, shared, source });
            }
            Err(error) => errors.push(format!("{}: {error}", kernel.name)),
        }
    }
    assert!(errors.is_empty(), "{} kernels do not compile:\n{}", errors.len(), errors.join("\n"));
    let only = std::env::var_os("KILN_ONLY").is_some();
    assert!(only || kernels.len() > 20, "only {} kernels were launched", kernels.len());
    eprintln!("{} kernels", kernels.len());
    if toolkit.is_none() {
        return;
    }
    if only {
        eprint!("{table}");
        return;
    }
    if std::env::var_os("KILN_RECORD").is_some() {
        std::fs::write(TABLE, table.to_string()).unwrap();
        return;
    }
    // Another text counts only if it has other numbers.
    let (made, recorded) = (table.rows, Table::parse(&text).rows);
    let numbers = |row: &Row| (row.usage, row.shared);
    let apart = |of: &BTreeMap<String, Row>, from: &BTreeMap<String, Row>| -> Vec<String> {
        let same = |name: &String, row: &Row| from.get(name).map(numbers) == Some(numbers(row));
        let rows = of.iter().filter(|(name, row)| !same(name, row));
        rows.map(|(name, row)| format!("{name}: {row:?}")).collect()
    };
    let (new, gone) = (apart(&made, &recorded), apart(&recorded, &made));
    assert!(
        new.is_empty() && gone.is_empty(),
        "kernels differ from {TABLE} (KILN_RECORD=1 records them):\n+ {}\n- {}",
        new.join("\n+ "),
        gone.join("\n- ")
    );
}
