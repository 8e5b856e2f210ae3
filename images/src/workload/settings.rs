//! The settings of a payload, and the parsing of each. Both the VMM's command line and the guest's
//! are parsed here, key by key.

use super::line::LineBuffer;
use super::page::PAGE_SIZE;
use super::pattern::Pattern;

/// The rate of page writes, for all vCPUs together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub enum WriteRate {
    /// As fast as memory allows, without ever sleeping.
    Max,
    /// Bytes of pages each second.
    BytesPerSecond(u64),
}

/// The ring in which the loop runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub enum PayloadRing {
    /// In the kernel's ring, to test hosts that emulate it.
    Zero,
    /// In user mode, at native speed on every host.
    Three,
}

/// The content between the head and the stamp of a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub enum BodyFill {
    /// Zeros.
    Zero,
    /// Words that do not compress.
    Random,
}

/// The action of a vCPU while no page write is due.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub enum IdleMode {
    /// Halts until its timer fires.
    Halt,
    /// Reads its clock in a loop and never leaves the guest.
    Spin,
}

/// The checks of the loop.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub enum CheckMode {
    /// Each visit checks the head of its page, and a sweep re-reads whole pages.
    Always,
    /// A visit stores one word and reads nothing. All pages are checked once, at the end.
    AtEnd,
}

/// The specification of a payload guest. Every setting has a default, so `payload` alone is a
/// complete specification.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct PayloadSpec {
    /// Size of the working set in bytes, a multiple of the page size.
    pub ws_bytes: u64,
    /// Rate of all vCPUs together.
    pub rate: WriteRate,
    /// Order of visits.
    pub pattern: Pattern,
    /// Seed of all pseudo-random values.
    pub seed: u64,
    /// Privilege level of the loop.
    pub ring: PayloadRing,
    /// Content of page bodies.
    pub fill: BodyFill,
    /// Duration, in seconds; `None` for no limit.
    pub seconds: Option<u64>,
    /// Number of passes; `None` for no limit.
    pub passes: Option<u64>,
    /// Number of vCPUs that write repeatedly, from vCPU 0 on. The others behave as with `once`.
    pub writers: Option<u64>,
    /// Action of a vCPU while nothing is due.
    pub idle: IdleMode,
    /// Number of page writes in a burst of each vCPU.
    pub burst: u64,
    /// Checks of the loop.
    pub check: CheckMode,
    /// Interval between two reports of a vCPU, in milliseconds.
    pub report_ms: u64,
    /// Interval between two requests of a kind to the first virtio disk and the first virtio
    /// interface, in milliseconds; `None` if they are not used.
    pub io_ms: Option<u64>,
}

impl Default for PayloadSpec {
    fn default() -> Self {
        PayloadSpec {
            ws_bytes: 64 << 20,
            rate: WriteRate::BytesPerSecond(320 << 20),
            pattern: Pattern::Seq,
            seed: 1,
            ring: PayloadRing::Three,
            fill: BodyFill::Zero,
            seconds: None,
            passes: None,
            writers: None,
            idle: IdleMode::Halt,
            burst: 1,
            check: CheckMode::Always,
            report_ms: REPORT_MS,
            io_ms: None,
        }
    }
}

/// The reason why a setting is invalid, as the end of a sentence that begins with key and value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SettingRefusal(pub &'static str);

const WS_MAX: u64 = 256 << 30;
const RATE_MAX: u64 = 64 << 30;
/// Pages in the largest burst: 256 MiB.
const BURST_MAX: u64 = 1 << 16;
/// Default interval between two reports.
const REPORT_MS: u64 = 1000;

impl PayloadSpec {
    /// Returns the order in which `vcpu` visits its pages.
    pub fn pattern_of(&self, vcpu: u32) -> Pattern {
        match self.writers {
            Some(writers) if u64::from(vcpu) >= writers => Pattern::Once,
            _ => self.pattern,
        }
    }

    /// Returns the number of pages in the working set.
    pub fn ws_pages(&self) -> u64 {
        self.ws_bytes / PAGE_SIZE
    }

