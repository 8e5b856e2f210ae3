//! Parses the lines that the payload prints on its console.
//!
//! Each line is printed whole, whatever the other vCPUs print, and ends with a newline. Numbers are
//! decimal unless they begin with `0x`. The order of fields is fixed. A program that reads the
//! lines should skip lines that it does not know.
//!
//! ```text
//! payload ready vcpus=2 ws_pages=16384 pattern=seq rate=320M seed=1
//! payload vcpu=0 t_ms=1000 passes=2 pages=40960 errors=0 max_gap_us=640 gap_us=640
//! payload vcpu=0 done t_ms=5000 passes=12 pages=204800 errors=0 max_gap_us=640 gap_us=212
//! payload vcpu=0 error gfn=0x1000 kind=stale expected_generation=7 found_generation=6 word=1 expected=0x7 found=0x6
//! payload io blocks=120 frames=240
//! payload fault vcpu=0 vector=14 code=0x2 rip=0x101234 cr2=0xdeadbeef cs=0x2b rsp=0x123450
//! payload fatal: this host offers no kvmclock, and the payload has no other clock
//! ```
//!
//! | field | meaning |
//! | --- | --- |
//! | `t_ms` | kvmclock time since this vCPU's loop began |
//! | `passes` | complete rounds through its share |
//! | `pages` | page writes so far |
//! | `errors` | pages found wrong so far; the first ten have an `error` line each |
//! | `max_gap_us` | the longest time between two ticks of its loop, or printed bytes, since it began; intended sleep does not count, late wake-ups do |
//! | `gap_us` | the same since its last line |
//!
//! vCPU 0 prints `ready` before any page is written. Each vCPU prints a report about once a second,
//! or each `report=` milliseconds, and `done` once at its end. With `io=`, vCPU 0 prints `io` in
//! the same interval. `fault` and `fatal` mean that it cannot continue.

use crate::workload::{Mismatch, MismatchKind};

/// The report of one vCPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PayloadReport {
    /// vCPU that reports.
    pub vcpu: u32,
    /// Whether this is its last line.
    pub done: bool,
    /// Milliseconds since its loop began.
    pub t_ms: u64,
    /// Complete rounds through its share.
    pub passes: u64,
    /// Page writes so far.
    pub pages: u64,
    /// Pages found wrong so far.
    pub errors: u64,
    /// Longest gap so far, in microseconds.
    pub max_gap_us: u64,
    /// Longest gap since its last line, in microseconds.
    pub gap_us: u64,
}

impl PayloadReport {
    /// Parses one line; `None` if it is not a report.
    ///
    /// ```
    /// let line = "payload vcpu=1 t_ms=1003 passes=12 pages=1234 errors=0 max_gap_us=15 gap_us=9";
    /// assert_eq!(driftline_images::PayloadReport::parse(line).unwrap().pages, 1234);
    /// ```
    pub fn parse(line: &str) -> Option<PayloadReport> {
        let mut fields = Fields::after(line, "payload ")?;
        let vcpu = fields.small("vcpu")?;
        let done = fields.skip("done");
        let report = PayloadReport {
            vcpu,
            done,
            t_ms: fields.number("t_ms")?,
            passes: fields.number("passes")?,
            pages: fields.number("pages")?,
            errors: fields.number("errors")?,
            max_gap_us: fields.number("max_gap_us")?,
            gap_us: fields.number("gap_us")?,
        };
        fields.end(report)
    }

    /// Returns the reports of the complete lines of a console. Its last line may have been read
    /// before it was written to its end, where a number may still be missing digits.
    ///
    /// ```
    /// let line = "payload vcpu=1 t_ms=1003 passes=12 pages=1234 errors=0 max_gap_us=15 gap_us=9";
    /// let console = format!("{line}\n{line}");
    /// assert_eq!(driftline_images::PayloadReport::all_of(&console).count(), 1);
    /// ```
    pub fn all_of(console: &str) -> impl Iterator<Item = PayloadReport> {
        let complete = console.rfind('\n').map_or("", |end| &console[..end]);
        complete.lines().filter_map(Self::parse)
    }
}

/// Requests that the devices have finished so far.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PayloadIo {
    /// Blocks of the disk that were written and read back, with the same content.
    pub blocks: u64,
    /// Frames that the interface has sent.
    pub frames: u64,
}

/// A line of the payload.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PayloadMessage {
    /// All vCPUs are up and about to begin.
    Ready {
        /// Number of vCPUs.
        vcpus: u32,
        /// Pages in the working set.
        ws_pages: u64,
        /// The pattern, as in a specification.
        pattern: String,
        /// The rate, as in a specification.
        rate: String,
        /// The seed.
        seed: u64,
    },
    /// The report of one vCPU.
    Report(PayloadReport),
    /// What vCPU 0 has done with the devices.
    Io(PayloadIo),
    /// A page with wrong content.
    Error {
        /// vCPU that found the page.
        vcpu: u32,
        /// The mismatch.
        mismatch: Mismatch,
    },
    /// The payload raised an exception and resets. Has the whole line.
    Fault(String),
    /// The payload cannot follow its specification and powers off. Has the reason.
    Fatal(String),
}

impl PayloadMessage {
    /// Parses one line; `None` if the payload does not print such lines.
    pub fn parse(line: &str) -> Option<PayloadMessage> {
        if let Some(report) = PayloadReport::parse(line) {
            return Some(PayloadMessage::Report(report));
        }
        let line = line.trim_end();
        if let Some(reason) = line.strip_prefix("payload fatal: ") {
            return Some(PayloadMessage::Fatal(reason.to_owned()));
        }
        if line.starts_with("payload fault ") {
            return Some(PayloadMessage::Fault(line.to_owned()));
        }
        PayloadMessage::parse_ready(line)
            .or_else(|| PayloadMessage::parse_io(line))
            .or_else(|| PayloadMessage::parse_error(line))
    }

