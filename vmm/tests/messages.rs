//! What a person at a terminal is told: of each refusal what failed, where, and what to do about it.
#![allow(clippy::unwrap_used)]

mod common;

use std::os::unix::net::UnixListener;

use common::{Place, fail};

const RUN: &str = "run --guest payload,ws=1M --serial null --backend threads";

/// A command line, with PLACE for the test's directory; its exit code; what is said, as a part.
type Row = (&'static str, i32, &'static str);

const ROWS: &[Row] = &[
    ("RUN --vcpus abc", 2, "invalid value 'abc' for '--vcpus <N>': a guest has 1 to 32 vCPUs"),
    ("RUN --mem 1", 2, "1 byte is not a multiple of 4K; did you mean 1G?"),
    ("RUN --mem 4096", 2, "a guest has from 16M to 16384G of memory; did you mean 4096M?"),
    ("RUN --ring-entries 1000", 2, "it must be a power of two, such as 1024"),
    ("RUN --disk x.img", 2, "a disk wants path=FILE, so: --disk path=x.img"),
    (
        "RUN --disk path=a,fast",
        2,
        "\"fast\" is not an option of a disk: they are path=FILE, readonly,",
    ),
    (
        "run --guest payload,ws=64",
        2,
        "is not a multiple of the page size, 4K; sizes take K, M or G",
    ),
    ("RUN --disk path=PLACE/file,copy", 2, "'copy' of --disk is only for receive-migration"),
    ("RUN --disk path=PLACE/file", 1, "the threads backend has no devices"),
    ("RUN --mem 16000G", 3, "of guest memory does not fit (--mem): this host has "),
    ("RUN --allow-path PLACE/none", 1, "--allow-path PLACE/none: it does not exist"),
    ("RUN --api-sock PLACE", 1, "cannot listen on PLACE: it exists and is not a socket"),
    ("checkpoint --api-sock s --store d --keep 0", 2, "it must be a number of at least 1"),
    ("checkpoint --api-sock s --store d --every 0s", 2, "an interval is at least 1ms"),
    (
        "restore --store d --epoch foo",
        2,
        "a checkpoint has a number; `driftline store ls` lists them",
    ),
    (
        "info --api-sock PLACE/none",
        1,
        "PLACE/none does not exist: is the guest running, and was it started with --api-sock PLACE/none?",
    ),
    ("info --api-sock PLACE/dead", 1, "nothing listens on PLACE/dead: "),
    ("resolve --state-dir PLACE/none --run", 1, "the state directory PLACE/none does not exist: "),
    ("resolve --state-dir PLACE --run", 1, "no migration is in doubt: PLACE has no record of "),
    ("top --api-sock PLACE/dead", 1, "top needs a terminal; use top --once, or top --json"),
    (
        "receive-migration tcp:127.0.0.1:0 --state-dir /proc/none",
        1,
        "cannot write to the state directory /proc/none: ",
    ),
];

#[test]
fn refusals_say_what_where_and_what_to_do() {
    let place = Place::new();
    std::fs::write(place.path("file"), [0; 4096]).unwrap();
    drop(UnixListener::bind(place.path("dead")).unwrap());
    let dir = place.text("file").strip_suffix("/file").unwrap().to_owned();
    let mut wrong = Vec::new();
    for &(line, code, part) in ROWS {
        let line = line.replace("RUN", RUN).replace("PLACE", &dir);
        let part = part.replace("PLACE", &dir);
        let said = fail(code, &line.split(' ').collect::<Vec<_>>());
        if !said.contains(&part) {
            wrong.push(format!("{line}\n  wanted: {part}\n  said: {said}"));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}
