//! Network interfaces and the vsock device in a configuration and on the command line.

use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use super::device_id::check_id;
use super::error::{ConfigError, in_range};
use super::metadata::NetMetadata;
use super::rate_limits::{NetLimits, RateLimits, read_bandwidth};
use super::spec::{SpecError, Syntax};

/// Maximum number of queue pairs of a network interface.
pub(crate) const MAX_QUEUE_PAIRS: u8 = 8;
/// Smallest MTU, in bytes: that of IPv4.
pub const MIN_MTU: u16 = 68;
/// Maximum length of the name of a Linux network device, in bytes.
const MAX_TAP_BYTES: usize = 15;
/// Smallest context ID of a guest. The smaller ones belong to the hypervisor and the host.
const MIN_CID: u32 = 3;
/// Maximum length of the path of a vsock's unix socket, in bytes. `_` and a port are appended, and
/// Linux accepts 107 bytes.
const MAX_SOCKET_BYTES: usize = 96;

/// An Ethernet address.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
pub struct MacAddr(pub [u8; 6]);

impl MacAddr {
    /// Returns a random unicast, locally administered address. A collision is very unlikely.
    pub fn random() -> Self {
        let [b0, b1, b2, b3, b4, b5, ..] = uuid::Uuid::new_v4().into_bytes();
        Self([b0 & 0xfc | 0x02, b1, b2, b3, b4, b5])
    }

    /// Checks that one interface can have the address.
    ///
    /// # Errors
    ///
    /// It is zero or multicast.
    pub fn check(self) -> Result<Self, ConfigError> {
        let Self(bytes) = self;
        if bytes == [0; 6] || bytes[0] & 1 != 0 {
            let form = "it is zero or multicast";
            return Err(ConfigError::malformed("address of one interface", self.to_string(), form));
        }
        Ok(self)
    }
}

impl fmt::Display for MacAddr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [a, b, c, d, e, g] = self.0;
        write!(f, "{a:02x}:{b:02x}:{c:02x}:{d:02x}:{e:02x}:{g:02x}")
    }
}

impl FromStr for MacAddr {
    type Err = ConfigError;

    fn from_str(s: &str) -> Result<Self, ConfigError> {
        let byte = |part: &str| match part.len() {
            2 if part.bytes().all(|b| b.is_ascii_hexdigit()) => u8::from_str_radix(part, 16).ok(),
            _ => None,
        };
        let bytes: Option<Vec<u8>> = s.split(':').map(byte).collect();
        let bytes = bytes.and_then(|bytes| <[u8; 6]>::try_from(bytes).ok());
        let malformed = || {
            ConfigError::malformed("Ethernet address", s, "six bytes, such as 52:54:00:12:34:56")
        };
        Self(bytes.ok_or_else(malformed)?).check()
    }
}

/// A network interface over a tap.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct NetConfig {
    /// The interface's name.
    pub id: String,
    /// The tap. Another host may use another one, see
    /// [`HostConfig::nets`](super::HostConfig::nets).
    pub tap: String,
    /// The interface's Ethernet address.
    pub mac: MacAddr,
    /// Number of queue pairs, from 1 to 8.
    pub queues: u8,
    /// Largest packet that the driver is told to send, in bytes, from 68. `None` leaves that to the
    /// driver.
    pub mtu: Option<u16>,
    /// Limits of the frames and of their bytes, which include virtio's header of 12 bytes.
    pub limits: NetLimits,
    /// How the guest's requests for its metadata are answered, if they are.
    pub metadata: Option<NetMetadata>,
}

impl NetConfig {
    pub(super) fn check(&self) -> Result<(), ConfigError> {
        check_tap(&self.tap)?;
        self.mac.check()?;
        check_queues(self.queues)?;
        self.metadata.as_ref().map_or(Ok(()), NetMetadata::check)?;
        if let Some(mtu) = self.mtu.filter(|mtu| *mtu < MIN_MTU) {
            let (part, value) = (format!("the MTU of interface \"{}\"", self.id), mtu.into());
            let wanted = format!("{MIN_MTU} to {}", u16::MAX);
            return Err(ConfigError::Size { part, value, unit: "bytes", wanted });
        }
        let check = |limits: &RateLimits, direction| {
            limits.check(&format!("network interface \"{}\" ({direction})", self.id))
        };
        check(&self.limits.receive, "receive")?;
        check(&self.limits.transmit, "transmit")
    }
}