    fn parse_io(line: &str) -> Option<PayloadMessage> {
        let mut fields = Fields::after(line, "payload io ")?;
        let io = PayloadIo { blocks: fields.number("blocks")?, frames: fields.number("frames")? };
        fields.end(PayloadMessage::Io(io))
    }

    fn parse_ready(line: &str) -> Option<PayloadMessage> {
        let mut fields = Fields::after(line, "payload ready ")?;
        let message = PayloadMessage::Ready {
            vcpus: fields.small("vcpus")?,
            ws_pages: fields.number("ws_pages")?,
            pattern: fields.text("pattern")?.to_owned(),
            rate: fields.text("rate")?.to_owned(),
            seed: fields.number("seed")?,
        };
        fields.end(message)
    }

    fn parse_error(line: &str) -> Option<PayloadMessage> {
        let mut fields = Fields::after(line, "payload ")?;
        let vcpu = fields.small("vcpu")?;
        if !fields.skip("error") {
            return None;
        }
        let mismatch = Mismatch {
            gfn: fields.hex("gfn")?,
            kind: MismatchKind::from_name(fields.text("kind")?)?,
            expected_generation: fields.number("expected_generation")?,
            found_generation: fields.number("found_generation")?,
            word: usize::try_from(fields.number("word")?).ok()?,
            expected: fields.hex("expected")?,
            found: fields.hex("found")?,
        };
        fields.end(PayloadMessage::Error { vcpu, mismatch })
    }
}

/// The remaining fields of a line.
struct Fields<'a> {
    rest: std::iter::Peekable<std::str::Split<'a, char>>,
}

impl<'a> Fields<'a> {
    fn after(line: &'a str, prefix: &str) -> Option<Self> {
        Some(Fields { rest: line.trim_end().strip_prefix(prefix)?.split(' ').peekable() })
    }

    fn skip(&mut self, word: &str) -> bool {
        self.rest.next_if_eq(&word).is_some()
    }

    fn text(&mut self, key: &str) -> Option<&'a str> {
        let (found, value) = self.rest.next()?.split_once('=')?;
        (found == key).then_some(value)
    }

    fn number(&mut self, key: &str) -> Option<u64> {
        crate::workload::parse_number(self.text(key)?.as_bytes())
    }

    fn small(&mut self, key: &str) -> Option<u32> {
        u32::try_from(self.number(key)?).ok()
    }

    fn hex(&mut self, key: &str) -> Option<u64> {
        let digits = self.text(key)?.strip_prefix("0x")?;
        if digits.starts_with('+') { None } else { u64::from_str_radix(digits, 16).ok() }
    }

    fn end<T>(mut self, read: T) -> Option<T> {
        self.rest.next().is_none().then_some(read)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn line(report: &PayloadReport) -> String {
        format!(
            "payload vcpu={}{} t_ms={} passes={} pages={} errors={} max_gap_us={} gap_us={}",
            report.vcpu,
            if report.done { " done" } else { "" },
            report.t_ms,
            report.passes,
            report.pages,
            report.errors,
            report.max_gap_us,
            report.gap_us
        )
    }

    proptest! {
        #[test]
        fn a_report_is_read_as_it_was_printed(
            vcpu: u32, done: bool, t_ms: u64, passes: u64, pages: u64, errors: u64,
            gaps_us: (u64, u64)
        ) {
            let (max_gap_us, gap_us) = gaps_us;
            let report =
                PayloadReport { vcpu, done, t_ms, passes, pages, errors, max_gap_us, gap_us };
            prop_assert_eq!(PayloadReport::parse(&line(&report)), Some(report));
            let message = PayloadMessage::parse(&(line(&report) + "\r\n"));
            prop_assert_eq!(message, Some(PayloadMessage::Report(report)));
        }

        #[test]
        fn parser_never_panics(line in "(payload )?(vcpu=1 )?(ready |done |error )?.{0,60}") {
            let _ = PayloadMessage::parse(&line);
        }

        #[test]
        fn truncated_line_is_not_a_report(cut in 0usize..60) {
            let whole =
                "payload vcpu=1 t_ms=1003 passes=12 pages=5 errors=0 max_gap_us=1500 gap_us=";
            prop_assert_eq!(PayloadReport::parse(&whole[..cut]), None);
        }
    }

    #[test]
    fn all_documented_lines_are_read() {
        let documented =
            include_str!("report.rs").lines().filter_map(|line| line.strip_prefix("//! payload "));
        let mut count = 0;
        for line in documented {
            let line = format!("payload {line}");
            assert!(PayloadMessage::parse(&line).is_some(), "{line}");
            count += 1;
        }
        assert_eq!(count, 7);
    }

    #[test]
    fn other_lines_are_not_reports() {
        for line in [
            "",
            "payload",
            "[    0.000000] Linux version 6.12",
            "payload vcpu=0",
            "payload vcpu=x t_ms=1 passes=1 pages=1 errors=0 max_gap_us=1 gap_us=1",
            "payload vcpu=0 t_ms=+1 passes=1 pages=1 errors=0 max_gap_us=1 gap_us=1",
            "payload vcpu=0 t_ms=1 passes=1 pages=1 errors=0 max_gap_us=1 gap_us=1 more=1",
            "payload vcpu=0 passes=1 t_ms=1 pages=1 errors=0 max_gap_us=1 gap_us=1",
        ] {
            assert_eq!(PayloadMessage::parse(line), None, "{line}");
        }
    }
}