    /// Applies one setting, `key=value`.
    ///
    /// # Errors
    ///
    /// Returns the reason if the key is unknown or the value is not valid.
    pub fn set(&mut self, key: &[u8], value: &[u8]) -> Result<(), SettingRefusal> {
        match key {
            b"ws" => self.ws_bytes = parse_ws(value)?,
            b"rate" => self.rate = parse_rate(value)?,
            b"pattern" => self.pattern = parse_pattern(value)?,
            b"seed" => self.seed = parse_seed(value)?,
            b"ring" => self.ring = parse_ring(value)?,
            b"fill" => self.fill = parse_fill(value)?,
            b"seconds" => self.seconds = Some(parse_end(value)?),
            b"passes" => self.passes = Some(parse_end(value)?),
            b"writers" => self.writers = Some(parse_end(value)?),
            b"idle" => self.idle = parse_idle(value)?,
            b"burst" => self.burst = parse_burst(value)?,
            b"check" => self.check = parse_check(value)?,
            b"report" => self.report_ms = parse_report(value)?,
            b"io" => self.io_ms = Some(parse_io(value)?),
            _ => {
                return Err(SettingRefusal(
                    "is not a setting of the payload (ws, rate, pattern, seed, ring, fill, \
                     seconds, passes, writers, idle, burst, check, report, io)",
                ));
            }
        }
        Ok(())
    }

    /// Appends the settings as `key=value`, each after a `separator`. The settings from `seconds`
    /// on appear only where they differ from their defaults.
    pub fn write(&self, line: &mut LineBuffer, separator: u8) {
        let size = |line: &mut LineBuffer, key: &str, bytes: u64| {
            line.byte(separator).text(key).byte(b'=');
            write_size(line, bytes);
        };
        let number = |line: &mut LineBuffer, key: &str, value: u64| {
            line.byte(separator).text(key).byte(b'=').number(value);
        };
        size(line, "ws", self.ws_bytes);
        match self.rate {
            WriteRate::Max => _ = line.byte(separator).text("rate=max"),
            WriteRate::BytesPerSecond(rate) => size(line, "rate", rate),
        }
        line.byte(separator).text("pattern=");
        write_pattern(line, self.pattern);
        number(line, "seed", self.seed);
        number(line, "ring", if self.ring == PayloadRing::Zero { 0 } else { 3 });
        line.byte(separator).text(if self.fill == BodyFill::Zero {
            "fill=zero"
        } else {
            "fill=random"
        });
        if let Some(seconds) = self.seconds {
            number(line, "seconds", seconds);
        }
        if let Some(passes) = self.passes {
            number(line, "passes", passes);
        }
        if let Some(writers) = self.writers {
            number(line, "writers", writers);
        }
        if self.idle == IdleMode::Spin {
            line.byte(separator).text("idle=spin");
        }
        if self.burst != 1 {
            number(line, "burst", self.burst);
        }
        if self.check == CheckMode::AtEnd {
            line.byte(separator).text("check=end");
        }
        if self.report_ms != REPORT_MS {
            number(line, "report", self.report_ms);
        }
        if let Some(interval) = self.io_ms {
            number(line, "io", interval);
        }
    }
}

fn parse_ws(value: &[u8]) -> Result<u64, SettingRefusal> {
    match parse_size(value) {
        None => Err(SettingRefusal(
            "is not a size such as 64M (a whole number, then nothing, K, M, G, KiB, MiB or GiB)",
        )),
        Some(0) => Err(SettingRefusal("is an empty working set")),
        Some(bytes) if !bytes.is_multiple_of(PAGE_SIZE) => Err(SettingRefusal(
            "is not a multiple of the page size, 4K, in bytes or with K, M, G, KiB, MiB or GiB",
        )),
        Some(bytes) if bytes > WS_MAX => {
            Err(SettingRefusal("is more than the payload can map (256G)"))
        }
        Some(bytes) => Ok(bytes),
    }
}

fn parse_rate(value: &[u8]) -> Result<WriteRate, SettingRefusal> {
    if value == b"max" {
        return Ok(WriteRate::Max);
    }
    match parse_size(value) {
        None => Err(SettingRefusal(
            "is neither `max` nor a size a second such as 320M (a whole number, then nothing, K, \
             M, G, KiB, MiB or GiB)",
        )),
        Some(rate) if !(PAGE_SIZE..=RATE_MAX).contains(&rate) => {
            Err(SettingRefusal("is out of range (from 4K, a page a second, to 64G, or max)"))
        }
        Some(rate) => Ok(WriteRate::BytesPerSecond(rate)),
    }
}

fn parse_pattern(value: &[u8]) -> Result<Pattern, SettingRefusal> {
    Ok(match value {
        b"seq" => Pattern::Seq,
        b"random" => Pattern::Random,
        b"zipf" => Pattern::Zipf,
        b"stride" => Pattern::Stride(Pattern::DEFAULT_STRIDE),
        b"once" => Pattern::Once,
        _ => match value.strip_prefix(b"stride:").map(parse_number) {
            None => {
                return Err(SettingRefusal(
                    "is not a known pattern (seq, random, zipf, stride, stride:K or once)",
                ));
            }
            Some(Some(step @ 1..=0xffff_ffff)) => Pattern::Stride(step as u32),
            Some(_) => {
                return Err(SettingRefusal("has a step that is not a number from 1 to 2^32 - 1"));
            }
        },
    })
}

