//! Hosts that are network namespaces: each with a bridge, and taps on it, joined where the peer is.
//!
//! ```text
//!  source            peer            destination
//!  tap0 - br0 - up0 = to-s - br0 - to-d = up0 - br0 - tap0
//! ```
//!
//! A namespace is removed by whoever made it, and with it all that was in it.

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
            let said = String::from_utf8_lossy(&out.stderr);
            Err(format!("ip {}: {}", args.join(" "), said.trim()))
        }
    }
}

/// A network namespace, in the place of a host.
#[derive(Debug)]
pub struct Namespace {
    name: String,
    address: String,
}

impl Namespace {
    /// A new one with a bridge `br0`, which has `address` (without a prefix).
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

    /// The address of its bridge.
    pub fn address(&self) -> &str {
        &self.address
    }

    /// A tap on its bridge.
    pub fn add_tap(&self, name: &str) -> Result<(), String> {
        self.ip(&["tuntap", "add", "dev", name, "mode", "tap"])?;
        self.ip(&["link", "set", name, "master", "br0", "up"])
    }

    /// A cable from this one's bridge to that of `other`.
    fn join(&self, port: &str, other: &Self) -> Result<(), String> {
        let there = ["type", "veth", "peer", "name", "up0", "netns", &other.name];
        self.ip(&[&["link", "add", "name", port], &there[..]].concat())?;
        self.ip(&["link", "set", port, "master", "br0", "up"])?;
        other.ip(&["link", "set", "up0", "master", "br0", "up"])
    }

    fn ip(&self, args: &[&str]) -> Result<(), String> {
        try_ip(&[&["-n", &self.name], args].concat())
    }

    /// `program` in it, without arguments so far. It keeps the process id that it is started with.
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

/// Two hosts, and the network between them with the peer.
#[derive(Debug)]
pub struct Network {
    /// Hosts with `tap0` each, which a guest can move between.
    pub hosts: [Namespace; 2],
    /// Where the peer is: the bridge that joins the hosts.
    pub peer: Namespace,
}

impl Network {
    /// A new one; an error says what it lacks.
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
