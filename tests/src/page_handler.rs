//! Page handlers: processes of the program `page_handler`, which serve the memory of guests.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use crate::{SOON, ScratchDir, wait_for};

/// A process that serves one guest's memory. Dropping it kills the process.
pub struct HandlerProcess {
    child: Child,
    socket: PathBuf,
    output: PathBuf,
}

/// What a handler has done.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct HandlerCounts {
    /// Faults that it has answered with a page of the memory file.
    pub copied: u64,
    /// Faults that it has answered with zeros, because the page was discarded.
    pub zeroed: u64,
    /// Pages that were discarded.
    pub discarded: u64,
}

impl HandlerProcess {
    /// Starts `program`, which serves the file `memory`, with further `args`. `name` is the stem of
    /// its files in `scratch`.
    pub fn start(
        program: &str,
        scratch: &ScratchDir,
        name: &str,
        memory: &Path,
        args: &[&str],
    ) -> Self {
        let socket = scratch.path(&format!("{name}.uffd"));
        let output = scratch.path(&format!("{name}.handler"));
        let child = Command::new(program)
            .arg(&socket)
            .arg(memory)
            .args(args)
            .stdin(Stdio::null())
            .stdout(File::create(&output).expect("a file"))
            .spawn()
            .expect("the handler starts");
        let handler = Self { child, socket, output };
        wait_for("listening page handler", SOON, || {
            handler.output().contains("listens").then_some(())
        });
        handler
    }

    /// Returns the path at which it listens.
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    fn output(&self) -> String {
        fs::read_to_string(&self.output).unwrap_or_default()
    }

    /// Returns what it has done so far.
    pub fn counts(&self) -> HandlerCounts {
        let output = self.output();
        let whole = output.rfind('\n').map_or("", |end| &output[..end]);
        let last = whole.lines().rev().find_map(|line| line.strip_prefix("counts "));
        let numbers: Vec<u64> =
            last.into_iter().flat_map(str::split_whitespace).flat_map(str::parse).collect();
        match numbers[..] {
            [copied, zeroed, discarded] => HandlerCounts { copied, zeroed, discarded },
            _ => HandlerCounts::default(),
        }
    }

    /// Waits until the process ends. Does not end it.
    pub fn wait_end(&mut self) {
        wait_for("end of the page handler", SOON, || {
            self.child.try_wait().expect("a child of ours")
        });
    }

    /// Kills the process by SIGKILL.
    pub fn kill(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Drop for HandlerProcess {
    fn drop(&mut self) {
        self.kill();
        if std::thread::panicking() {
            eprintln!("--- {}: {:?}", self.output.display(), self.counts());
        }
    }
}
