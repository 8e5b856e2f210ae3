//! The state of a later version of the program, for tests of upgrades to it and back. A process
//! with the environment variable `DRIFTLINE_TEST_LATER_STATE` acts as that version. Its value says
//! what the state has:
//!
//! | value | change |
//! | --- | --- |
//! | `may` | another section, which earlier versions skip |
//! | `must` | another section, which must be understood |
//! | `serial` | version 2 of the serial port's section, which is a byte longer |

#[cfg(feature = "testing")]
pub(super) use testing::{change, change_heads, changed_back, changed_back_heads};
#[cfg(not(feature = "testing"))]
pub(super) use unchanged::{change, change_heads, changed_back, changed_back_heads};

/// Without tests there is no later version.
#[cfg(not(feature = "testing"))]
mod unchanged {
    use std::borrow::Cow;

    use driftline_guest::{Section, SectionHead};

    pub(crate) fn change(_: &mut Vec<Section>) {}

    pub(crate) fn change_heads(_: &mut Vec<SectionHead>) {}

    pub(crate) fn changed_back(sections: &[Section]) -> Cow<'_, [Section]> {
        Cow::Borrowed(sections)
    }

    pub(crate) fn changed_back_heads(heads: &[SectionHead]) -> Cow<'_, [SectionHead]> {
        Cow::Borrowed(heads)
    }
}

#[cfg(feature = "testing")]
mod testing {
    use std::borrow::Cow;

    use driftline_guest::{Section, SectionHead, SectionTag};

    use crate::codec;

    /// The added section, and its name.
    const ADDED: (SectionTag, &str) = (SectionTag(0x7ff0), "later state");
    /// The later version of a section.
    const LATER: u16 = codec::VERSION + 1;
    /// The byte that it has more.
    const MORE: u8 = 0xa5;

    /// What the later version has changed.
    #[derive(Clone, Copy, PartialEq, Eq)]
    enum StateChange {
        Added { must_understand: bool },
        SerialPort,
    }

    impl StateChange {
        fn of_this_process() -> Option<Self> {
            match &*std::env::var("DRIFTLINE_TEST_LATER_STATE").ok()? {
                "may" => Some(Self::Added { must_understand: false }),
                "must" => Some(Self::Added { must_understand: true }),
                "serial" => Some(Self::SerialPort),
                _ => None,
            }
        }
    }

    /// Makes sections of this version those of the later one.
    pub(crate) fn change(sections: &mut Vec<Section>) {
        match StateChange::of_this_process() {
            Some(StateChange::Added { must_understand }) => {
                sections.push(Section { must_understand, ..Section::new(ADDED.0, 0, vec![MORE]) });
            }
            Some(StateChange::SerialPort) => {
                let ports = sections.iter_mut().filter(|s| s.tag == SectionTag::SERIAL);
                ports.for_each(|port| {
                    port.bytes[0] = LATER as u8;
                    port.bytes.push(MORE);
                });
            }
            None => {}
        }
    }

    /// Makes heads of this version those of the later one.
    pub(crate) fn change_heads(heads: &mut Vec<SectionHead>) {
        match StateChange::of_this_process() {
            Some(StateChange::Added { must_understand }) => {
                let (tag, name) = (ADDED.0, ADDED.1.to_owned());
                heads.push(SectionHead { tag, name, instance: 0, must_understand, version: 1 });
            }
            Some(StateChange::SerialPort) => {
                let ports = heads.iter_mut().filter(|head| head.tag == SectionTag::SERIAL);
                ports.for_each(|head| head.version = LATER);
            }
            None => {}
        }
    }

    /// Returns the sections that this version would have written, if this process is of the later
    /// version, which reads both.
    pub(crate) fn changed_back(sections: &[Section]) -> Cow<'_, [Section]> {
        let mut sections = sections.to_vec();
        match StateChange::of_this_process() {
            Some(StateChange::Added { .. }) => sections.retain(|section| section.tag != ADDED.0),
            Some(StateChange::SerialPort) => {
                let is_later = |s: &&mut Section| {
                    s.tag == SectionTag::SERIAL && s.bytes.first() == Some(&(LATER as u8))
                };
                sections.iter_mut().filter(is_later).for_each(|port| {
                    port.bytes[0] = codec::VERSION as u8;
                    assert_eq!(port.bytes.pop(), Some(MORE), "the later version's byte");
                });
            }
            None => {}
        }
        Cow::Owned(sections)
    }

    /// Returns the heads that this version would have written, in the same way.
    pub(crate) fn changed_back_heads(heads: &[SectionHead]) -> Cow<'_, [SectionHead]> {
        let mut heads = heads.to_vec();
        match StateChange::of_this_process() {
            Some(StateChange::Added { .. }) => heads.retain(|head| head.tag != ADDED.0),
            Some(StateChange::SerialPort) => {
                let ports = heads.iter_mut().filter(|head| head.tag == SectionTag::SERIAL);
                ports.for_each(|head| head.version = head.version.min(codec::VERSION));
            }
            None => {}
        }
        Cow::Owned(heads)
    }
}
