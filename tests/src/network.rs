//! Network namespaces in place of hosts. Each has a bridge with taps, and the peer's namespace
//! joins them.
//!
//! ```text
//!  source            peer            destination
//!  tap0 - br0 - up0 = to-s - br0 - to-d = up0 - br0 - tap0
//! ```
//!
//! Dropping a [`Namespace`] removes it with its devices.

use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};

/// The address of the peer.
pub const PEER: &str = "10.77.0.1";
/// The address of the guest.
pub const GUEST: &str = "10.77.0.2";

fn try_ip(args: &[&str]) -> Result<(), String> {
    let out = Command::new("ip").args(args).output().map_err(|e| format!("ip: {e}"))?;
    match out.status.success() {
        true => Ok(()),
        false => {
            let stderr = String::from_utf8_lossy(&out.stderr);
            Err(format!("ip {}: {}", args.join(" "), stderr.trim()))
        }
    }
}

/// A network namespace in place of a host.
#[derive(Debug)]
pub struct Namespace {
    name: String,
    address: String,
}

impl Namespace {
    /// Creates a namespace with a bridge `br0`, which has `address` (without a prefix).
    ///
    /// # Errors
    ///
    /// Returns the output of the `ip` command that failed.
    pub fn new(address: &str) -> Result<Self, String> {
        static MADE: AtomicU32 = AtomicU32::new(0);
        let made = MADE.fetch_add(1, Ordering::Relaxed);
        let name = format!("driftline-{}-{made}", std::process::id());
        try_ip(&["netns", "add", &name])?;
        let new = Self { name, address: address.to_owned() };
        new.ip(&["link", "set", "lo", "up"])?;
        new.ip(&["link", "add", "br0", "type", "bridge"])?;
        new.ip(&["addr", "add", &format!("{address}/24"), "dev", "br0"])?;
        new.ip(&["link", "set", "br0", "up"])?;
        Ok(new)
    }

    /// Returns the address of the bridge.
    pub fn address(&self) -> &str {
        &self.address
    }

    /// Adds a tap to the bridge.
    ///
    /// # Errors
    ///
    /// Returns the output of the `ip` command that failed.
    pub fn add_tap(&self, name: &str) -> Result<(), String> {
        self.ip(&["tuntap", "add", "dev", name, "mode", "tap"])?;
        self.ip(&["link", "set", name, "master", "br0", "up"])
    }

    /// Connects this bridge with that of `other`.
    fn join(&self, port: &str, other: &Self) -> Result<(), String> {
        let there = ["type", "veth", "peer", "name", "up0", "netns", &other.name];
        self.ip(&[&["link", "add", "name", port], &there[..]].concat())?;
        self.ip(&["link", "set", port, "master", "br0", "up"])?;
        other.ip(&["link", "set", "up0", "master", "br0", "up"])
    }

    fn ip(&self, args: &[&str]) -> Result<(), String> {
        try_ip(&[&["-n", &self.name], args].concat())
    }

    /// Returns a command that runs `program` in the namespace. The process keeps its id, because
    /// `ip netns exec` replaces itself by the program.
    pub fn command(&self, program: &Path) -> Command {
        let mut command = Command::new("ip");
        command.args(["netns", "exec", &self.name]).arg(program);
        command
    }
}

impl Drop for Namespace {
    fn drop(&mut self) {
        if let Err(e) = try_ip(&["netns", "del", &self.name]) {
            eprintln!("{e}");
        }
    }
}

/// Two hosts and the peer, whose bridge joins them.
#[derive(Debug)]
pub struct Network {
    /// The hosts between which a guest moves. Each has a `tap0`.
    pub hosts: [Namespace; 2],
    /// The peer's namespace.
    pub peer: Namespace,
}

impl Network {
    /// Creates the three namespaces.
    ///
    /// # Errors
    ///
    /// Returns the output of the `ip` command that failed.
    pub fn new() -> Result<Self, String> {
        let peer = Namespace::new(PEER)?;
        let host = |address: &str, port: &str| {
            let host = Namespace::new(address)?;
            peer.join(port, &host)?;
            host.add_tap("tap0")?;
            Ok::<_, String>(host)
        };
        Ok(Self { hosts: [host("10.77.0.11", "to-s")?, host("10.77.0.12", "to-d")?], peer })
    }
}