fn check_tap(name: &str) -> Result<String, ConfigError> {
    let allowed = |b: u8| b.is_ascii_graphic() && b != b'/' && b != b':' && b != b'%';
    if name.is_empty()
        || name.len() > MAX_TAP_BYTES
        || !name.bytes().all(allowed)
        || [".", ".."].contains(&name)
    {
        let form = format!("it has 1 to {MAX_TAP_BYTES} characters, without / : and %");
        return Err(ConfigError::malformed("name of a tap", name, form));
    }
    Ok(name.to_owned())
}

fn check_queues(queues: u8) -> Result<u8, ConfigError> {
    in_range("pairs of queues", queues.into(), 1, MAX_QUEUE_PAIRS.into()).map(|()| queues)
}

/// A network interface on the command line:
/// `tap=NAME[,mac=ADDRESS][,id=NAME][,queues=N][,rx-bandwidth=SIZE][,tx-bandwidth=SIZE]`.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct NetSpec {
    /// The tap.
    pub tap: String,
    /// The address that the guest sees.
    pub mac: Option<MacAddr>,
    /// The interface's name.
    pub id: Option<String>,
    /// Number of queue pairs.
    pub queues: Option<u8>,
    /// Limits of a new guest's interface.
    pub limits: NetLimits,
}

static NET: Syntax = Syntax {
    device: "a network interface",
    options: &[
        "tap=NAME",
        "mac=ADDRESS",
        "id=NAME",
        "queues=N",
        "rx-bandwidth=SIZE",
        "tx-bandwidth=SIZE",
    ],
};

impl FromStr for NetSpec {
    type Err = SpecError;

    fn from_str(s: &str) -> Result<Self, SpecError> {
        let options = NET.read(s)?;
        let limits = |key| -> Result<RateLimits, SpecError> {
            let bandwidth = read_bandwidth(&options, key)?;
            Ok(RateLimits { bandwidth, operations: None })
        };
        let queues = options.number("queues", &format!("1 to {MAX_QUEUE_PAIRS}"))?;
        Ok(Self {
            tap: check_tap(options.require("tap")?)?,
            mac: options.get("mac").map(str::parse).transpose()?,
            id: options.get("id").map(check_id).transpose()?,
            queues: queues.map(check_queues).transpose()?,
            limits: NetLimits {
                receive: limits("rx-bandwidth")?,
                transmit: limits("tx-bandwidth")?,
            },
        })
    }
}

/// The vsock device: streams between the guest and unix sockets of the host.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct VsockConfig {
    /// The guest's context ID.
    pub cid: u32,
    /// The socket to which the host's programs connect. A program that the guest connects to
    /// listens at this path with `_` and the port appended.
    pub uds: PathBuf,
}

impl VsockConfig {
    /// Checks that a guest can have the device.
    ///
    /// # Errors
    ///
    /// The context ID is not one of a guest, or the path is empty or too long for a socket.
    pub fn check(&self) -> Result<(), ConfigError> {
        check_cid(self.cid)?;
        check_uds(&self.uds)
    }
}

fn check_cid(cid: u32) -> Result<u32, ConfigError> {
    match (MIN_CID..u32::MAX).contains(&cid) {
        true => Ok(cid),
        false => {
            let form = format!("it is a number from {}", cid_range());
            Err(ConfigError::malformed("context ID of a guest", cid.to_string(), form))
        }
    }
}

/// Returns the context IDs that a guest can have, for errors.
fn cid_range() -> String {
    format!("{MIN_CID} to {}", u32::MAX - 1)
}

