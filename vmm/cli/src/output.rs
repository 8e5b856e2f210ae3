//! Owns all printing: results go to stdout and everything else to stderr; figures have units.

use std::fmt::Display;
use std::io::{self, ErrorKind, Write};

use serde::Serialize;
use serde_json::ser::{CompactFormatter, Formatter, Serializer};
use tracing::Level;

use super::failure::Failure;
use super::log;

/// Prints a message for the operator on stderr.
pub(crate) fn print_message(message: impl Display) {
    log::message(Level::INFO, &message.to_string());
}

/// Prints a result on stdout. A reader that has closed its end is not an error.
pub(crate) fn print(result: impl Display) -> Result<(), Failure> {
    print_on(result).map(drop)
}

/// Prints one of several results. Returns whether the reader still reads them.
pub(crate) fn print_on(result: impl Display) -> Result<bool, Failure> {
    let mut out = io::stdout().lock();
    match writeln!(out, "{result}").and_then(|()| out.flush()) {
        Ok(()) => Ok(true),
        Err(e) if e.kind() == ErrorKind::BrokenPipe => Ok(false),
        Err(e) => Err(Failure::error(format!("cannot write to stdout: {e}"))),
    }
}

/// Prints a result as one line of JSON.
pub(crate) fn print_json(result: &impl Serialize) -> Result<(), Failure> {
    print(json_line(result)?)
}

/// Formats a result as one line of JSON.
pub(crate) fn json_line(result: &impl Serialize) -> Result<String, Failure> {
    let mut line = Vec::new();
    result.serialize(&mut Serializer::with_formatter(&mut line, RoundedFloats))?;
    Ok(String::from_utf8_lossy(&line).into_owned())
}

/// Compact JSON whose fractions have three digits: 711.725, not 711.7248539999999.
struct RoundedFloats;

impl Formatter for RoundedFloats {
    fn write_f64<W: ?Sized + Write>(&mut self, writer: &mut W, value: f64) -> io::Result<()> {
        let rounded = (value * 1e3).round() / 1e3;
        CompactFormatter.write_f64(writer, if rounded.is_finite() { rounded } else { value })
    }
}

/// Adds up figures from a VMM. A sum that does not fit is the largest number.
pub(crate) fn total(figures: impl IntoIterator<Item = u64>) -> u64 {
    figures.into_iter().fold(0, u64::saturating_add)
}

/// Formats a number of things: `1 page`, `2 pages`, `3 passes`.
pub(crate) fn count(n: u64, thing: &str) -> String {
    let ending = match n {
        1 => "",
        _ if thing.ends_with('s') => "es",
        _ => "s",
    };
    format!("{n} {thing}{ending}")
}

/// Formats aligned rows of a name and a value.
pub(crate) fn table<N: AsRef<str>, V: AsRef<str>>(rows: &[(N, V)]) -> String {
    let width = rows.iter().map(|(name, _)| name.as_ref().len()).max().unwrap_or(0);
    let line = |(name, value): &(N, V)| format!("{:width$}  {}", name.as_ref(), value.as_ref());
    rows.iter().map(line).collect::<Vec<_>>().join("\n")
}

/// Formats a rate in bytes/s, as [`bytes`] does.
pub(crate) fn bytes_per_s(rate: u64) -> String {
    format!("{}/s", bytes(rate))
}

/// Formats a size in powers of two, with one decimal digit unless that is 0.
pub(crate) fn bytes(n: u64) -> String {
    const UNITS: [(&str, u32); 4] = [("TiB", 40), ("GiB", 30), ("MiB", 20), ("KiB", 10)];
    let unit = UNITS.into_iter().find(|&(_, shift)| n >= 1 << shift);
    match unit {
        None => format!("{n} B"),
        Some((name, shift)) => {
            let number = format!("{:.1}", n as f64 / (1u64 << shift) as f64);
            format!("{} {name}", number.strip_suffix(".0").unwrap_or(&number))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_have_binary_units() {
        assert_eq!(bytes(0), "0 B");
        assert_eq!(bytes(1 << 30), "1 GiB");
        assert_eq!(bytes(1536 << 10), "1.5 MiB");
        assert_eq!(bytes((63 << 10) + 1), "63 KiB", "as exact ones");
        assert_eq!((count(1, "page"), count(0, "page")), ("1 page".into(), "0 pages".into()));
        assert_eq!((count(1, "pass"), count(2, "pass")), ("1 pass".into(), "2 passes".into()));
    }

    #[test]
    fn json_fractions_have_three_digits() {
        let line = json_line(&[711.724_853_999, 2.0, 0.0004]).unwrap();
        assert_eq!(line, "[711.725,2.0,0.0]");
    }

    #[test]
    fn tables_are_aligned() {
        assert_eq!(table(&[("a", "1"), ("bcd", "2")]), "a    1\nbcd  2");
    }
}
