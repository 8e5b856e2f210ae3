//! The order and the bounds of messages in a stream.

use driftline_dirty_tracker::{Gfn, Slot, SlotId};
use zerocopy::IntoBytes;

use super::*;
use crate::protocol::message::{RawRun, runs_head};

const FRAMES: u64 = 4;

fn stream() -> StreamState {
    let slot = Slot { id: SlotId(0), base: Gfn(0), frames: FRAMES };
    StreamState::new(Layout::new([slot]).unwrap(), Vec::new())
}

/// Sends a whole pass of `frames` zero frames.
fn pass(stream: &mut StreamState, pass: u32, frames: u64) -> Result<(), WireError> {
    stream.on(WireMessage::PassBegin { pass, frames })?;
    if frames > 0 {
        let run = RawRun::from(FrameRun { start: Gfn(0), count: frames });
        let bytes = [runs_head(1).as_bytes(), run.as_bytes()].concat();
        stream.on(WireMessage::parse(Tag::Zero, &bytes)?)?;
    }
    let counts = Counts { normal: 0, zero: frames };
    stream.on(WireMessage::PassEnd { pass, counts })?;
    Ok(())
}

#[test]
fn expect_is_bounded_and_precedes_pass_0() {
    let mut stream = stream();
    let expect = |stream: &mut StreamState, start, count| {
        let run = RawRun::from(FrameRun { start: Gfn(start), count });
        let bytes = [runs_head(1).as_bytes(), run.as_bytes()].concat();
        stream.on(WireMessage::parse(Tag::Expect, &bytes)?).map(|_| ())
    };
    expect(&mut stream, 0, 3).unwrap();
    let e = expect(&mut stream, 1, 2).unwrap_err().to_string();
    assert!(e.starts_with("2 expected frames in the rest of memory"), "{e}");
    let e = expect(&mut stream, 3, 2).unwrap_err().to_string();
    assert!(e.contains("EXPECT"), "{e}");
    expect(&mut stream, 3, 1).unwrap();
    pass(&mut stream, 0, 4).unwrap();
    let e = expect(&mut stream, 0, 1).unwrap_err().to_string();
    assert!(e.contains("EXPECT"), "{e}");
}

#[test]
fn passes_are_bounded() {
    let mut stream = stream();
    for n in 0..MAX_PASSES {
        pass(&mut stream, n, 1).unwrap();
    }
    let e = pass(&mut stream, MAX_PASSES, 1).unwrap_err().to_string();
    assert_eq!(e, "4097 passes, more than the 4096 allowed");
}

#[test]
fn empty_passes_are_bounded_also_between_others() {
    let mut stream = stream();
    let mut n = 0;
    for _ in 0..MAX_EMPTY_PASSES {
        pass(&mut stream, n, 0).unwrap();
        pass(&mut stream, n + 1, 2).unwrap();
        n += 2;
    }
    let e = pass(&mut stream, n, 0).unwrap_err().to_string();
    assert_eq!(e, "17 empty passes, more than the 16 allowed");
}

#[test]
fn state_may_precede_only_the_last_pass() {
    let mut stream = stream();
    pass(&mut stream, 0, 2).unwrap();
    let section = || Section::new(driftline_guest::SectionTag(7), 0, vec![1]);
    stream.on(WireMessage::State(section())).unwrap();
    let step = stream.on(WireMessage::PassBegin { pass: 1, frames: 0 }).unwrap();
    let StreamStep::Restore { sections, frames: 0 } = step else { panic!("{step:?}") };
    assert_eq!(sections[..], [section()]);
    let e = stream.on(WireMessage::State(section())).unwrap_err().to_string();
    assert!(e.contains("STATE"), "{e}");
    let counts = Counts::default();
    stream.on(WireMessage::PassEnd { pass: 1, counts }).unwrap();
    for more in [
        WireMessage::PassBegin { pass: 2, frames: 0 },
        WireMessage::State(section()),
        WireMessage::Verify,
    ] {
        let e = stream.on(more).unwrap_err().to_string();
        assert!(e.contains("STATE_END"), "{e}");
    }
    let end = |sections| {
        let counts = Counts { normal: 0, zero: 2 };
        WireMessage::StateEnd { sections, was_running: true, counts }
    };
    let step = stream.on(end(1)).unwrap();
    assert!(matches!(step, StreamStep::Complete { sections, .. } if sections.len() == 1));
}

#[test]
fn whole_state_is_restored_before_the_last_pass() {
    let mut stream = stream();
    pass(&mut stream, 0, 2).unwrap();
    let section = || Section::new(driftline_guest::SectionTag(7), 0, vec![1]);
    let whole = |sections| WireMessage::StateWhole { sections, frames: 3 };
    let e = stream.on(whole(0)).unwrap_err().to_string();
    assert!(e.contains("STATE_WHOLE came where"), "{e}");
    stream.on(WireMessage::State(section())).unwrap();
    let e = stream.on(whole(2)).unwrap_err().to_string();
    assert!(e.contains("2 by the peer's count and 1 by this side's"), "{e}");
    let step = stream.on(whole(1)).unwrap();
    let StreamStep::Restore { sections, frames: 3 } = step else { panic!("{step:?}") };
    assert_eq!(sections[..], [section()]);
    for more in [WireMessage::State(section()), whole(1), WireMessage::Verify] {
        let e = stream.on(more).unwrap_err().to_string();
        assert!(e.contains("where PASS_BEGIN was expected"), "{e}");
    }
    let counts = Counts::default();
    let begun = stream.on(WireMessage::PassBegin { pass: 1, frames: 0 }).unwrap();
    assert!(matches!(begun, StreamStep::Noted), "the state is restored once");
    stream.on(WireMessage::PassEnd { pass: 1, counts }).unwrap();
    let counts = Counts { normal: 0, zero: 2 };
    let end = WireMessage::StateEnd { sections: 1, was_running: true, counts };
    let step = stream.on(end).unwrap();
    assert!(matches!(step, StreamStep::Complete { sections, .. } if sections.len() == 1));
}

#[test]
fn moved_bytes_count_frames_as_they_arrive() {
    let mut stream = stream();
    pass(&mut stream, 0, 3).unwrap();
    assert_eq!(stream.moved_bytes(), 3 * PAGE_SIZE);
    stream.on(WireMessage::PassBegin { pass: 1, frames: 2 }).unwrap();
    assert_eq!(stream.moved_bytes(), 3 * PAGE_SIZE, "announced frames do not count");
    let run = RawRun::from(FrameRun { start: Gfn(1), count: 1 });
    let bytes = [runs_head(1).as_bytes(), run.as_bytes()].concat();
    stream.on(WireMessage::parse(Tag::Zero, &bytes).unwrap()).unwrap();
    assert_eq!(stream.moved_bytes(), 4 * PAGE_SIZE);
}
