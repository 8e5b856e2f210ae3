//! Addresses of migrations: TCP, unix sockets, inherited descriptors.

use std::fmt;
use std::io;
use std::net::IpAddr;
use std::os::fd::RawFd;
use std::path::PathBuf;
use std::str::FromStr;

/// An address of a migration.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Address {
    /// `tcp:HOST:PORT`, or only `HOST:PORT`.
    Tcp(String),
    /// `unix:PATH`.
    Unix(PathBuf),
    /// `fd:N`, a stream socket that the process was started with.
    Descriptor(RawFd),
}

/// A text that is no address.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error(
    "\"{0}\" is not an address: use tcp:HOST:PORT (such as tcp:10.0.0.2:7001), unix:PATH, or fd:N \
     with a descriptor above 2"
)]
pub struct InvalidAddress(String);

impl Address {
    /// Returns the host of a TCP address, without the brackets of IPv6.
    pub(crate) fn host(&self) -> Option<&str> {
        let Self::Tcp(address) = self else { return None };
        let host = address.rsplit_once(':').map_or(&**address, |(host, _)| host);
        Some(host.strip_prefix('[').and_then(|h| h.strip_suffix(']')).unwrap_or(host))
    }

    /// Whether connections to it may leave this host. The name of a host is not looked up.
    pub fn may_leave_host(&self) -> bool {
        self.host().is_some_and(|host| match host.parse::<IpAddr>() {
            Ok(ip) => !ip.to_canonical().is_loopback(),
            Err(_) => host != "localhost",
        })
    }
}

impl From<InvalidAddress> for io::Error {
    fn from(e: InvalidAddress) -> Self {
        Self::new(io::ErrorKind::InvalidInput, e)
    }
}

impl FromStr for Address {
    type Err = InvalidAddress;

    fn from_str(text: &str) -> Result<Self, InvalidAddress> {
        let invalid = || InvalidAddress(text.to_owned());
        if let Some(path) = text.strip_prefix("unix:") {
            return match path.is_empty() {
                true => Err(invalid()),
                false => Ok(Self::Unix(path.into())),
            };
        }
        if let Some(number) = text.strip_prefix("fd:") {
            // The first three are the standard streams.
            let number = number.parse().ok().filter(|n| *n > 2);
            return number.map(Self::Descriptor).ok_or_else(invalid);
        }
        let address = text.strip_prefix("tcp:").unwrap_or(text);
        match address.rsplit_once(':') {
            Some((host, port)) if !host.is_empty() && port.parse::<u16>().is_ok() => {
                Ok(Self::Tcp(address.to_owned()))
            }
            _ => Err(invalid()),
        }
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tcp(address) => write!(f, "tcp:{address}"),
            Self::Unix(path) => write!(f, "unix:{}", path.display()),
            Self::Descriptor(number) => write!(f, "fd:{number}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_parsed() {
        for (text, shown) in [
            ("tcp:10.0.0.2:7001", "tcp:10.0.0.2:7001"),
            ("host:7001", "tcp:host:7001"),
            ("tcp:[::1]:7001", "tcp:[::1]:7001"),
            ("unix:/run/a.sock", "unix:/run/a.sock"),
            ("fd:3", "fd:3"),
        ] {
            let address: Address = text.parse().unwrap();
            assert_eq!(address.to_string(), shown);
            let host = address.host();
            assert_eq!(host.is_some(), shown.starts_with("tcp:"), "{shown}");
            assert_ne!(host, Some("[::1]"));
            let leaves = address.may_leave_host();
            assert_eq!(leaves, ["tcp:10.0.0.2:7001", "tcp:host:7001"].contains(&shown), "{shown}");
        }
        for text in ["", "host", "tcp:host", "tcp::1", "host:70000", "unix:", "fd:", "fd:2", "fd:x"]
        {
            assert!(text.parse::<Address>().is_err(), "{text}");
        }
    }
}
