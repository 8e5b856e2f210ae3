//! Owns what is printed and how: results to stdout, all else to stderr, figures with units.

use std::fmt::Display;
use std::io::{self, ErrorKind, Write};

use serde::Serialize;
use tracing::Level;

use super::failure::Failure;
use super::log;

/// A sentence for the operator, on stderr.
pub(crate) fn say(message: impl Display) {
    log::sentence(Level::INFO, &message.to_string());
}

/// A result, on stdout. A reader that has gone away has seen enough.
pub(crate) fn print(result: impl Display) -> Result<(), Failure> {
    print_on(result).map(drop)
}

/// One of several results; whether somebody still reads them.
pub(crate) fn print_on(result: impl Display) -> Result<bool, Failure> {
    let mut out = io::stdout().lock();
    match writeln!(out, "{result}").and_then(|()| out.flush()) {
        Ok(()) => Ok(true),
        Err(e) if e.kind() == ErrorKind::BrokenPipe => Ok(false),
        Err(e) => Err(Failure::error(format!("cannot write to stdout: {e}"))),
    }
}

/// A result as one line of JSON.
pub(crate) fn print_json(result: &impl Serialize) -> Result<(), Failure> {
    print(serde_json::to_string(result)?)
}

/// Rows of a name and a value, aligned.
pub(crate) fn table<N: AsRef<str>, V: AsRef<str>>(rows: &[(N, V)]) -> String {
    let width = rows.iter().map(|(name, _)| name.as_ref().len()).max().unwrap_or(0);
    let line = |(name, value): &(N, V)| format!("{:width$}  {}", name.as_ref(), value.as_ref());
    rows.iter().map(line).collect::<Vec<_>>().join("\n")
}

/// A size for people, in powers of two; exact ones stay exact.
pub(crate) fn bytes(n: u64) -> String {
    const UNITS: [(&str, u32); 4] = [("TiB", 40), ("GiB", 30), ("MiB", 20), ("KiB", 10)];
    let unit = UNITS.into_iter().find(|&(_, shift)| n >= 1 << shift);
    match unit {
        None => format!("{n} B"),
        Some((name, shift)) if n.is_multiple_of(1 << shift) => format!("{} {name}", n >> shift),
        Some((name, shift)) => format!("{:.1} {name}", n as f64 / (1u64 << shift) as f64),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_read_well() {
        assert_eq!(bytes(0), "0 B");
        assert_eq!(bytes(1 << 30), "1 GiB");
        assert_eq!(bytes(1536 << 10), "1.5 MiB");
    }

    #[test]
    fn tables_are_aligned() {
        assert_eq!(table(&[("a", "1"), ("bcd", "2")]), "a    1\nbcd  2");
    }
}