fn parse_seed(value: &[u8]) -> Result<u64, SettingRefusal> {
    parse_number(value).ok_or(SettingRefusal("is not a number below 2^64"))
}

fn parse_ring(value: &[u8]) -> Result<PayloadRing, SettingRefusal> {
    match value {
        b"0" => Ok(PayloadRing::Zero),
        b"3" => Ok(PayloadRing::Three),
        _ => Err(SettingRefusal("is not a ring the payload can run in (0 or 3)")),
    }
}

fn parse_fill(value: &[u8]) -> Result<BodyFill, SettingRefusal> {
    match value {
        b"zero" => Ok(BodyFill::Zero),
        b"random" => Ok(BodyFill::Random),
        _ => Err(SettingRefusal("is not a known fill (zero or random)")),
    }
}

fn parse_idle(value: &[u8]) -> Result<IdleMode, SettingRefusal> {
    match value {
        b"halt" => Ok(IdleMode::Halt),
        b"spin" => Ok(IdleMode::Spin),
        _ => Err(SettingRefusal("is not an idle mode (halt or spin)")),
    }
}

fn parse_burst(value: &[u8]) -> Result<u64, SettingRefusal> {
    match parse_number(value) {
        Some(burst @ 1..=BURST_MAX) => Ok(burst),
        _ => Err(SettingRefusal("is not a number of pages from 1 to 65536")),
    }
}

fn parse_check(value: &[u8]) -> Result<CheckMode, SettingRefusal> {
    match value {
        b"always" => Ok(CheckMode::Always),
        b"end" => Ok(CheckMode::AtEnd),
        _ => Err(SettingRefusal("is not a check mode (always or end)")),
    }
}

fn parse_report(value: &[u8]) -> Result<u64, SettingRefusal> {
    match parse_number(value) {
        Some(interval @ 10..=60_000) => Ok(interval),
        _ => Err(SettingRefusal("is not an interval from 10 to 60000 ms")),
    }
}

fn parse_io(value: &[u8]) -> Result<u64, SettingRefusal> {
    match parse_number(value) {
        Some(interval @ 1..=60_000) => Ok(interval),
        _ => Err(SettingRefusal("is not an interval from 1 to 60000 ms")),
    }
}

fn parse_end(value: &[u8]) -> Result<u64, SettingRefusal> {
    match parse_number(value) {
        Some(end @ 1..=0xffff_ffff) => Ok(end),
        _ => Err(SettingRefusal("is not a number from 1 to 2^32 - 1")),
    }
}

/// Parses digits; `None` for anything else, and for numbers of more than 64 bits.
pub fn parse_number(text: &[u8]) -> Option<u64> {
    if text.is_empty() {
        return None;
    }
    let mut value: u64 = 0;
    for &byte in text {
        let digit = byte.wrapping_sub(b'0');
        if digit > 9 {
            return None;
        }
        value = value.checked_mul(10)?.checked_add(u64::from(digit))?;
    }
    Some(value)
}

/// Units of sizes, all of them powers of two.
const UNITS: [(&[u8], u32); 6] =
    [(b"K", 10), (b"M", 20), (b"G", 30), (b"KiB", 10), (b"MiB", 20), (b"GiB", 30)];

/// Parses a size: digits, then nothing or one of [`UNITS`]. The guest reads its command line with
/// this, and has no other crates.
fn parse_size(text: &[u8]) -> Option<u64> {
    let in_unit = |(unit, shift): &(&[u8], u32)| Some((text.strip_suffix(*unit)?, *shift));
    let (digits, shift) = UNITS.iter().find_map(in_unit).unwrap_or((text, 0));
    parse_number(digits)?.checked_mul(1 << shift)
}

/// Appends a size with the largest suffix that divides it.
pub(super) fn write_size(line: &mut LineBuffer, bytes: u64) {
    for (shift, suffix) in [(30, b'G'), (20, b'M'), (10, b'K')] {
        if bytes != 0 && bytes.is_multiple_of(1 << shift) {
            line.number(bytes >> shift).byte(suffix);
            return;
        }
    }
    line.number(bytes);
}

/// Appends a pattern as it is written in a specification.
pub(super) fn write_pattern(line: &mut LineBuffer, pattern: Pattern) {
    match pattern {
        Pattern::Seq => line.text("seq"),
        Pattern::Random => line.text("random"),
        Pattern::Zipf => line.text("zipf"),
        Pattern::Stride(Pattern::DEFAULT_STRIDE) => line.text("stride"),
        Pattern::Stride(step) => line.text("stride:").number(u64::from(step)),
        Pattern::Once => line.text("once"),
    };
}