fn check_uds(path: &Path) -> Result<(), ConfigError> {
    match path.as_os_str().len() {
        1..=MAX_SOCKET_BYTES => Ok(()),
        len => Err(ConfigError::Size {
            part: "the path of the vsock's unix socket".to_owned(),
            value: len as u64,
            unit: "bytes",
            wanted: format!("1 to {MAX_SOCKET_BYTES}"),
        }),
    }
}

/// A vsock on the command line: `cid=N,uds=PATH`; for an arriving guest `uds=PATH` is enough.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct VsockSpec {
    /// The guest's context ID.
    pub cid: Option<u32>,
    /// The unix socket.
    pub uds: PathBuf,
}

static VSOCK: Syntax = Syntax { device: "a vsock", options: &["cid=N", "uds=PATH"] };

impl FromStr for VsockSpec {
    type Err = SpecError;

    fn from_str(s: &str) -> Result<Self, SpecError> {
        let options = VSOCK.read(s)?;
        let uds = PathBuf::from(options.require("uds")?);
        check_uds(&uds)?;
        let cid = options.number("cid", &cid_range())?;
        Ok(Self { cid: cid.map(check_cid).transpose()?, uds })
    }
}

#[cfg(test)]
mod tests {
    use super::super::rate_limits::RateLimit;
    use super::*;

    #[test]
    fn addresses_are_read_as_they_are_written() {
        let mac: MacAddr = "52:54:00:12:aB:0f".parse().unwrap();
        assert_eq!(mac, MacAddr([0x52, 0x54, 0, 0x12, 0xab, 0x0f]));
        assert_eq!(mac.to_string().parse(), Ok(mac));
        for bad in
            ["", "52:54:00:12:34", "52:54:00:12:34:5", "52:54:00:12:34:56:78", "+2:54:0:1:2:3"]
        {
            assert!(bad.parse::<MacAddr>().unwrap_err().to_string().contains(bad));
        }
        assert!(
            "01:00:00:00:00:01".parse::<MacAddr>().unwrap_err().to_string().contains("multicast")
        );
        for _ in 0..100 {
            assert_eq!(MacAddr::random().check().unwrap().0[0] & 3, 2);
        }
    }

    #[test]
    fn options_are_read_and_refused_by_name() {
        let spec: NetSpec = "tap=t0,mac=02:00:00:00:00:01,id=wan,queues=4".parse().unwrap();
        assert_eq!((spec.tap.as_str(), spec.queues), ("t0", Some(4)));
        assert_eq!(spec.id.as_deref(), Some("wan"));
        let refused = |s: &str| s.parse::<NetSpec>().unwrap_err().to_string();
        assert!(refused("mac=02:00:00:00:00:01").contains("lacks tap=NAME"));
        assert!(refused("tap=a/b").contains("a/b"));
        assert!(refused("tap=1234567890123456").contains("1234567890123456"));
        assert!(refused("tap=t,queues=9").contains("9 pairs"));
        assert!(refused("tap=t,queues=0").contains("0 pairs"));
        assert!(refused("tap=t,fast").contains("\"fast\""));
        let spec: NetSpec = "tap=t,tx-bandwidth=8M".parse().unwrap();
        let bandwidth = Some(RateLimit { size: 1 << 20, refill_ms: 125, one_time_burst: 0 });
        assert_eq!(spec.limits.transmit, RateLimits { bandwidth, operations: None });
        assert!(spec.limits.receive.is_none());
        assert!(refused("tap=t,rx-bandwidth=0").contains("\"0\" is not a valid bandwidth"));
        assert!(refused("tap=t,rx-bandwidth=fast").contains("\"fast\" is not a valid bandwidth"));
        let spec: VsockSpec = "cid=3,uds=/tmp/v".parse().unwrap();
        assert_eq!(spec, VsockSpec { cid: Some(3), uds: "/tmp/v".into() });
        let refused = |s: &str| s.parse::<VsockSpec>().unwrap_err().to_string();
        assert!(refused("cid=2,uds=/v").contains("\"2\" is not a valid context ID"));
        assert!(refused("cid=3").contains("lacks uds=PATH"));
        assert!(refused(&format!("uds={}", "x".repeat(97))).contains("97 bytes"));
    }
}
